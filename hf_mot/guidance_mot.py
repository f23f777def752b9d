"""Guidance (paper C.4): where a model looks while it reads, for another one to look there too.

Of its attention, averaged over heads, the positions of the largest shares are kept, block by block of the tokens that
look: memory grows with the context, not with its square. Shapes: queries and keys are `[batch, heads, seq, head_dim]`,
positions `[batch, seq, size]`: slots of the rows, pads counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from .attention_mot import attention_scores, attention_weights, intercepted_attention, missed_layers, scaled
from .channels_mot import depth_ratio
from .compat_mot import layer_windows

GUIDE_LAYERS = 4  # at most: what they cost the source falls with them
BLOCK = 64  # tokens that look at a time: their scores stay in a CPU's cache
MAX_SCORES = 2**24  # of a block, on all heads and rows

_MISSED: WeakKeyDictionary[PreTrainedModel, list[int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Guide:
    """
    What is to be kept of a model's attention.

    Args:
        layers (`tuple[int, ...]`): The layers to listen to.
        size (`int`): Positions per token and layer (the paper's S).
    """

    layers: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Guidance:
    """
    Where a model has looked.

    Args:
        size (`int`): Positions per token that were asked for.
        positions (`Mapping[int, torch.Tensor]`): By layer, `[batch, seq, min(size, seq)]` (`int32`): for each token
            itself, then its row's first one (where it may look at that: attention sinks stand there), then the others
            that it has looked at, most first; -1 where it could not look at so many.
    """

    size: int
    positions: Mapping[int, torch.Tensor]


def choose_guide(guided: Sequence[int], size: int, source_windows: Sequence[int | None], target_depth: int) -> Guide:
    """
    Few layers of a source (`GUIDE_LAYERS` at most), which guide all of a target's: at the depth of these (paper C.4: π
    by depth ratio), with full attention where the source has such.

    Args:
        guided (`Sequence[int]`): The target layers that are guided.
        size (`int`): Positions per token.
        source_windows (`Sequence[int | None]`): How many tokens the sliding window of each source layer holds, `None`
            for full attention.
        target_depth (`int`): Layers of the target.
    """
    count = min(GUIDE_LAYERS, len(guided))
    groups = [guided[len(guided) * part // count : len(guided) * (part + 1) // count] for part in range(count)]
    full = [idx for idx, window in enumerate(source_windows) if window is None] or range(len(source_windows))
    nearest = _nearest(full, len(source_windows), target_depth)
    return Guide(tuple(sorted({nearest[group[len(group) // 2]] for group in groups})), size)


def _nearest(layers: Sequence[int], source_depth: int, target_depth: int) -> list[int]:
    """For each target layer the one of some source layers that is nearest to its own relative depth."""
    wanted = depth_ratio(source_depth, target_depth)
    return [min(layers, key=lambda layer_idx: abs(layer_idx - own)) for own in wanted]


@contextmanager
def recorded_guidance(
    model: PreTrainedModel, guide: Guide | None, attention_mask: torch.Tensor | None = None
) -> Iterator[Guidance | None]:
    """
    Listens while the model reads contexts, from their first tokens on. `attention_mask` `[batch, seq]` is 0 on their
    pads. Without a guide nothing is done.

    Raises:
        `ValueError`: a family that does not show its attention.
    """
    if guide is None:
        yield None
        return
    check_guide(model)
    windows, positions = layer_windows(model.config.get_text_config()), {}

    def record(layer_idx, attend, query, key, value, mask, **options):
        if layer_idx in guide.layers:
            positions[layer_idx] = most_attended(
                query.detach(),
                key.detach(),
                guide.size,
                attention_mask,
                windows[layer_idx],
                **{name: options.get(name) for name in ("scaling", "softcap", "s_aux")},
            )
        return attend(query, key, value, mask, **options)

    with intercepted_attention(model, record):
        yield Guidance(guide.size, positions)


def check_guide(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a model that does not show its attention."""
    if model not in _MISSED:
        _MISSED[model] = missed_layers(model)
    if _MISSED[model]:
        raise ValueError(
            f"{type(model).__name__} computes the attention of its layers {_MISSED[model]} outside of transformers' "
            "attention functions, so it does not show where it looks, and cannot guide replay='sparse:…'. Pass "
            "replay='full'."
        )


