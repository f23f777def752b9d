"""The generate() hook: lets `target.generate(**prompt, past_key_values=translated)` work as written.

A stock `generate` takes a prompt-only mask beside a filled cache for a mask over everything and crashes or drops
prompt tokens. The hook, on one model instance, completes the mask, works on a fork of the cache, and carries what the
next turn needs. Calls without a TranslatedCache pass through unchanged. Ids and masks are `[batch, seq]`.
"""

import copy
import functools
import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from .cache_mot import TranslatedCache
from .compat_mot import cache_argument, output_cache, pop_cache_argument, set_output_cache
from .contract_mot import check_model


def attach(target: PreTrainedModel) -> PreTrainedModel:
    """
    Makes `target.generate` accept a [`TranslatedCache`]. Idempotent, on this instance alone, undone by [`detach`]; it
    survives `copy.deepcopy` and pickling of the model. `translate(..., target=target)` calls it. Of a PEFT model, the
    model inside is taken, whose `generate` the outer one calls.
    """
    if not is_attached(target):
        model = _inner(target)
        model.generate = functools.partial(generate_after, model)
    return target


def detach(target: PreTrainedModel) -> PreTrainedModel:
    """Undoes [`attach`]."""
    if is_attached(target):
        del _inner(target).generate
    return target


def is_attached(target: PreTrainedModel) -> bool:
    # By name: translators loaded as remote code bring this module each, under names of their own.
    function = getattr(vars(_inner(target)).get("generate"), "func", None)
    return getattr(function, "__name__", None) == "generate_after" and function.__module__.endswith("generation_mot")


def _inner(target: PreTrainedModel) -> PreTrainedModel:
    return getattr(target, "get_base_model", lambda: target)()


def is_translated(cache: Any) -> bool:
    return type(cache).__name__ == TranslatedCache.__name__


