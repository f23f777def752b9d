"""Sparse attention (paper C.4): a model reads a context, and in some layers each token attends to a few others alone.

Two ways, of which a probe of the model tells the one that it obeys. `gathered`: keys and values that a block of
neighbouring tokens looks at are gathered, so that cost and memory fall with their number. `masked`: the others are
masked, which has the same result and saves nothing. Shapes: queries, keys and values are `[batch, heads, seq,
head_dim]`, positions `[batch, seq, size]`: slots of the rows, each token's own always among them, none above it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from .attention_mot import attention_scores, attention_weights, intercepted_attention, intercepted_masks, scaled
from .compat_mot import decoder_layers, run_decoder
from .layers_mot import input_device

logger = logging.get_logger(__name__)

BLOCK = 32  # tokens whose keys are gathered together, since neighbours look at much the same
SPREAD = 4  # a block that looks at more keys than so many times a token's own is halved
AT_ONCE = 64  # blocks that are made at a time
# Of each block of a row: its first token and the one after its last, the slots of its keys, and a mask [tokens, keys],
# 0 where a token may look and -inf where not.
_Blocks = list[tuple[int, int, torch.Tensor, torch.Tensor]]
_Way = Callable[[PreTrainedModel, Mapping[int, torch.Tensor]], AbstractContextManager[set[int]]]

_FOUND: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


@contextmanager
def sparse_attention(model: PreTrainedModel, positions: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """
    While open, the model reads contexts, from their first tokens on, with sparse attention. It is left as it was.

    Args:
        model (`PreTrainedModel`): The model.
        positions (`Mapping[int, torch.Tensor]`): By layer, what each token may look at. Other layers look everywhere.

    Raises:
        `ValueError`: a family whose attention cannot be made sparse.
        `RuntimeError`: the model has passed the attention by.
    """
    if not positions:
        yield
        return
    way = sparse_way(model)
    if way == "masked":
        logger.warning_once(
            f"The attention of {type(model).__name__} is not among transformers' attention functions: it is made "
            "sparse by masks, at the cost of full attention."
        )
    with _WAYS[way](model, positions) as reached:
        yield
    missed = sorted(set(positions) - reached)
    if missed:
        raise RuntimeError(
            f"The target ran past its sparse attention in its layers {missed}. Pass it without torch.compile."
        )


def sparse_way(model: PreTrainedModel) -> str:
    """`"gathered"`, or else `"masked"`: the first way that the model obeys. Raises `ValueError` if it obeys none."""
    if model not in _FOUND:
        obeyed = next((name for name, way in _WAYS.items() if _obeys(model, way)), None)
        if obeyed is None:
            raise ValueError(
                f"The attention of {type(model).__name__} can be made sparse neither by transformers' attention "
                "functions nor by the masks of its layers. Pass replay='full'."
            )
        _FOUND[model] = obeyed
    return _FOUND[model]


@torch.no_grad()
def _obeys(model: PreTrainedModel, way: _Way) -> bool:
    """Whether a model that may look everywhere does as ever, and where it may not, does not know what stands there."""
    device = input_device(model)
    rows, length, depth = 4, 6, len(decoder_layers(model))
    ids = (
        torch.arange(rows * length, device=device).view(rows, length)
        * 7919
        % model.config.get_text_config().vocab_size
    )
    others = torch.cat([ids.roll(1, dims=0)[:, :-1], ids[:, -1:]], dim=1)  # another text before the same last token
    own = torch.arange(length, device=device)[:, None].expand(length, length)
    everything, itself = (part.to(torch.int32).expand(rows, -1, -1) for part in (torch.minimum(own, own.T), own))

    def ends(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with way(model, dict.fromkeys(range(depth), positions)):
            return run_decoder(model, ids, DynamicCache())[:, -1].float()

    def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
        # Another choice of experts, after rounding, may move single rows: the median row decides.
        error = ((one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-12)).median()
        return bool(error > max(1e-3, 4 * torch.finfo(model.dtype).eps))

    native = run_decoder(model, ids, DynamicCache())[:, -1].float()
    return not differ(ends(ids, everything), native) and not differ(ends(ids, itself), ends(others, itself))


@contextmanager
def _gathered(model: PreTrainedModel, positions: Mapping[int, torch.Tensor]) -> Iterator[set[int]]:
    blocks: dict[int, list[_Blocks]] = {}
    for slots in positions.values():  # the layers of a group share theirs
        if id(slots) not in blocks:
            blocks[id(slots)] = [_row_blocks(row.long()) for row in slots]

    def instead(layer_idx, attend, query, key, value, attention_mask, **options):
        if layer_idx not in positions:
            return attend(query, key, value, attention_mask, **options)
        known = {name: options.get(name) for name in ("scaling", "softcap", "s_aux")}
        return attend_to_blocks(blocks[id(positions[layer_idx])], query, key, value, attention_mask, **known), None

    with intercepted_attention(model, instead) as reached:
        yield reached


def _row_blocks(slots: torch.Tensor) -> _Blocks:
    """The blocks of a row, from what its tokens look at, `[seq, size]`."""
    length, size, found = len(slots), BLOCK, []
    todo = torch.arange(0, length, size, device=slots.device)
    while len(todo):
        halved = []
        for starts in todo.split(AT_ONCE):
            tokens = starts[:, None] + torch.arange(size, device=slots.device)
            looked_at = slots[tokens.clamp(max=length - 1)].flatten(1)  # [blocks, tokens · size]
            marks = torch.zeros(len(starts), length, dtype=torch.bool, device=slots.device).scatter_(
                1, looked_at, True
            )
            number = (marks.cumsum(1, dtype=torch.int32).gather(1, looked_at) - 1).unflatten(1, (size, -1)).long()
            keys = marks.nonzero()[:, 1].split(marks.sum(1).tolist())
            for start, own, place in zip(starts.tolist(), keys, number, strict=True):
                if len(own) > SPREAD * slots.shape[1] and size > 1:
                    halved += [half for half in (start, start + size // 2) if half < length]
                    continue
                end = min(start + size, length)
                hidden = torch.full((end - start, len(own)), float("-inf"), device=slots.device)
                found.append((start, end, own, hidden.scatter_(1, place[: end - start], 0.0)))
        todo, size = torch.tensor(halved, dtype=torch.long, device=slots.device), size // 2
    return sorted(found, key=lambda block: block[0])


def attend_to_blocks(
    blocks: list[_Blocks],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attention of each token to the keys of its block that it may look at.

    Args:
        blocks (`list`): Of each row of the batch.
        query, key, value (`torch.Tensor`): Of the same tokens, positions on.
        attention_mask (`torch.Tensor`, *optional*): `[batch or 1, heads or 1, seq, seq]`, bool or additive; what it
            hides stays hidden, but for the token itself. Other forms are of whole rows, and not needed.
        scaling, softcap, s_aux (*optional*): How scores are made, as transformers' attention functions get them.

    Returns:
        `torch.Tensor`: `[batch, seq, heads, head_dim]`.
    """
    mask = attention_mask if attention_mask is not None and attention_mask.dim() == 4 else None
    query, output = scaled(query, scaling), []
    for row, parts in enumerate(blocks):
        row_output = []
        for start, end, keys, hidden in parts:
            keys, hidden = keys.to(key.device), hidden.to(query)
            if mask is not None:
                given = mask[row if len(mask) > 1 else 0, :, start:end].index_select(-1, keys)  # [heads or 1, …]
                own = keys == torch.arange(start, end, device=keys.device)[:, None]
                hidden = hidden + (
                    _as_bias(given | own, query.dtype) if given.dtype == torch.bool else _shown(given, own)
                )
            near, far = (part[row].index_select(1, keys) for part in (key, value))  # [kv_heads, keys, head_dim]
            scores = attention_scores(query[row, :, start:end], near, softcap) + hidden
            weights = attention_weights(scores, s_aux).to(value.dtype)  # [heads, tokens, keys]
            # Query heads that share a value head are neighbours.
            shared = weights.unflatten(0, (len(far), -1)).flatten(1, 2)
            row_output.append((shared @ far).unflatten(1, (-1, end - start)).flatten(0, 1))
        output.append(torch.cat(row_output, dim=1))
    return torch.stack(output).transpose(1, 2).contiguous()


