"""Source states: from an own prefill, or from a cache that the source model already has.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, masks and positions `[batch, seq]`.
"""

from collections.abc import Collection, Sequence

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from .compat_mot import run_decoder
from .geometry_mot import ModelGeometry


class _KeepLayersCache(DynamicCache):
    """Full-length layers; of the layers outside `keep` nothing is stored."""

    def __init__(self, keep: Collection[int] | None):
        super().__init__()
        self.keep = None if keep is None else frozenset(keep)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if self.keep is None or layer_idx in self.keep:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        while len(self.layers) <= layer_idx:
            self.layers.append(self.layer_class_to_replicate())
        return key_states, value_states


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    layers: Collection[int] | None = None,
) -> DynamicCache:
    """
    Runs the model over `input_ids` (`[batch, seq]`, left-padded where `attention_mask` is 0), without its LM head.
    Every kept layer holds all positions, also in sliding-window models. `layers`: the layers to keep, all by default.
    """
    cache = _KeepLayersCache(layers)
    device = model.get_input_embeddings().weight.device
    if attention_mask is None or bool(attention_mask.all()):
        run_decoder(model, input_ids.to(device), cache)
    else:
        mask = attention_mask.to(device)
        run_decoder(model, input_ids.to(device), cache, mask, positions_from_mask(mask))
    return cache


def positions_from_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position ids of left-padded rows: 0 at the first real token; pads get 0."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def check_cache(cache: Cache, geometry: ModelGeometry, layers: Sequence[int], argument: str = "source_cache") -> int:
    """
    Checks a cache against the geometry it should have, and returns its length in tokens.

    Raises:
        `ValueError`: wrong number of layers or shape, lost keys (a sliding layer past its window), mixed dtypes,
            NaN or infinite states, an empty cache.
    """
    if len(cache.layers) != len(geometry.layers):
        raise ValueError(
            f"`{argument}` has {len(cache.layers)} layers, but this translator was made for a source with "
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
    cache: Cache, geometry: ModelGeometry, layers: Sequence[int], position_ids: torch.Tensor
) -> torch.Tensor:
    """
    Position-free keys and raw values of `layers`, side by side: `[batch, seq, sum of the layers' widths]`, per layer
    first all keys' channels, then all values'. `cache` is not changed. Keys of learned absolute positions stay as
    they are: nothing can be taken off.
    """
    states = []
    for layer_idx in layers:
        layer, expected = cache.layers[layer_idx], geometry.layers[layer_idx]
        # A static cache is longer than what it holds.
        keys, values = (part[:, :, : position_ids.shape[1]] for part in (layer.keys, layer.values))
        if expected.position == "rope":
            keys = geometry.rotary[expected.rotary].strip(keys, position_ids)
        states += [keys.transpose(1, 2).flatten(2), values.transpose(1, 2).flatten(2)]  # [batch, seq, channels]
    return torch.cat([part.to(states[0].device) for part in states], dim=-1)
