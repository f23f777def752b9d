"""What an arm sees: the models, and contexts that are read together; what several arms use is computed once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.cache_mot import TranslatedCache
from hf_mot.capture_mot import prefill
from hf_mot.evaluation.answers import wrap
from hf_mot.evaluation.prompts import Prompter
from hf_mot.inputs_mot import TranslationInputs
from hf_mot.layers_mot import input_device
from hf_mot.replay_mot import ReplayPlan
from hf_mot.rows_mot import left_pad


class Context(Protocol):
    """What an arm sees of a window or a question: `text`, all that a source reads, and the target's own ids for it,
    prefix included."""

    text: str
    context_ids: list[int]


class Baseline(Protocol):
    """A rival of the translator that is not one: from contexts to a cache, and what that costs. `source_layers` are
    those it reads; `report` says how it was made, empty where there is nothing to say."""

    source_layers: Sequence[int]
    report: dict[str, Any]

    def __call__(self, batch: "Batch") -> TranslatedCache: ...

    def flops(self, context_length: int) -> float:
        """FLOPs (2 × MACs) for so many target tokens of context, the source's own reading not counted."""


@dataclass(frozen=True)
class Models:
    """
    All that an arm may use.

    Args:
        source (`PreTrainedModel`, *optional*): The model whose cache is translated.
        target (`PreTrainedModel`): The model that reads the translation.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*): The source's tokenizer.
        target_tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        translator (`MoTModel`): The translator that is judged.
        no_source (`MoTModel`, *optional*): Its twin, fitted without source features; of a translator that reads the
            target's own hidden state, it reads that still.
        identity (`MoTModel`, *optional*): The translator from the target to itself.
        prefix_ids (`list[int]`): The target's leading special tokens.
        replay (`str`): The replay plan.
        baselines (`Mapping[str, Baseline]`, *optional*): Rivals, by the name of their arm.
        prompters (`Mapping[str, Prompter]`, *optional*): Of `"source"` and `"target"`, for questions.
    """

    source: PreTrainedModel | None
    target: PreTrainedModel
    source_tokenizer: PreTrainedTokenizerBase | None
    target_tokenizer: PreTrainedTokenizerBase
    translator: PreTrainedModel
    no_source: PreTrainedModel | None
    identity: PreTrainedModel | None
    prefix_ids: list[int]
    replay: str = "none"
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    prompters: Mapping[str, Prompter] = field(default_factory=dict)

    @property
    def source_layers(self) -> list[int]:
        """The source layers that translator and baselines read."""
        readers = (self.translator.config, *self.baselines.values())
        return sorted({layer_idx for reader in readers for layer_idx in reader.source_layers})

    def plan(self, inputs: TranslationInputs) -> ReplayPlan:
        """The plan for some inputs; without guidance, the target looks everywhere."""
        plan = ReplayPlan.parse(self.replay)
        return plan if inputs.guidance else plan.unguided

    def assemble(self, translator: PreTrainedModel, output: Any, inputs: TranslationInputs) -> TranslatedCache:
        """The target's cache of translated states, by the plan; rivals do not tell which tokens are uncertain."""
        plan = self.plan(inputs)
        plan = plan.unpredicted if output.log_error is None else plan
        return translator.assemble(output, inputs, self.target, plan)


@dataclass(frozen=True)
class Batch:
    """
    Contexts that are read together. What several arms use is computed once.

    Args:
        models (`Models`): All that an arm may use.
        contexts (`Sequence[Context]`): The contexts.
        others (`Sequence[Context]`, *optional*): For each of them, one of another document, some places ahead in the
            order in which they are read.
    """

    models: Models
    contexts: Sequence[Context]
    others: Sequence[Context] = ()

    @property
    def texts(self) -> list[str]:
        return [context.text for context in self.contexts]

    @cached_property
    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's ids and their mask, `(batch, longest)`, left-padded, on its device."""
        ids, mask = left_pad([context.context_ids for context in self.contexts])
        device = input_device(self.models.target)
        return ids.to(device), mask.to(device)

    @cached_property
    def native_cache(self) -> TranslatedCache:
        """The target has read the context itself."""
        ids, mask = self.padded
        return wrap(prefill(self.models.target, ids, mask), mask, self.models.translator.target_geometry.sliding)

    @cached_property
    def source_reading(self) -> tuple[Cache | None, torch.Tensor | None, torch.Tensor | None]:
        """The source's prefill, as translators and baselines read it: its cache, ids and mask."""
        models = self.models
        plan = ReplayPlan.parse(models.replay)
        return models.translator.read_source(
            self.texts, models.source, models.source_tokenizer, layers=models.source_layers, plan=plan
        )

    @cached_property
    def translated_cache(self) -> TranslatedCache:
        """The source has read the context's text, and its cache is translated."""
        return self.translate(self.models.translator, *self.source_reading)

    @cached_property
    def twin_cache(self) -> TranslatedCache:
        """What the twin without a source makes of the context."""
        return self.translate(self.models.no_source)

    @cached_property
    def _by_plan(self) -> dict[str, "Batch"]:
        return {}

    def under(self, plan: str) -> "Batch":
        """The same contexts, read once, by another replay plan. The last one is kept: its caches are large."""
        if plan not in self._by_plan:
            self._by_plan.clear()
            other = Batch(replace(self.models, replay=plan), self.contexts, self.others)
            vars(other).update(padded=self.padded)
            if not ReplayPlan.parse(plan).sparse:  # else the source is listened to anew
                vars(other).update(source_reading=self.source_reading)
            self._by_plan[plan] = other
        return self._by_plan[plan]

    @cached_property
    def source_cache(self) -> TranslatedCache:
        """The source has read the context, and goes on itself."""
        models = self.models
        ids, mask = left_pad([models.prompters["source"].context_ids(text) for text in self.texts])
        mask = mask.to(input_device(models.source))
        return wrap(prefill(models.source, ids, mask), mask, models.translator.source_geometry.sliding)

    def translate(self, translator, source_cache=None, source_ids=None, source_mask=None) -> TranslatedCache:
        """By the replay plan; without a source to guide it, the target looks everywhere."""
        plan = ReplayPlan.parse(self.models.replay)
        plan = plan.unguided if source_cache is None else plan
        return translator.translate(source_cache, source_ids, replay=plan, **self._arguments(source_mask))

    def inputs(self, translator) -> TranslationInputs:
        """What a translator reads of the contexts."""
        source_cache, source_ids, source_mask = self.source_reading
        return translator.prepare(source_cache, source_ids, **self._arguments(source_mask))

    def _arguments(self, source_mask: torch.Tensor | None) -> dict[str, Any]:
        models, (ids, mask) = self.models, self.padded
        return {
            "source_attention_mask": source_mask,
            "source_tokenizer": models.source_tokenizer,
            "target": models.target,
            "target_tokenizer": models.target_tokenizer,
            "target_input_ids": ids,
            "target_attention_mask": mask,
            "text": self.texts,
        }
