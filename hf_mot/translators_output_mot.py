"""What a translator gives, layer by layer.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, other states `[batch, seq, channels]`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers.utils import ModelOutput

from .capture_mot import split_layers
from .geometry_mot import ModelGeometry


class LayerStates(NamedTuple):
    """An output by target layer: keys, values, and what goes into the attention where that is translated instead."""

    key_states: dict[int, torch.Tensor]
    value_states: dict[int, torch.Tensor]
    attention_inputs: dict[int, torch.Tensor]


@dataclass
class MoTOutput(ModelOutput):
    """
    Output of [`MoTModel`].

    Args:
        key_states (`tuple[torch.Tensor, ...]`): Keys per translated target layer, position-free unless the config
            says otherwise (`position_free`).
        value_states (`tuple[torch.Tensor, ...]`): Values per translated target layer.
        attention_inputs (`tuple[torch.Tensor, ...]`, *optional*): For each of `restored_layers`, of which there are no
            keys and values, what goes into its attention, `[batch, seq, hidden]`.
        hidden_states (`torch.Tensor`, *optional*): What goes into the target's `resume_layer`, `[batch, seq, hidden]`.
        log_error (`torch.Tensor`, *optional*): `[batch, seq]`, the log of how wrong each token is likely to be (its
            mean standardised squared error), of a translator that predicts it.
    """

    key_states: tuple[torch.Tensor, ...] | None = None
    value_states: tuple[torch.Tensor, ...] | None = None
    attention_inputs: tuple[torch.Tensor, ...] | None = None
    hidden_states: torch.Tensor | None = None
    log_error: torch.Tensor | None = None

    def by_layer(self, translated: Sequence[int], restored: Collection[int]) -> LayerStates:
        """The states under their layers: all of `translated`, or the upper ones of them."""
        activations = self.attention_inputs or ()
        layers = translated[len(translated) - len(self.key_states) - len(activations) :]
        plain = [layer_idx for layer_idx in layers if layer_idx not in restored]
        keys, values = (dict(zip(plain, own, strict=True)) for own in (self.key_states, self.value_states))
        own = [layer_idx for layer_idx in layers if layer_idx in restored]
        return LayerStates(keys, values, dict(zip(own, activations, strict=True)))


def layer_width(geometry: ModelGeometry, restored: Collection[int], layer_idx: int) -> int:
    """Channels a token that a translator writes for a target layer."""
    return geometry.hidden_dim if layer_idx in restored else geometry.layers[layer_idx].width


def split_output(
    states: torch.Tensor,
    geometry: ModelGeometry,
    layers: Sequence[int],
    restored: Collection[int],
    key_norms: Mapping[str, nn.Module],
    predicts_error: bool = False,
) -> MoTOutput:
    """What a translator module writes, `[batch, seq, width]`, of each of `layers`; with [`KeyNorm`]s of some. What is
    left is the hidden state that the target resumes from, and at last the predicted error."""
    log_error = None
    if predicts_error:
        states, log_error = states[..., :-1], states[..., -1]
    keys, values, activations = [], [], []
    widths = [layer_width(geometry, restored, layer_idx) for layer_idx in layers]
    *parts, left = states.split([*widths, states.shape[-1] - sum(widths)], dim=-1)
    for layer_idx, part in zip(layers, parts, strict=True):
        if layer_idx in restored:
            activations.append(part)
            continue
        (own,), own_values = split_layers(part, geometry, [layer_idx])
        keys.append(key_norms[str(layer_idx)](own) if str(layer_idx) in key_norms else own)
        values += own_values
    hidden = left if left.shape[-1] else None
    return MoTOutput(tuple(keys), tuple(values), tuple(activations) if activations else None, hidden, log_error)
