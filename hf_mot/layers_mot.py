"""What goes into a model and its decoder layers while it runs, and something else in their place for a while.

Shapes: hidden states are `[batch, seq, hidden]`.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from .compat_mot import decoder_layers, run_decoder

# One thread at a time puts other forwards there, for its own calls alone.
_LOCK = threading.RLock()


def first_state(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The hidden state that a layer, or its attention, is called with. Below may lie a layer that returns a tuple."""
    came = args[0] if args else kwargs.get("hidden_states")
    while isinstance(came, tuple):
        came = came[0]
    return came


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its ids."""
    return model.get_input_embeddings().weight.device


@contextmanager
def before_calls(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """While open, each module's hook `(module, args, kwargs)` is called before it, and what that returns, if anything,
    is taken for `args` and `kwargs`. The modules are left as they were."""
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def module_inputs(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, list[Any]]]:
    """While open, keeps the hidden states that modules are called with, under their numbers, each time that one is run
    in this thread. The modules are left as they were."""
    found: dict[int, list[Any]] = {number: [] for number in modules}
    thread = threading.get_ident()

    def keeping(number: int):
        def hook(module, args, kwargs):
            if threading.get_ident() == thread:
                found[number].append(first_state(args, kwargs))

        return hook

    with before_calls((module, keeping(number)) for number, module in modules.items()):
        yield found


@contextmanager
def layer_inputs(model: PreTrainedModel, layers: Collection[int]) -> Iterator[dict[int, list[Any]]]:
    """While open, keeps what goes into decoder layers, by layer, as [`module_inputs`]. Raises `ValueError` for a model
    that has no list of its layers."""
    stack = decoder_layers(model) if layers else ()
    with module_inputs({layer_idx: stack[layer_idx] for layer_idx in layers}) as found:
        yield found


@contextmanager
def replaced_layers(model: PreTrainedModel, instead: Callable[[int, Callable, Any], Any]) -> Iterator[None]:
    """
    While open, decoder layers of this model return what `instead` does, where this thread runs them. All that the
    model does around them (embeddings, masks, positions) stays its own. The model is left as it was.

    Args:
        model (`PreTrainedModel`): The model. Raises `ValueError` for one that has no list of its layers.
        instead (`Callable`): `instead(layer_idx, run, hidden_states)`, where `run(hidden_states)` is the layer itself.
            A layer that is not run returns `(hidden_states,)`, for the next one here: some families take the first
            part of what a layer returns, others all of it.
    """
    thread = threading.get_ident()

    def replacing(layer_idx: int, forward: Callable):
        def replaced(*args, **kwargs):
            if threading.get_ident() != thread:
                return forward(*args, **kwargs)

            def run(states):
                if args:
                    return forward(states, *args[1:], **kwargs)
                return forward(**{**kwargs, "hidden_states": states})

            return instead(layer_idx, run, first_state(args, kwargs))

        return replaced

    with _LOCK:
        stack = list(decoder_layers(model))
        before = [vars(layer).get("forward") for layer in stack]  # accelerate, for one, has put its own there
        try:
            for layer_idx, layer in enumerate(stack):
                layer.forward = replacing(layer_idx, layer.forward)
            yield
        finally:
            for layer, own in zip(stack, before, strict=True):
                if own is not None:
                    layer.forward = own
                else:
                    vars(layer).pop("forward", None)


def require_read(missed: Collection[int]) -> None:
    """Raises `RuntimeError` for layers that were run and handed nothing to the cache. Gradient checkpointing in
    training mode, for one, takes the cache away without a word."""
    if missed:
        raise RuntimeError(
            f"The target ran past the cache in its layers {sorted(missed)}. Turn gradient checkpointing off and put "
            "the target in eval mode."
        )


@torch.no_grad()
def probe_hidden_dim(model: PreTrainedModel) -> int | None:
    """The width of what goes into each decoder layer, found by running a few tokens; `None` where that is not one
    hidden state a token (Gemma-3n's layers get several)."""
    try:
        depth = len(decoder_layers(model))
    except ValueError:
        return None
    ids = torch.zeros(2, 3, dtype=torch.long, device=input_device(model))
    with layer_inputs(model, range(depth)) as found:
        run_decoder(model, ids, DynamicCache())
    shapes = {tuple(part.shape) if isinstance(part, torch.Tensor) else None for own in found.values() for part in own}
    shape = shapes.pop() if len(shapes) == 1 else None
    once = all(len(own) == 1 for own in found.values())
    return shape[2] if once and shape is not None and len(shape) == 3 and shape[:2] == ids.shape else None