@contextmanager
def _masked(model: PreTrainedModel, positions: Mapping[int, torch.Tensor]) -> Iterator[set[int]]:
    additive = model.config.get_text_config()._attn_implementation == "eager"

    def narrow(layer_idx: int, mask: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
        return _narrowed(mask, positions[layer_idx], hidden, additive)

    with intercepted_masks(model, positions, narrow) as reached:
        yield reached


def _narrowed(mask: torch.Tensor | None, slots: torch.Tensor, hidden: torch.Tensor, additive: bool) -> torch.Tensor:
    """A mask of attention `[batch, heads or 1, seq, seq]` that lets each token look at its positions alone."""
    length = slots.shape[1]
    own = torch.eye(length, dtype=torch.bool, device=hidden.device)
    allowed = torch.zeros(len(slots), 1, length, length, dtype=torch.bool, device=hidden.device)
    allowed.scatter_(3, slots[:, None].long().to(hidden.device), True)
    if mask is None and additive:
        mask = torch.zeros_like(allowed, dtype=hidden.dtype)
    if mask is None or mask.dtype == torch.bool:
        return allowed if mask is None else (mask & allowed) | own
    return _shown(mask, own).masked_fill(~allowed, torch.finfo(mask.dtype).min)


def _as_bias(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))


def _shown(mask: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """An additive mask that hides no token from itself, as it does on pads; its biases stay."""
    return mask.masked_fill(own & (mask <= torch.finfo(mask.dtype).min / 2), 0)


_WAYS: dict[str, _Way] = {"gathered": _gathered, "masked": _masked}
