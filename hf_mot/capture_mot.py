"""Source states: from an own prefill, or from a cache that the source model already has.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, masks and positions `[batch, seq]`.
"""

from collections.abc import Collection, Sequence

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.utils import logging

from .compat_mot import run_decoder
from .geometry_mot import ModelGeometry
from .guidance_mot import Guidance, Guide, recorded_guidance
from .layers_mot import input_device, layer_inputs
from .rows_mot import check_rows, positions_from_mask

logger = logging.get_logger(__name__)


class Stopped(Exception):
    """Ends a forward pass of which nobody needs the rest."""


class PrefilledCache(DynamicCache):
    """Full-length layers; of the layers outside `keep` nothing is stored. When the last of `keep`, and of those that a
    guide listens to, is through, the pass that fills the cache ends, by `Stopped`. `guidance`: what was heard;
    `hidden_states`: what went into a decoder layer, where that was asked for, `[batch, seq, hidden]`."""

    def __init__(self, keep: Collection[int] | None, guide: Guide | None = None):
        super().__init__()
        self.keep = None if keep is None else frozenset(keep)
        # A layer attends after its update: a guide hears it before the next one's.
        needed = [*(keep or ()), *(layer_idx + 1 for layer_idx in (guide.layers if guide else ()))]
        self.last = max(needed) if keep is not None and needed else None
        self.guidance: Guidance | None = None
        self.hidden_states: torch.Tensor | None = None

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if self.keep is None or layer_idx in self.keep:
            key_states, value_states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.fill(layer_idx + 1)
        if layer_idx == self.last:
            raise Stopped
        return key_states, value_states

    def fill(self, depth: int) -> None:
        """Adds empty layers."""
        while len(self.layers) < depth:
            self.layers.append(self.layer_class_to_replicate())


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    layers: Collection[int] | None = None,
    guide: Guide | None = None,
    hidden_layer: int | None = None,
) -> PrefilledCache:
    """
    Runs the model over `input_ids` (`[batch, seq]`, left-padded where `attention_mask` is 0), without its LM head.
    Every kept layer holds all positions, also in sliding-window models. `layers`: the layers to keep, all by default;
    the pass ends with the keys and values of the last of them. If empty, none is kept and the pass runs through, or as
    far as the guide needs. `guide`: what of the attention is kept, as the cache's `guidance`. `hidden_layer`: a
    decoder layer, not above the last one that is kept, whose input is kept too, as the cache's `hidden_states`.
    """
    cache = PrefilledCache(layers, guide)
    device = input_device(model)
    padded = attention_mask is not None and not bool(attention_mask.all())
    mask = attention_mask.to(device) if padded else None
    wanted = () if hidden_layer is None else (hidden_layer,)
    with recorded_guidance(model, guide, mask) as cache.guidance, layer_inputs(model, wanted) as inputs:
        try:
            run_decoder(model, input_ids.to(device), cache, *((mask, positions_from_mask(mask)) if padded else ()))
        except Stopped:
            cache.fill(model.config.get_text_config().num_hidden_layers)
    if hidden_layer is not None:
        if len(inputs[hidden_layer]) != 1:
            raise RuntimeError(
                f"{type(model).__name__} ran past its layer {hidden_layer}, whose input is read. Pass the model "
                "without torch.compile."
            )
        cache.hidden_states = inputs[hidden_layer][0]
    return cache


