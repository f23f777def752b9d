"""Plan `uncertain`: the target runs single tokens of a context again, on top of a translation of all.

They run in one pass, at their own positions: in each layer their keys and values take their slots in the cache, and
each of them attends to all that stands before it, translated or run again. Shapes: keys and values are `[batch,
kv_heads, seq, head_dim]`, ids, masks and positions `[batch, seq]`, slots `[batch, tokens]`; rows are left-padded.
"""

import copy
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel

from .attention_mot import intercepted_masks
from .compat_mot import chunked_layers, decoder_layers, hides_by_itself, layer_windows, run_decoder

# By model, the attention implementations in which it was found to obey. In training mode dropout hides it, so that
# what was not found is looked for again.
_OBEYS: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()


def choose_slots(
    log_error: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, prefix: int, count: int
) -> torch.Tensor:
    """
    The slots of the `count` tokens of each row that are most likely wrong, `[batch, count]`, ascending; of equal ones
    the first.

    Args:
        log_error (`torch.Tensor`): What is predicted of each token, `[batch, seq]`.
        mask, positions (`torch.Tensor`): Of the same tokens; each row has at least `count` besides its prefix.
        prefix (`int`): Special tokens that each row starts with, which are never chosen.
    """
    own = (mask.bool() & (positions >= prefix)).to(log_error.device)
    order = log_error.float().masked_fill(~own, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values.to(mask.device)


def run_slots(
    model: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> Cache:
    """
    The model runs the tokens in `slots`, on top of what it has of the others. Gradients flow through.

    Args:
        model (`PreTrainedModel`): The model.
        cache (`Cache`): Full-length layers, of the first tokens of `ids` or of all; it is not changed. What stands in
            `slots` is not read.
        ids, mask, positions (`torch.Tensor`): Of all tokens.
        slots (`torch.Tensor`): The tokens to run, ascending in each row, none of them a pad; those that `cache` lacks
            among them.

    Returns:
        `Cache`: Of all tokens.

    Raises:
        `ValueError`: a model that lays its own mask over the tokens, as [`check_runs_slots`].
        `RuntimeError`: the model has left the cache aside, or its masks.
    """
    check_runs_slots(model)
    run, _, missed = _run_slots(model, cache, ids, mask, positions, slots)
    if missed:
        raise RuntimeError(
            f"The target ran past the cache, or the masks, in its layers {missed}. Turn gradient checkpointing off, "
            "put the target in eval mode, and pass it without torch.compile."
        )
    return run


def check_runs_slots(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a model that cannot run single tokens in the midst of others."""
    config = model.config.get_text_config()
    attention, found = config._attn_implementation, _OBEYS.setdefault(model, set())
    if attention in found:
        return
    if attention not in ("eager", "sdpa") or hides_by_itself(config) or not _obeys(model):
        way_out = "Put it in eval mode" if model.training else "Load it with attn_implementation='sdpa'"
        raise ValueError(
            f"`replay` uncertain runs single tokens in the midst of a context, but {type(model).__name__}, with the "
            f"attention {attention}{' and in training mode' * model.training}, takes no mask for that. {way_out}, or "
            "pass tokens:32 (so many last tokens)."
        )
    found.add(attention)


@torch.no_grad()
def _obeys(model: PreTrainedModel) -> bool:
    """Whether tokens that are run again, on top of what is right elsewhere and wrong in their slots, are as before."""
    device = model.get_input_embeddings().weight.device
    rows, length, again = 4, 7, [1, 3, 4]
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(rows * length, device=device).view(rows, length) * 7919 % vocabulary
    native = DynamicCache()
    expected = run_decoder(model, ids, native)[:, again].float()
    for layer in native.layers:
        for states in (layer.keys, layer.values):
            states[:, :, again] = states[:, :, again].roll(1, dims=0) + 1
    positions = torch.arange(length, device=device).expand(rows, -1)
    slots = torch.tensor(again, device=device).expand(rows, -1)
    _, hidden, missed = _run_slots(model, native, ids, torch.ones_like(ids), positions, slots)
    # Another choice of experts, after rounding, may move single rows: the median decides.
    error = ((hidden.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-12)).median()
    return not missed and bool(error <= max(1e-3, 4 * torch.finfo(model.dtype).eps))


def _run_slots(model, cache, ids, mask, positions, slots) -> tuple[Cache, torch.Tensor, list[int]]:
    """As [`run_slots`]; and the last hidden states of the tokens, and the layers that passed cache or mask by."""
    scattering = _ScatteringCache(cache, slots, ids.shape[1])
    run_positions = positions.gather(1, slots)
    config = model.config.get_text_config()
    depth, additive = len(decoder_layers(model)), config._attn_implementation == "eager"
    windows, chunked = layer_windows(config), chunked_layers(config)
    kinds = {(windows[idx], idx in chunked) for idx in range(depth)}
    seen = {kind: _seen(mask, positions, run_positions, *kind) for kind in kinds}

    def instead(layer_idx: int, given: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
        return _mask_of(seen[windows[layer_idx], layer_idx in chunked], given, hidden, additive)

    with intercepted_masks(model, range(depth), instead) as reached:
        hidden = run_decoder(model, ids.gather(1, slots), scattering, mask, run_positions)
    missed = (set(range(depth)) - reached) | (set(range(len(cache.layers))) - scattering.done)
    return scattering, hidden, sorted(missed)


def _seen(
    mask: torch.Tensor, positions: torch.Tensor, run_positions: torch.Tensor, window: int | None, chunked: bool
) -> torch.Tensor:
    """Which slots each token that is run may look at, `[batch, 1, tokens, seq]`."""
    keys, queries = positions[:, None], run_positions[:, :, None]
    seen = mask.bool()[:, None] & (keys <= queries)
    if window is not None:
        seen = seen & (keys // window == queries // window if chunked else queries - keys < window)
    return seen[:, None]


def _mask_of(seen: torch.Tensor, given: torch.Tensor | None, hidden: torch.Tensor, additive: bool) -> torch.Tensor:
    """`seen` in the form of the mask that it takes the place of, whose biases by distance stay."""
    seen = seen.to(hidden.device)
    if given is None and additive:
        given = torch.zeros_like(seen, dtype=hidden.dtype)
    if given is None or given.dtype == torch.bool:
        return seen
    least = torch.finfo(given.dtype).min
    return given.masked_fill(given <= least / 2, 0).masked_fill(~seen, least)


class _ScatteringCache(DynamicCache):
    """Layers of all tokens: what the model computes is put into the slots of the tokens that it runs."""

    def __init__(self, cache: Cache, slots: torch.Tensor, length: int):
        super().__init__()
        self.slots, self.length = slots, length
        self.done: set[int] = set()
        for layer in map(copy.copy, cache.layers):
            lacking = (0, 0, 0, length - layer.keys.shape[2])
            layer.keys, layer.values = F.pad(layer.keys, lacking), F.pad(layer.values, lacking)
            self.layers.append(layer)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        layer.keys, layer.values = self._put(layer.keys, key_states), self._put(layer.values, value_states)
        self.done.add(layer_idx)
        return layer.keys, layer.values

    def _put(self, states: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        index = self.slots.to(own.device)[:, None, :, None].expand(-1, own.shape[1], -1, own.shape[3])
        return states.scatter(2, index, own.to(states))

    def get_mask_sizes(self, *args, **kwargs) -> tuple[int, int]:
        return self.length, 0  # nothing is added to what is there
