"""The attention of a model's layers: what it is called with, and something else in its place, or another mask, for a
while.

Shapes: queries, keys and values are `[batch, heads, seq, head_dim]`.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .compat_mot import decoder_layers, run_decoder
from .layers_mot import before_calls, input_device

# The functions are of all models: one thread at a time puts another one there, for its own calls alone.
_LOCK = threading.RLock()


@contextmanager
def intercepted_attention(model: PreTrainedModel, instead: Callable[..., Any]) -> Iterator[set[int]]:
    """
    While open, `instead` is called where layers of this model (of no other, and in this thread) call one of
    transformers' attention functions. The model itself is not changed.

    Args:
        model (`PreTrainedModel`): The model. Some families (Falcon, Bloom, GPT-Neo, MPT) call no such function.
        instead (`Callable`): `instead(layer_idx, attend, query, key, value, attention_mask, **options)`, to return
            what `attend(query, key, value, attention_mask, **options)` does, the function in whose place it is.

    Returns:
        `set[int]`: The layers that have called it, filled as they do.
    """
    place = {part: idx for idx, layer in enumerate(decoder_layers(model)) for part in layer.modules()}
    implementation = model.config.get_text_config()._attn_implementation
    thread, reached = threading.get_ident(), set()
    with _LOCK:
        original = ALL_ATTENTION_FUNCTIONS.get(implementation)

        def function(module, query, key, value, attention_mask, **options):
            # Only "eager" is in no list: each family brings its own.
            attend = original or sys.modules[type(module).__module__].eager_attention_forward
            attend, layer_idx = partial(attend, module), place.get(module)
            if layer_idx is None or threading.get_ident() != thread:
                return attend(query, key, value, attention_mask, **options)
            reached.add(layer_idx)
            return instead(layer_idx, attend, query, key, value, attention_mask, **options)

        ALL_ATTENTION_FUNCTIONS[implementation] = function
        try:
            yield reached
        finally:
            del ALL_ATTENTION_FUNCTIONS[implementation]
            if ALL_ATTENTION_FUNCTIONS.get(implementation) is not original:  # somebody else's override
                ALL_ATTENTION_FUNCTIONS[implementation] = original


@contextmanager
def intercepted_masks(
    model: PreTrainedModel, layers: Collection[int], instead: Callable[..., torch.Tensor]
) -> Iterator[set[int]]:
    """
    While open, decoder layers get another attention mask. The model is left as it was.

    Args:
        model (`PreTrainedModel`): The model; also one that calls no attention function of transformers.
        layers (`Collection[int]`): The layers.
        instead (`Callable`): `instead(layer_idx, mask, hidden)` returns the mask to use in place of `mask`, a tensor
            that is bool or additive, or `None`; `hidden` is what goes into the layer.

    Returns:
        `set[int]`: The layers that have got theirs, filled as they do.
    """
    reached: set[int] = set()

    def hook_of(layer_idx: int) -> Callable[..., Any]:
        def replace(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            names = list(inspect.signature(module.forward).parameters)
            if "attention_mask" not in names:
                return args, kwargs
            reached.add(layer_idx)
            place, hidden = names.index("attention_mask"), args[0] if args else kwargs["hidden_states"]
            # All else stays as it is passed: gradient checkpointing looks at the cache by its name.
            if place < len(args):
                return (*args[:place], instead(layer_idx, args[place], hidden), *args[place + 1 :]), kwargs
            return args, {**kwargs, "attention_mask": instead(layer_idx, kwargs.get("attention_mask"), hidden)}

        return replace

    stack = decoder_layers(model)
    with before_calls((stack[idx], hook_of(idx)) for idx in layers):
        yield reached


@torch.no_grad()
def missed_layers(model: PreTrainedModel) -> list[int]:
    """The layers of a model whose attention [`intercepted_attention`] does not see, found by running one token."""
    token = torch.zeros(1, 1, dtype=torch.long, device=input_device(model))
    with intercepted_attention(model, lambda layer_idx, attend, *args, **options: attend(*args, **options)) as reached:
        run_decoder(model, token, DynamicCache())
    return sorted(set(range(len(decoder_layers(model)))) - reached)


def attention_scores(query: torch.Tensor, key: torch.Tensor, softcap: float | None = None) -> torch.Tensor:
    """Scores `[…, query_heads, queries, keys]` before the mask, of scaled queries. Query heads that share a key head
    are neighbours."""
    shared = query.unflatten(-3, (key.shape[-3], -1))  # […, kv_heads, group, queries, head_dim]
    scores = shared.flatten(-3, -2) @ key.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    return scores.unflatten(-2, shared.shape[-3:-1]).flatten(-4, -3)


def scaled(query: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Queries that hold the model's scaling, by default that of their width."""
    return query * (query.shape[-1] ** -0.5 if scaling is None else scaling)


def attention_weights(scores: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax over the keys, in fp32. `sinks`: a learned score per head, as GPT-OSS has them, whose share is lost."""
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    sink = sinks.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]