def check_cache(cache: Cache, geometry: ModelGeometry, layers: Sequence[int], argument: str = "source_cache") -> int:
    """
    Checks a cache against the geometry it should have, and returns its length in tokens.

    Raises:
        `ValueError`: wrong number of layers or shape, lost keys (a sliding layer past its window), mixed dtypes,
            NaN or infinite states, an empty cache.
    """
    depth = len(cache.layers)
    while depth > len(geometry.layers) and not isinstance(cache.layers[depth - 1].keys, torch.Tensor):
        depth -= 1  # a model's last layers may read the keys and values of lower ones
    if depth != len(geometry.layers):
        raise ValueError(
            f"`{argument}` has {depth} layers, but this translator was made for a source with "
            f"{len(geometry.layers)}. Load the translator of your pair."
        )
    seq_length = max(cache.layers[layer_idx].get_seq_length() for layer_idx in layers)
    if seq_length == 0:
        raise ValueError(f"`{argument}` is empty. Run the source model over the context first.")
    dtypes = set()
    for layer_idx in layers:
        layer, expected = cache.layers[layer_idx], geometry.layers[layer_idx]
        if not isinstance(layer.keys, torch.Tensor):
            raise ValueError(f"`{argument}` holds no states for layer {layer_idx}, which the translator reads.")
        if layer.keys.shape[-2] < seq_length:
            raise ValueError(
                f"`{argument}` has lost keys: layer {layer_idx} holds the last {layer.keys.shape[-2]} of {seq_length} "
                "positions (a sliding window). Run the source with a cache that keeps everything: "
                "source(**inputs, cache=DynamicCache())."
            )
        came = (layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1])
        if came != (expected.kv_heads, expected.key_dim, expected.value_dim):
            raise ValueError(
                f"Layer {layer_idx} of `{argument}` has (kv_heads, key_dim, value_dim) = {came}, expected "
                f"{(expected.kv_heads, expected.key_dim, expected.value_dim)}. Load the translator of your pair."
            )
        dtypes |= {layer.keys.dtype, layer.values.dtype}
        if not (torch.isfinite(layer.keys).all() and torch.isfinite(layer.values).all()):
            raise ValueError(
                f"Layer {layer_idx} of `{argument}` holds NaN or infinite states. Check the source model's dtype "
                "(float16 overflows in some families; use bfloat16 or float32)."
            )
    if len(dtypes) > 1:
        raise ValueError(f"`{argument}` mixes dtypes ({', '.join(sorted(map(str, dtypes)))}). Use one dtype.")
    return seq_length


def source_states(
    cache: Cache,
    geometry: ModelGeometry,
    layers: Sequence[int],
    position_ids: torch.Tensor,
    position_free: bool = True,
) -> torch.Tensor:
    """
    Position-free keys (or, if not `position_free`, keys as they are) and raw values of `layers`, side by side:
    `[batch, seq, sum of the layers' widths]`, per layer first all keys' channels, then all values'. `cache` is not
    changed. Keys of learned absolute positions stay as they are: nothing can be taken off.
    """
    states = []
    for layer_idx in layers:
        layer = cache.layers[layer_idx]
        # A static cache is longer than what it holds.
        keys, values = (part[:, :, : position_ids.shape[1]] for part in (layer.keys, layer.values))
        if position_free:
            keys, values = geometry.strip_positions(layer_idx, keys, values, position_ids)
        states += [keys.transpose(1, 2).flatten(2), values.transpose(1, 2).flatten(2)]  # [batch, seq, channels]
    return torch.cat([part.to(states[0].device) for part in states], dim=-1)


