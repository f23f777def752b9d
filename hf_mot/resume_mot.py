"""The upper layers of a model alone, from a hidden state that goes into the lowest of them: plan resume.

The model's own forward pass makes masks and positions of the tokens, and passes its lower layers by.

Shapes: hidden states are `[batch, seq, hidden]`, keys and values `[batch, kv_heads, seq, head_dim]`, ids and masks
`[batch, seq]`.
"""

from contextlib import suppress

import torch
from transformers import PreTrainedModel

from .capture_mot import PrefilledCache, Stopped
from .compat_mot import decoder_layers, run_decoder
from .geometry_mot import ModelGeometry
from .layers_mot import replaced_layers, require_read


def check_resumable(model: PreTrainedModel, geometry: ModelGeometry) -> None:
    """Refuses a model of which not every layer caches its own keys and values, or gets one hidden state a token.
    Raises `ValueError`."""
    cached, depth = len(geometry.layers), len(decoder_layers(model))
    if depth != cached:
        raise ValueError(
            f"{type(model).__name__} caches {cached} of its {depth} layers: the others read keys and values of layers "
            "below, so that it cannot resume above these. Use a plan without resume."
        )
    if geometry.hidden_dim is None:
        raise ValueError(
            f"The layers of {type(model).__name__} do not each get one hidden state a token, or its contract is of an "
            "earlier release and does not tell, so that it cannot resume from one. Use a plan without resume."
        )


def resume(
    model: PreTrainedModel,
    layer_idx: int,
    hidden_states: torch.Tensor,
    input_ids: torch.Tensor,
    *padding: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """
    Keys and values of the layers from `layer_idx` up; the pass ends with those of the last. Gradients flow to the
    hidden states.

    Args:
        model (`PreTrainedModel`): The target.
        layer_idx (`int`): The lowest layer that runs.
        hidden_states (`torch.Tensor`): What goes into it, `[batch, seq, hidden]`.
        input_ids (`torch.Tensor`): The tokens, `[batch, seq]`.
        *padding (`torch.Tensor`, *optional*): Mask and positions of padded rows, `[batch, seq]` each.

    Raises:
        `RuntimeError`: the model has left the cache aside.
    """
    depth = len(decoder_layers(model))
    cache = PrefilledCache(range(layer_idx, depth))

    def instead(idx, run, came):
        if idx < layer_idx:
            return (came,)
        return run(hidden_states.to(came).contiguous() if idx == layer_idx else came)

    with replaced_layers(model, instead), suppress(Stopped):
        run_decoder(model, input_ids, cache, *padding)
    upper = cache.layers[layer_idx:]
    require_read([*range(layer_idx + len(upper), depth)])
    return [(layer.keys, layer.values) for layer in upper]
