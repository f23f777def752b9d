"""The same without a hook on the model: a callable for generate's `custom_generate`, and a translator's own recipe.

Ids and masks are `[batch, seq]`.
"""

import copy
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GENERATION_MODES_MAPPING

from .compat_mot import cache_argument, pop_cache_argument
from .generation_mot import close_turn, is_translated, prompt_after
from .rows_mot import positions_from_mask

# Written into a translator's folder as custom_generate/generate.py, for generate(custom_generate="that folder").
RECIPE = '''"""Generates from a TranslatedCache with the code that made it (`past_key_values=translated`)."""

import importlib


def generate(model, **kwargs):
    cache = kwargs.get("past_key_values") if kwargs.get("cache") is None else kwargs["cache"]
    if type(cache).__name__ != "TranslatedCache":
        raise ValueError(f"`past_key_values` must be a TranslatedCache, got {type(cache).__name__}.")
    package = type(cache).__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.generation_mot").generate_after(model, **kwargs)
'''


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    **kwargs: Any,
) -> Any:
    """
    Continues from a [`TranslatedCache`] on a model that is not attached:
    `target.generate(**prompt, past_key_values=translated, custom_generate=custom_generate)`. All modes but assisted
    decoding and streaming, whose arguments generate does not pass to a callable.

    Raises:
        `ValueError`: no TranslatedCache, or prompts of unequal length on a target with sliding-window layers (where
            `attach` generates in groups).
    """
    cache = pop_cache_argument(kwargs)
    if not is_translated(cache):
        raise ValueError(f"`past_key_values` must be a TranslatedCache, got {type(cache).__name__}.")
    method = getattr(type(model), GENERATION_MODES_MAPPING[generation_config.get_generation_mode()])
    repeats = len(input_ids) // len(cache.prefix_mask)
    cache = cache.fork(repeats)
    new_ids, new_mask = prompt_after(cache, input_ids, kwargs.pop("attention_mask", None))
    if cache.sliding and not bool(new_mask.all()):
        raise ValueError(
            "`input_ids` has rows of unequal length, but the target has sliding-window layers, which count pads "
            "between context and prompt as tokens. Use attach(target), or generate row by row."
        )
    whole_mask = torch.cat([cache.prefix_mask.to(new_mask), new_mask], dim=1)
    if "position_ids" in kwargs:
        kwargs["position_ids"] = positions_from_mask(whole_mask)[:, -new_ids.shape[1] :]
    by = new_ids.shape[1] - input_ids.shape[1]
    generation_config = copy.copy(generation_config)
    generation_config.max_length += by
    generation_config._mask_length = whole_mask.shape[1]
    criteria: list[Any] = []
    for criterion in stopping_criteria:
        if isinstance(criterion, MaxLengthCriteria):
            criterion = MaxLengthCriteria(criterion.max_length + by)
        elif by and not isinstance(criterion, EosTokenCriteria):
            criterion = _Criterion(criterion, input_ids, new_ids.shape[1])
        criteria.append(criterion)
    processors = [_Processor(part, input_ids, new_ids.shape[1]) if by else part for part in logits_processor]
    output = method(
        model,
        new_ids,
        logits_processor=LogitsProcessorList(processors),
        stopping_criteria=StoppingCriteriaList(criteria),
        generation_config=generation_config,
        attention_mask=whole_mask,
        **{cache_argument(model): cache},
        **kwargs,
    )
    eos = generation_config.eos_token_id
    eos_ids = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
    num_beams = generation_config.num_beams or 1
    return close_turn(output, input_ids[::repeats], new_ids.shape[1], whole_mask[::repeats], num_beams, eos_ids)


class _SeesPrompt:
    """A part of generate that is shown the ids as the user passed them, not those that the model was given."""

    def __init__(self, inner: Any, prompt_ids: torch.Tensor, new_length: int):
        self.inner, self.prompt_ids, self.new_length = inner, prompt_ids, new_length

    def shown(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.prompt_ids, input_ids[:, self.new_length :]], dim=1)


class _Processor(_SeesPrompt):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.inner(self.shown(input_ids), scores)


class _Criterion(_SeesPrompt):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.inner(self.shown(input_ids), scores, **kwargs)