def split_layers(
    states: torch.Tensor, geometry: ModelGeometry, layers: Sequence[int]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """States `[batch, seq, width]` as [`source_states`] puts them side by side, as keys and values of each layer."""
    shapes = [
        (geometry.layers[layer_idx].kv_heads, dim)
        for layer_idx in layers
        for dim in (geometry.layers[layer_idx].key_dim, geometry.layers[layer_idx].value_dim)
    ]
    pieces = states.split([heads * dim for heads, dim in shapes], dim=-1)
    # [batch, kv_heads, seq, head_dim]
    shaped = [piece.unflatten(-1, shape).transpose(1, 2) for piece, shape in zip(pieces, shapes, strict=True)]
    return tuple(shaped[0::2]), tuple(shaped[1::2])


def read_cache(
    cache: Cache,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    geometry: ModelGeometry,
    layers: Sequence[int],
    prefix_ids: Sequence[int],
    position_free: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Checks a cache that the source model already has against its ids, and takes the states out.

    Args:
        cache (`Cache`): The source's cache.
        input_ids (`torch.Tensor`): Its ids `[batch, seq]`; one surplus trailing id is dropped.
        attention_mask (`torch.Tensor`, *optional*): 0 on the pads of padded rows.
        geometry ([`ModelGeometry`]): The source's.
        layers (`Sequence[int]`): Layers to read.
        prefix_ids (`Sequence[int]`): Special ids that the source is expected to start with.
        position_free (`bool`, *optional*, defaults to `True`): Whether to take the positions off the keys.

    Returns:
        `tuple(torch.Tensor)`: States `[batch, seq, width]`, ids and mask, cut to what the cache holds.

    Raises:
        `ValueError`: ids, mask and cache that do not belong together, or a cache that [`check_cache`] refuses.
    """
    check_rows(input_ids, attention_mask, "source_input_ids", "source_attention_mask")
    length = check_cache(cache, geometry, layers)
    if input_ids.shape[1] - length not in (0, 1):
        raise ValueError(
            f"`source_input_ids` has {input_ids.shape[1]} ids, but `source_cache` holds {length} positions. Pass "
            "the ids that the cache was made from (the `sequences` of generate, which are one longer, are fine)."
        )
    rows = cache.layers[layers[0]].keys.shape[0]
    if rows != len(input_ids):
        raise ValueError(
            f"`source_cache` has {rows} rows, but `source_input_ids` has {len(input_ids)}. Pass the ids of "
            "each row; the cache of a beam search holds beams, not what was returned."
        )
    if attention_mask is not None and attention_mask.shape[1] > input_ids.shape[1]:
        raise ValueError(
            f"`source_attention_mask` covers {attention_mask.shape[1]} positions, but `source_input_ids` has "
            f"{input_ids.shape[1]}. Pass the mask that belongs to the ids."
        )
    if attention_mask is not None and attention_mask.shape[1] < length:
        raise ValueError(
            f"`source_attention_mask` covers {attention_mask.shape[1]} of the {length} positions that the cache "
            "holds. Extend it with ones for generated tokens."
        )
    input_ids = input_ids[:, :length]
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, :length].to(input_ids.device)
    if not bool(mask.any(dim=1).all()):
        raise ValueError("`source_attention_mask` has a row without any token: there is no context to translate.")
    if bool((mask.long().diff(dim=1) != 0).sum(dim=1).gt(2 - mask[:, 0].long()).any()):
        raise ValueError(
            "`source_attention_mask` has pads between the tokens of a row: the cache does not tell whether the "
            "positions behind them count these. Run the source over rows that are padded at their ends alone."
        )
    first = mask.long().argmax(dim=1, keepdim=True) + torch.arange(len(prefix_ids), device=mask.device)
    expected = torch.tensor(prefix_ids, dtype=input_ids.dtype, device=input_ids.device)
    if prefix_ids and (first.max() >= length or not bool((input_ids.gather(1, first) == expected).all())):
        logger.warning(
            f"`source_cache` does not start with the special ids {list(prefix_ids)} that this translator was fitted "
            "with; the translation will be worse. Run the source over these ids and then the context."
        )
    positions = positions_from_mask(mask)
    states = source_states(cache, geometry, layers, positions)
    _check_positions(states, input_ids, mask)
    if not position_free:
        states = source_states(cache, geometry, layers, positions, position_free=False)
    return states, input_ids, mask


def _check_positions(states: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor) -> None:
    """The first token of a row sees only itself: without its position, equal ones have equal states. Where they have
    not, the rows were run at positions that count the pads."""
    pads = mask.long().argmax(dim=1)
    first_ids = input_ids.gather(1, pads[:, None])
    if pads.min() == pads.max() or first_ids.min() != first_ids.max():
        return
    first = states[torch.arange(len(states)), pads.to(states.device)].float()
    if (first - first[:1]).abs().max() > 0.05 * first.abs().max():
        raise ValueError(
            "`source_cache` was made at positions that count the pads of its left-padded rows. Run the source "
            "with `position_ids` derived from the attention mask, as generate does, or row by row."
        )