def generate_after(model: PreTrainedModel, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """`model.generate(inputs, *args, **kwargs)`, where the cache among the arguments may be a [`TranslatedCache`]."""
    bound = inspect.signature(type(model).generate).bind(model, inputs, *args, **kwargs)
    names = list(bound.signature.parameters)[2 : 2 + len(args)]  # after self and inputs
    kwargs |= {name: bound.arguments[name] for name in names}
    cache = pop_cache_argument(kwargs)
    if not is_translated(cache):
        if cache is not None:
            kwargs[cache_argument(model)] = cache
        return type(model).generate(model, inputs, **kwargs)
    prompt_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
    _check_arguments(model, cache, prompt_ids, kwargs)
    prefix_mask = _cached_mask(cache)
    new_ids, new_mask = prompt_after(cache, prompt_ids, kwargs.pop("attention_mask", None))
    kwargs.pop("position_ids", None)
    if not cache.sliding or bool(new_mask.all()):
        return _continue(model, cache, prefix_mask, prompt_ids, new_ids, new_mask, kwargs)
    # Windows count pads between context and prompt as tokens: rows with prompts of equal length go together.
    lengths = new_mask.sum(dim=1)
    groups = [(lengths == length).nonzero().flatten() for length in lengths.unique()]
    outputs = [
        _continue(
            model,
            cache.rows(rows),
            prefix_mask[rows],
            prompt_ids[rows],
            new_ids[rows, -int(lengths[rows[0]]) :],
            new_mask[rows, -int(lengths[rows[0]]) :],
            kwargs,
        )
        for rows in groups
    ]
    return _join(model, groups, outputs, kwargs)


def _check_arguments(model, cache: TranslatedCache, prompt_ids: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    if prompt_ids is None:
        raise ValueError("`input_ids` is required with a TranslatedCache: pass the prompt that follows the context.")
    if cache.contract is not None:
        check_model(cache.contract, model, "target")
    if prompt_ids.shape[0] != cache.prefix_mask.shape[0]:
        raise ValueError(
            f"`input_ids` has {prompt_ids.shape[0]} rows, but the TranslatedCache holds {cache.prefix_mask.shape[0]}. "
            "Pass one prompt per translated context."
        )
    asked = kwargs.get("use_cache", getattr(kwargs.get("generation_config"), "use_cache", None))
    if asked is False:
        raise ValueError("`use_cache` is False, but a translated context exists in the cache alone. Leave it out.")
    if _option(model, kwargs, "use_cache") is False:  # the model's own default (MPT)
        kwargs["use_cache"] = True
    implementation = _option(model, kwargs, "cache_implementation")
    if implementation is not None:
        raise ValueError(
            f"`cache_implementation` is {implementation!r}, but a TranslatedCache is the cache, of its own kind. "
            "Leave it out (in `target.generation_config` too)."
        )


def _continue(model, cache, prefix_mask, prompt_ids, new_ids, new_mask, kwargs: dict[str, Any]) -> Any:
    """One stock `generate` on a fork of the cache; the ids that come back start with `prompt_ids`."""
    kwargs = _shift_lengths(model, kwargs, new_ids.shape[1] - prompt_ids.shape[1])
    num_beams = _option(model, kwargs, "num_beams", 1)
    kwargs[cache_argument(model)] = cache.fork(max(num_beams, _option(model, kwargs, "num_return_sequences", 1)))
    mask = torch.cat([prefix_mask.to(new_mask), new_mask], dim=1)
    output = type(model).generate(model, new_ids, attention_mask=mask, **kwargs)
    return close_turn(output, prompt_ids, new_ids.shape[1], mask, num_beams, _eos_ids(model, kwargs))


def _join(model, groups: list[torch.Tensor], outputs: list[Any], kwargs: dict[str, Any]) -> Any:
    """The outputs of groups of rows as one, in the rows' order."""
    dicts = not isinstance(outputs[0], torch.Tensor)
    details = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    asked = [name for name in details if _option(model, kwargs, name)]
    if dicts and asked:
        raise ValueError(
            f"`{asked[0]}` is not available for prompts of unequal length on a target with sliding-window layers, "
            "where rows are generated in groups. Generate row by row."
        )
    pad = _option(model, kwargs, "pad_token_id")
    if pad is None:  # as generate itself pads
        pad = next(iter(_eos_ids(model, kwargs)), 0)
    sequences = [output.sequences if dicts else output for output in outputs]
    longest = max(part.shape[1] for part in sequences)
    joined = torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=pad) for part in sequences])
    per_row = len(joined) // sum(len(rows) for rows in groups)
    order = torch.cat(groups).argsort()
    joined = joined.unflatten(0, (-1, per_row))[order].flatten(0, 1)
    if not dicts:
        return joined
    output = outputs[0]
    output.sequences = joined
    if "beam_indices" in output:
        output["beam_indices"] = None  # they count the beams of a group
    caches = [output_cache(part) for part in outputs]
    if all(is_translated(cache) for cache in caches):
        rows = order[:, None] * per_row + torch.arange(per_row, device=order.device)
        set_output_cache(output, type(caches[0]).concatenate(caches).rows(rows.flatten()))
    return output


def _cached_mask(cache: TranslatedCache) -> torch.Tensor:
    """Mask over all that is cached: a fork may have been written to by a forward pass."""
    mask = cache.prefix_mask
    written = cache.get_seq_length() - mask.shape[1]
    if written < 0:
        raise ValueError(f"`past_key_values` was cropped by {-written} tokens. Use the whole translated cache.")
    return torch.cat([mask, mask.new_ones(len(mask), written)], dim=1)


