"""What the baselines share: source states by layer, and states by target layer as a cache.

Shapes: states are `[batch, seq, channels]`, keys and values in a cache `[batch, kv_heads, seq, head_dim]`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_mot.cache_mot import TranslatedCache
from hf_mot.configuration_mot import MoTConfig
from hf_mot.geometry_mot import LayerGeometry
from hf_mot.modeling_mot import MoTModel, MoTOutput

if TYPE_CHECKING:  # which makes arms of baselines, and so imports them
    from hf_mot.evaluation.batch import Batch


def make_shell(source: dict[str, Any], target: dict[str, Any], source_layers: Sequence[int]) -> MoTModel:
    """A translator of the pair, of which only alignment, capture and assembly are used. Arguments: both contracts."""
    config = MoTConfig(source=source, target=target, source_layers=list(source_layers), rank=1, embedding_window=0)
    return MoTModel(config).eval()


def key_and_value_widths(layers: Sequence[LayerGeometry]) -> list[int]:
    """Channels of the keys, then of the values, of each layer."""
    return [layer.kv_heads * dim for layer in layers for dim in (layer.key_dim, layer.value_dim)]


def as_cache(batch: "Batch", shell: MoTModel, inputs, states: Sequence[torch.Tensor]) -> TranslatedCache:
    """The target's cache of position-free states: keys, then values, of each of its layers."""
    heads = [layer.kv_heads for layer in shell.target_geometry.layers for _ in range(2)]
    shaped = [part.unflatten(-1, (count, -1)).transpose(1, 2) for part, count in zip(states, heads, strict=True)]
    output = MoTOutput(key_states=tuple(shaped[0::2]), value_states=tuple(shaped[1::2]))
    return batch.models.assemble(shell, output, inputs)
