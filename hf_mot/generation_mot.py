"""The generate() hook: lets `target.generate(**prompt, past_key_values=translated)` work as written.

A stock `generate` takes a prompt-only mask beside a filled cache for a mask over everything and crashes or drops
prompt tokens. The hook, on one model instance, completes the mask, works on a fork of the cache, and carries what the
next turn needs. Calls without a TranslatedCache pass through unchanged. Ids and masks are `[batch, seq]`.
"""

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from .cache_mot import TranslatedCache
from .compat_mot import cache_argument, drop_output_cache, output_cache, pop_cache_argument


def attach(target: PreTrainedModel) -> PreTrainedModel:
    """
    Makes `target.generate` accept a [`TranslatedCache`]. Idempotent, on this instance alone, undone by [`detach`]; it
    survives `copy.deepcopy` and pickling of the model. `translate(..., target=target)` calls it.
    """
    if not is_attached(target):
        target.generate = functools.partial(_generate, target)
    return target


def detach(target: PreTrainedModel) -> PreTrainedModel:
    """Undoes [`attach`]."""
    if is_attached(target):
        del target.generate
    return target


def is_attached(target: PreTrainedModel) -> bool:
    # By name: translators loaded as remote code bring this module each, under names of their own.
    function = getattr(vars(target).get("generate"), "func", None)
    return getattr(function, "__name__", None) == "_generate" and function.__module__.endswith("generation_mot")


def _is_translated(cache: Any) -> bool:
    return type(cache).__name__ == TranslatedCache.__name__


def _generate(model: PreTrainedModel, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    generate = functools.partial(type(model).generate, model)
    cache = pop_cache_argument(kwargs)
    if not _is_translated(cache):
        if cache is not None:
            kwargs[cache_argument(model)] = cache
        return generate(inputs, *args, **kwargs)
    prompt_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
    if prompt_ids is None:
        raise ValueError("`input_ids` is required with a TranslatedCache: pass the prompt that follows the context.")
    if prompt_ids.shape[0] != cache.prefix_mask.shape[0]:
        raise ValueError(
            f"`input_ids` has {prompt_ids.shape[0]} rows, but the TranslatedCache holds {cache.prefix_mask.shape[0]}. "
            "Pass one prompt per translated context."
        )
    if _option(model, args, kwargs, "use_cache") is False:
        raise ValueError("`use_cache` is False, but a translated context exists in the cache alone. Leave it out.")
    prefix_mask = _cached_mask(cache)
    new_ids, new_mask = _prompt_after(cache, prompt_ids, kwargs.pop("attention_mask", None))
    sequences_per_row = _option(model, args, kwargs, "num_return_sequences")
    cache = cache.fork(max(_option(model, args, kwargs, "num_beams"), sequences_per_row))
    kwargs.pop("position_ids", None)
    kwargs[cache_argument(model)] = cache
    kwargs["attention_mask"] = torch.cat([prefix_mask.to(new_mask), new_mask], dim=1)
    output = generate(new_ids, *args, **kwargs)

    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    completion = sequences[:, new_ids.shape[1] :]
    restored = torch.cat([prompt_ids.to(completion).repeat_interleave(sequences_per_row, 0), completion], dim=1)
    if isinstance(output, torch.Tensor):
        return restored
    output.sequences = restored
    returned = output_cache(output)
    if _is_translated(returned) and _option(model, args, kwargs, "num_beams") > 1:
        drop_output_cache(output)  # it holds the beams, not what is returned
    elif _is_translated(returned):
        mask = kwargs["attention_mask"].repeat_interleave(completion.shape[0] // prompt_ids.shape[0], 0)
        _close_turn(returned, mask, completion, _eos_ids(model, args, kwargs))
    return output


def _cached_mask(cache: TranslatedCache) -> torch.Tensor:
    """Mask over all that is cached: a fork may have been written to by a forward pass."""
    mask = cache.prefix_mask
    written = cache.get_seq_length() - mask.shape[1]
    if written < 0:
        raise ValueError(f"`past_key_values` was cropped by {-written} tokens. Use the whole translated cache.")
    return torch.cat([mask, mask.new_ones(len(mask), written)], dim=1)


def _prompt_after(cache: TranslatedCache, prompt_ids: torch.Tensor, mask: torch.Tensor | None):
    """The ids that follow what is cached, and their mask: the last turn's uncached id, then the prompt without BOS."""
    length = prompt_ids.shape[1]
    whole = cache.get_seq_length() + length
    if mask is not None and mask.shape[1] not in (length, whole):
        raise ValueError(
            f"`attention_mask` has a width of {mask.shape[1]}, but the prompt has {length} ids, and with the cached "
            f"context {whole}. Pass the mask that belongs to `input_ids`."
        )
    mask = torch.ones_like(prompt_ids) if mask is None else mask[:, mask.shape[1] - length :].to(prompt_ids)
    if cache.bos_token_id is not None and length:
        first = mask.long().argmax(dim=1, keepdim=True)  # [batch, 1], the first real token of each row
        if bool((prompt_ids.gather(1, first) == cache.bos_token_id).all()):
            mask = mask.scatter(1, first, 0)
    if cache.pending_ids is not None:
        prompt_ids = torch.cat([cache.pending_ids.to(prompt_ids), prompt_ids], dim=1)
        mask = torch.cat([cache.pending_mask.to(mask), mask], dim=1)
    used = mask.any(dim=0)  # columns that no row uses only cost time, and a sliding window counts them
    prompt_ids, mask = prompt_ids[:, used], mask[:, used]
    if not bool(mask.any(dim=1).all()):
        raise ValueError(
            "`input_ids` has a row without any token besides BOS: there is nothing to continue from. Move the last "
            "words of the context into the prompt."
        )
    if cache.sliding and not bool(mask.all()):
        raise ValueError(
            "`input_ids` has rows of unequal length, but the target has sliding-window layers, which count pads "
            "between context and prompt as tokens. Generate row by row, or group prompts of equal length."
        )
    return prompt_ids, mask


def _close_turn(cache: TranslatedCache, mask: torch.Tensor, completion: torch.Tensor, eos_ids: set[int]) -> None:
    """Turns the cache that a generate call returns into one that the next turn can start from."""
    ended = torch.zeros_like(completion, dtype=torch.bool)
    for token_id in eos_ids:
        ended |= completion == token_id
    # A row's tokens count up to and including its first end-of-sequence; what follows are pads.
    alive = torch.ones_like(completion)
    alive[:, 1:] = (ended.cumsum(dim=1) == 0)[:, :-1]
    mask = torch.cat([mask.to(alive), alive], dim=1)
    cached = cache.get_seq_length()
    cache.prefix_mask = mask[:, :cached]
    cache.pending_ids, cache.pending_mask = completion[:, -1:], mask[:, cached : cached + 1]
    cache.is_fork = False


def _option(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any], name: str) -> Any:
    config = kwargs.get("generation_config") or (args[0] if args else None)
    for value in (kwargs.get(name), getattr(config, name, None), getattr(model.generation_config, name, None)):
        if value is not None:
            return value
    return 1


def _eos_ids(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> set[int]:
    config = kwargs.get("generation_config") or (args[0] if args else None)
    given = [getattr(config, "eos_token_id", None), model.generation_config.eos_token_id]  # the first that is set
    eos = kwargs.get("eos_token_id", given[0] if given[0] is not None else given[1])
    return set() if eos is None else set(torch.as_tensor(eos).flatten().tolist())
