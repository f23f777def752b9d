"""Keys and values restored from what goes into a layer's attention (paper C.5, MoT-h; HCache, 2410.05004).

The target restores them itself, and none of its weights are read: a layer is run on that state as far as it hands keys
and values to the cache. So its projections, norms and position encoding are in them, whatever the family.

Shapes: activations are `[batch, seq, hidden]`, keys and values `[batch, kv_heads, seq, head_dim]`, ids and masks
`[batch, seq]`.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from .compat_mot import decoder_layers, run_decoder
from .layers_mot import first_state, module_inputs, replaced_layers, require_read


class _Found(Exception):
    """Ends a layer when its keys and values are there."""


class _TellingCache(DynamicCache):
    """Tells what a layer hands on, and ends the layer there."""

    def __init__(self, listener: Callable[[int, torch.Tensor, torch.Tensor], None]):
        super().__init__()
        self.listener = listener

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.listener(layer_idx, key_states, value_states)
        raise _Found


def _run_to_keys(model: PreTrainedModel, layers: Collection[int], listener: Callable, *rows: torch.Tensor) -> None:
    """Runs each of `layers` on the tokens' embeddings as far as its keys and values, which the listener is told, and
    no other layer."""

    def instead(layer_idx, run, hidden_states):
        if layer_idx in layers:
            with suppress(_Found):
                run(hidden_states)
        if layer_idx == max(layers):
            raise _Found
        return (hidden_states,)

    ids, *rest = rows
    with replaced_layers(model, instead), suppress(_Found):
        run_decoder(model, ids, _TellingCache(listener), *rest)


@torch.no_grad()
def attention_modules(model: PreTrainedModel, layers: Collection[int]) -> dict[int, nn.Module]:
    """
    The attention of layers: the module in which a layer makes its keys and values, found by running one token as far.

    Raises:
        `ValueError`: a layer that hands no keys and values on, or whose attention is not called with one hidden state
            a token of the layer's own width.
    """
    stack, thread = decoder_layers(model), threading.get_ident()
    running: list[tuple[nn.Module, Any]] = []  # what has begun and not ended, with what it was called with
    found: dict[int, nn.Module] = {}

    def begin(module, args, kwargs):
        if threading.get_ident() == thread:
            running.append((module, first_state(args, kwargs)))

    def end(module, args, output):
        if threading.get_ident() == thread:
            running.pop()

    def listener(layer_idx, *states):
        module, came = running[-1]
        given = dict(running)[stack[layer_idx]]
        if isinstance(came, torch.Tensor) and came.shape == given.shape and came.dim() == 3:
            found[layer_idx] = module

    hooks = []
    for part in {part for layer_idx in layers for part in stack[layer_idx].modules()}:
        hooks += [part.register_forward_pre_hook(begin, with_kwargs=True), part.register_forward_hook(end)]
    token = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    try:
        _run_to_keys(model, layers, listener, token)
    finally:
        for hook in hooks:
            hook.remove()
    missing = sorted(set(layers) - set(found))
    if missing:
        raise ValueError(
            f"The attention of {type(model).__name__} makes no keys and values of one hidden state a token in its "
            f"layers {missing}, so they cannot be restored from one. Leave these out of `restored_layers`."
        )
    return found


@contextmanager
def attention_inputs(model: PreTrainedModel, layers: Collection[int]) -> Iterator[dict[int, list[Any]]]:
    """While open, keeps what goes into the attention of layers, by layer, each time that it is run in this thread.
    Raises `ValueError` as [`attention_modules`]."""
    with module_inputs(attention_modules(model, layers) if layers else {}) as found:
        yield found


def restore(
    model: PreTrainedModel,
    activations: Mapping[int, torch.Tensor],
    input_ids: torch.Tensor,
    *padding: torch.Tensor,
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """
    Keys (position encoding on) and values that layers of the model make of the inputs of their attention. Costs their
    projections. Gradients flow to the activations.

    Args:
        model (`PreTrainedModel`): The target.
        activations (`Mapping[int, torch.Tensor]`): By layer, what goes into its attention, `[batch, seq, hidden]`.
        input_ids (`torch.Tensor`): The tokens, `[batch, seq]`; only their number matters.
        *padding (`torch.Tensor`, *optional*): Mask and positions of padded rows, `[batch, seq]` each.

    Returns:
        `dict[int, tuple[torch.Tensor, torch.Tensor]]`: By layer.

    Raises:
        `ValueError`: as [`attention_modules`].
        `RuntimeError`: the model has left the cache aside.
    """
    if not activations:
        return {}
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    thread = threading.get_ident()

    def putting(activation: torch.Tensor):
        def hook(module, args, kwargs):
            if threading.get_ident() != thread:
                return None
            came = first_state(args, kwargs)
            state = activation.to(came).contiguous()  # under a device map each layer lives where the model put it

            def put(part):  # some get the same state again, as queries for one
                return state if part is came else part

            return tuple(map(put, args)), {name: put(part) for name, part in kwargs.items()}

        return hook

    def listener(layer_idx, *states):
        found[layer_idx] = states

    modules = attention_modules(model, activations)
    hooks = [
        modules[layer_idx].register_forward_pre_hook(putting(activation), with_kwargs=True)
        for layer_idx, activation in activations.items()
    ]
    try:
        _run_to_keys(model, activations, listener, input_ids, *padding)
    finally:
        for hook in hooks:
            hook.remove()
    require_read(set(activations) - set(found))
    return found
