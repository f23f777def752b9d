"""What goes into a model and its decoder layers while it runs. Shapes: hidden states are `[batch, seq, hidden]`."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from .compat_mot import decoder_layers, run_decoder


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
def layer_inputs(model: PreTrainedModel, layers: Collection[int]) -> Iterator[dict[int, list[Any]]]:
    """While open, keeps the hidden states that go into decoder layers, by layer, each time that one is run in this
    thread. The model is left as it was. Raises `ValueError` for a model that has no list of its layers."""
    found: dict[int, list[Any]] = {layer_idx: [] for layer_idx in layers}
    stack, thread = decoder_layers(model) if found else (), threading.get_ident()

    def keeping(layer_idx: int):
        def hook(module, args, kwargs):
            if threading.get_ident() == thread:
                found[layer_idx].append(args[0] if args else kwargs.get("hidden_states"))

        return hook

    with before_calls((stack[idx], keeping(idx)) for idx in found):
        yield found


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