def prompt_after(cache: TranslatedCache, prompt_ids: torch.Tensor, mask: torch.Tensor | None):
    """The ids that follow what is cached, and their mask: the last turn's uncached id, then the prompt without
    the special prefix that the cache has."""
    length = prompt_ids.shape[1]
    whole = cache.get_seq_length() + length
    if mask is not None and mask.shape[1] not in (length, whole):
        raise ValueError(
            f"`attention_mask` has a width of {mask.shape[1]}, but the prompt has {length} ids, and with the cached "
            f"context {whole}. Pass the mask that belongs to `input_ids`."
        )
    mask = torch.ones_like(prompt_ids) if mask is None else mask[:, mask.shape[1] - length :].to(prompt_ids)
    prefix = torch.tensor(cache.prefix_ids, device=prompt_ids.device)
    slots = mask.long().argmax(dim=1, keepdim=True) + torch.arange(len(prefix), device=mask.device)  # [batch, prefix]
    if len(prefix) and int(slots.max()) < length and bool((prompt_ids.gather(1, slots) == prefix).all()):
        mask = mask.scatter(1, slots, 0)
    if cache.pending_ids is not None:
        prompt_ids = torch.cat([cache.pending_ids.to(prompt_ids), prompt_ids], dim=1)
        mask = torch.cat([cache.pending_mask.to(mask), mask], dim=1)
    order = mask.sort(dim=1, stable=True).indices  # pads to the left, also those between a pending id and the prompt
    prompt_ids, mask = prompt_ids.gather(1, order), mask.gather(1, order)
    used = mask.any(dim=0)  # columns that no row uses only cost time
    prompt_ids, mask = prompt_ids[:, used], mask[:, used]
    if not bool(mask.any(dim=1).all()):
        raise ValueError(
            "`input_ids` has a row without any token besides BOS: there is nothing to continue from. Move the last "
            "words of the context into the prompt."
        )
    return prompt_ids, mask


def close_turn(output: Any, prompt_ids, new_length: int, mask, num_beams: int, eos_ids: list[int]) -> Any:
    """
    What the user gets: ids that start with the prompt as it was passed, and a cache that the next turn can start from.

    Args:
        output (`torch.Tensor` or `ModelOutput`): What a decoding method returned; its ids start with the `new_length`
            ids that the model was given.
        prompt_ids (`torch.Tensor`): The prompts as passed, one per translated context.
        mask (`torch.Tensor`): Over cache and given ids, one row per translated context.
    """
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    completion = sequences[:, new_length:]
    per_row = len(completion) // len(prompt_ids)
    restored = torch.cat([prompt_ids.to(completion).repeat_interleave(per_row, 0), completion], dim=1)
    if isinstance(output, torch.Tensor):
        return restored
    output.sequences = restored
    cache = output_cache(output)
    if is_translated(cache) and num_beams > 1:
        set_output_cache(output, None)  # it holds the beams, not what is returned
    elif is_translated(cache):
        ended = torch.zeros_like(completion, dtype=torch.bool)
        for token_id in eos_ids:
            ended |= completion == token_id
        # A row's tokens count up to and including its first end-of-sequence; what follows are pads.
        alive = torch.ones_like(completion)
        alive[:, 1:] = (ended.cumsum(dim=1) == 0)[:, :-1]
        mask = torch.cat([mask.to(alive).repeat_interleave(per_row, 0), alive], dim=1)
        cache.prefix_mask = mask[:, : cache.get_seq_length()]
        cache.pending_ids, cache.pending_mask = completion[:, -1:], mask[:, -1:]
        cache.is_fork = False
        set_output_cache(output, cache.packed())
    return output


def _shift_lengths(model: PreTrainedModel, kwargs: dict[str, Any], by: int) -> dict[str, Any]:
    """`max_length` and `min_length` count the ids that the user passes, not those that the model is given."""
    kwargs = dict(kwargs)
    for name in ("max_length", "min_length"):
        length = _option(model, kwargs, name)
        if length and kwargs.get(name) is None and kwargs.get("generation_config") is not None:
            # Options beside a config are deprecated.
            kwargs["generation_config"] = copy.copy(kwargs["generation_config"])
            setattr(kwargs["generation_config"], name, length + by)
        elif length:
            kwargs[name] = length + by
    return kwargs


def _option(model: PreTrainedModel, kwargs: dict[str, Any], name: str, default: Any = None) -> Any:
    """A generation option, from the call, its config or the model's."""
    for value in (
        kwargs.get(name),
        getattr(kwargs.get("generation_config"), name, None),
        getattr(model.generation_config, name, None),
    ):
        if value is not None:
            return value
    return default


def _eos_ids(model: PreTrainedModel, kwargs: dict[str, Any]) -> list[int]:
    eos = _option(model, kwargs, "eos_token_id")
    return [] if eos is None else torch.as_tensor(eos).flatten().tolist()