@torch.no_grad()
def most_attended(
    query: torch.Tensor,
    key: torch.Tensor,
    size: int,
    attention_mask: torch.Tensor | None = None,
    window: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    The positions that attention falls on most, as in [`Guidance`].

    Args:
        query, key (`torch.Tensor`): Of the same tokens, positions on.
        size (`int`): Positions per token.
        attention_mask (`torch.Tensor`, *optional*): `[batch, seq]`, 0 on pads.
        window (`int`, *optional*): How many tokens the layer's sliding window holds.
        scaling, softcap, s_aux (*optional*): How scores are made, as transformers' attention functions get them.

    Returns:
        `torch.Tensor`: `[batch, seq, min(size, seq)]` (`int32`).
    """
    batch, heads, length, _ = query.shape
    real = torch.ones(batch, length) if attention_mask is None else attention_mask
    real = real.bool().to(query.device)
    first = real.long().argmax(dim=1)[:, None, None]
    slots = torch.arange(length, device=query.device)
    found = torch.full((batch, length, min(size, length)), -1, dtype=torch.int32, device=query.device)
    query, key = scaled(query.float(), scaling), key.float()
    block = max(1, min(BLOCK, MAX_SCORES // (batch * heads * length)))
    for start in range(0, length, block):
        end = min(start + block, length)
        own, before = slots[start:end, None], slots[:end]
        allowed = (before <= own) & real[:, None, :end]  # [batch, block, end]
        if window is not None:
            allowed &= own - before < window
        scores = attention_scores(query[:, :, start:end], key[:, :, :end], softcap)
        # Without pads and window, all slots below the block may be looked at.
        masked = slice(start if attention_mask is None and window is None else 0, end)
        hidden = ~allowed[..., masked]
        scores[..., masked].masked_fill_(hidden[:, None], torch.finfo(scores.dtype).min)
        share = attention_weights(scores, s_aux).mean(dim=1)  # [batch, block, end]
        share[..., masked].masked_fill_(hidden, -1)
        share.masked_fill_(allowed & (before == first), 2)
        share[..., start:].masked_fill_(before[start:] == own, 3)
        shares, places = share.topk(min(size, end), dim=-1)
        found[:, start:end, : places.shape[-1]] = places.masked_fill(shares < 0, -1)
    return found


def guide_target(
    guidance: Guidance, source_mask: torch.Tensor, aligned: torch.Tensor, source_depth: int, target_depth: int
) -> dict[int, torch.Tensor]:
    """
    Where the source has looked, for a target to look there too: by target layer, of the source layer that is nearest
    in depth, in the target's slots, `[batch, target_seq, size]`.

    Args:
        guidance ([`Guidance`]): Of the source.
        source_mask (`torch.Tensor`): `[batch, seq]`, 0 on the pads of its rows.
        aligned (`torch.Tensor`): `[batch, target_seq]`, as in [`carried_over`].
        source_depth, target_depth (`int`): Layers of both models.

    Raises:
        `ValueError`: guidance of other rows.
    """
    for positions in guidance.positions.values():
        if len(positions) != len(source_mask) or positions.shape[1] < source_mask.shape[1]:
            raise ValueError(
                f"`guidance` is of {len(positions)} rows of {positions.shape[1]} source tokens, but the cache is of "
                f"{len(source_mask)} of {source_mask.shape[1]}. Pass what guide(…) tells of the same ids."
            )
    carried = {idx: carried_over(positions, aligned, guidance.size) for idx, positions in guidance.positions.items()}
    nearest = _nearest(list(carried), source_depth, target_depth) if carried else []
    return {layer_idx: carried[guide] for layer_idx, guide in enumerate(nearest)}


def carried_over(positions: torch.Tensor, aligned: torch.Tensor, size: int) -> torch.Tensor:
    """
    Positions among the tokens of one tokenizer, as positions among those of another. A token looks where the one does
    that it is aligned to. What that looks at stands for the tokens aligned to it, or else for the next one, of which
    it is a part; of its own tokens, which are the pieces of a character, those before this one come third.

    Args:
        positions (`torch.Tensor`): `[batch, seq, size]`, as in [`Guidance`].
        aligned (`torch.Tensor`): `[batch, new_seq]`, for each new token the slot of the one that it is aligned to,
            rising; -1 on left pads.
        size (`int`): Positions per token that are kept at most, the most looked at first.

    Returns:
        `torch.Tensor`: `[batch, new_seq, min(size, seq + new_seq)]` (`int32`). Where there are fewer (and on pads), a
        token stands there itself; some stand there twice.
    """
    aligned = aligned.to(positions.device).contiguous()
    (batch, length), before = aligned.shape, positions.shape[1]
    slots = torch.arange(before, device=aligned.device).expand(batch, -1).contiguous()
    start = torch.searchsorted(aligned, slots)  # the first new token of each old one, [batch, seq]
    end = torch.maximum(torch.searchsorted(aligned, slots, right=True), (start + 1).clamp(max=length))
    own = torch.arange(length, device=aligned.device)[:, None]  # [new_seq, 1]
    rows = torch.arange(batch, device=aligned.device)[:, None]
    real, aligned = (aligned >= 0)[..., None], aligned.clamp(min=0)
    seen = positions[rows, aligned].long()  # [batch, new_seq, size]
    # A token itself, the row's first one, the other tokens that are aligned to the same, and the rest.
    others = min(2, seen.shape[-1])
    seen = torch.cat([seen[..., :others], seen[..., :1], seen[..., others:]], dim=-1)
    rows, valid, seen = rows[..., None], seen >= 0, seen.clamp(min=0)
    first, count = start[rows, seen], (end - start)[rows, seen] * valid
    count[..., :1] = 1
    count[..., others : others + 1] = own - first[..., :1]
    count.masked_fill_(~real, 0)
    last = count.cumsum(dim=-1)
    place = torch.arange(min(size, before + length), device=aligned.device)
    place = place.expand(batch, length, -1).contiguous()
    entry = torch.searchsorted(last, place, right=True)  # which of `seen` fills each place
    inside = entry < seen.shape[-1]
    entry = entry.clamp(max=seen.shape[-1] - 1)
    found = first.gather(-1, entry) + place - (last - count).gather(-1, entry)
    found = torch.where(entry == others, own - 1 - place + (last - count).gather(-1, entry), found)
    found = torch.where(entry == 0, own, found)
    return torch.where(inside & real, found, own).to(torch.int32)
