"""Every difference between the supported transformers releases, and nothing else."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig


def cache_argument(model: nn.Module) -> str:
    """The name under which `model.forward` takes a cache: `cache`, or `past_key_values` in older releases."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def output_cache(output: Any) -> Cache | None:
    """The cache in a model's or a generate call's output, whatever this release calls it."""
    name = _output_name(output)
    return None if name is None else output[name]


def set_output_cache(output: Any, cache: Cache | None) -> None:
    """Puts another cache, or none, into an output that has one."""
    name = _output_name(output)
    if name is not None:
        output[name] = cache


def _output_name(output: Any) -> str | None:
    # In the keys alone: an output of 5.24 that is asked for the older name logs that it is deprecated.
    return next((name for name in ("cache", "past_key_values") if name in output.keys()), None)


def pop_cache_argument(kwargs: dict[str, Any]) -> Cache | None:
    """Takes the cache out of a generate call's keyword arguments; as in transformers, `cache` wins."""
    past_key_values = kwargs.pop("past_key_values", None)
    cache = kwargs.pop("cache", None)
    return past_key_values if cache is None else cache


def decoder_of(model: nn.Module) -> nn.Module:
    """A causal LM without its LM head."""
    decoder = model.get_decoder()
    # ModernBERT's `decoder` is the head.
    return model.base_model if decoder is model.get_output_embeddings() else decoder


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal LM, lowest first. Raises `ValueError` for a model that has no list of them."""
    depth = model.config.get_text_config().num_hidden_layers
    for part in decoder_of(model).modules():
        if isinstance(part, nn.ModuleList) and len(part) == depth:
            return part
    raise ValueError(f"{type(model).__name__} has no list of its {depth} layers, so parts of it cannot be run alone.")


def run_decoder(
    model: nn.Module,
    input_ids: torch.Tensor,
    cache: Cache,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs a causal LM's decoder, without its LM head, and leaves the states in `cache`. Ids `[batch, seq]`; returns
    the last hidden states `[batch, seq, hidden]`."""
    decoder = decoder_of(model)
    kwargs = {cache_argument(decoder): cache, "attention_mask": attention_mask, "use_cache": True}
    if position_ids is not None and "position_ids" in inspect.signature(decoder.forward).parameters:
        kwargs["position_ids"] = position_ids
    return decoder(input_ids=input_ids, **kwargs)[0]


def unsupported_cache(config: PreTrainedConfig) -> str | None:
    """The kind of a cache layer of a model that is not plain keys and values per token, if there is one."""
    for layer in DynamicCache(config=config).layers:
        kind = type(layer).__name__
        if kind not in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"):
            return f"a {kind}"
    return None


def shares_last_layers(config: PreTrainedConfig, cached: int) -> bool:
    """Whether only the first `cached` layers have a cache, because the others read theirs."""
    kinds = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    return set(kinds[cached:]) == {"DummyLayer"} and "DummyLayer" not in kinds[:cached]


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """How many tokens the sliding window (or the chunk) of each decoder layer holds; `None` for full attention."""
    layers = DynamicCache(config=config).layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return windows
    # A layer without a cache of its own is of the kind that its type has elsewhere.
    cached = [type(layer).__name__ != "DummyLayer" for layer in layers]
    known = {kind: window for kind, window, own in zip(kinds, windows, cached, strict=True) if own}
    return [window if own else known.get(kind) for kind, window, own in zip(kinds, windows, cached, strict=True)]


def hides_by_itself(config: PreTrainedConfig) -> bool:
    """Whether layers have a window of their own beside the masks that they are given (GPT-Neo), which counts slots."""
    return "local" in getattr(config, "attention_layers", ())


def chunked_layers(config: PreTrainedConfig) -> set[int]:
    """The decoder layers whose window is a chunk: their tokens look at those of the same chunk (Llama 4)."""
    kinds = getattr(config, "layer_types", None) or ()
    return {layer_idx for layer_idx, kind in enumerate(kinds) if kind == "chunked_attention"}
