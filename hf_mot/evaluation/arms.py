"""Arms: the ways in which the target can come by a context, each from contexts to a cache, behind one protocol."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.cache_mot import TranslatedCache
from hf_mot.capture_mot import prefill, source_states
from hf_mot.compat_mot import cache_argument
from hf_mot.evaluation.answers import cross_entropy, greedy_answers, read_on, wrap
from hf_mot.evaluation.prompts import Prompter
from hf_mot.inputs_mot import TranslationInputs
from hf_mot.replay_mot import ReplayPlan, native_flops
from hf_mot.rows_mot import left_pad, positions_from_mask

SUMMARY_TOKENS = 64


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
        """The target's cache of translated states, by the plan."""
        return translator.assemble(output, inputs, self.target, self.plan(inputs))


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
        device = self.models.target.get_input_embeddings().weight.device
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
        mask = mask.to(models.source.get_input_embeddings().weight.device)
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


@dataclass(frozen=True)
class Arm:
    """
    One way to come by a context.

    Args:
        about (`str`): What is then read, for a table.
        cache (`Callable[[Batch], TranslatedCache]`): From contexts to caches.
        wrong (`bool`, *optional*, defaults to `False`): Whether the cache is judged on an item of another document:
            for that item it is the cache of one some places ahead.
        reader (`str`, *optional*, defaults to `"target"`): Who answers from it.
        needs (`str`, *optional*): What it cannot do without: `"source"`, `"no_source"`, `"identity"` or a baseline.
        flops (`Callable[[Models, int], float]`, *optional*): FLOPs of getting the cache of so many target tokens.
        tasks_only (`bool`, *optional*, defaults to `False`): Whether it has a meaning for questions alone.
        plan ([`ReplayPlan`], *optional*): A replay plan of its own, instead of the evaluation's.
    """

    about: str
    cache: Callable[[Batch], TranslatedCache]
    wrong: bool = False
    reader: Literal["target", "source"] = "target"
    needs: str | None = None
    flops: Callable[[Models, int], float] | None = None
    tasks_only: bool = False
    plan: ReplayPlan | None = None


def native(batch: Batch) -> TranslatedCache:
    """The target reads the context itself."""
    return batch.native_cache


def no_context(batch: Batch) -> TranslatedCache:
    """The target reads its leading special tokens alone, or nothing if it has none."""
    prefix_ids, rows = batch.models.prefix_ids, len(batch.contexts)
    mask = torch.ones(rows, len(prefix_ids), dtype=torch.long, device=batch.padded[0].device)
    if not prefix_ids:
        return TranslatedCache([], [], mask)
    cache = prefill(batch.models.target, torch.tensor([prefix_ids] * rows))
    return wrap(cache, mask, batch.models.translator.target_geometry.sliding)


def translated(batch: Batch) -> TranslatedCache:
    """The source reads the context's text, and its cache is translated."""
    return batch.translated_cache


def identity(batch: Batch) -> TranslatedCache:
    """The target's own cache through the same path as a translation: must equal native."""
    # The same ids on both sides: the text alone can be tokenised otherwise at the cut, which would not be an oracle.
    ids, mask = batch.padded
    tokenizer = batch.models.target_tokenizer
    return batch.models.identity.translate(
        batch.native_cache,
        ids,
        source_attention_mask=mask,
        target=batch.models.target,
        source_tokenizer=tokenizer,
        target_tokenizer=tokenizer,
        target_input_ids=ids,
        target_attention_mask=mask,
        text=batch.texts,
        replay=ReplayPlan.parse(batch.models.replay).unguided,
    )


def no_source(batch: Batch) -> TranslatedCache:
    """The twin's translation, made from the target's token embeddings, and from its own hidden state if that is
    read."""
    return batch.twin_cache


def target_layers_only(batch: Batch) -> TranslatedCache:
    """What the target's own first layers tell: the same plan, with a translator of the layers above that reads the
    target's own states alone. For a translator that reads the target's hidden state that is the twin without a source,
    the same as `no_source`, and computed once for both. Other translators have no such control."""
    return batch.twin_cache


def wrong_source(batch: Batch) -> TranslatedCache:
    """The translator reads the right target tokens, each beside the source state of another document's token of the
    same number (from its start again where that document is shorter)."""
    models = batch.models
    own = batch.inputs(models.translator)
    other = Batch(models, batch.others).inputs(models.translator)
    prefix, states = len(models.prefix_ids), torch.zeros_like(own.source_states)
    for row, (mask, other_mask) in enumerate(zip(own.target_mask, other.target_mask, strict=True)):
        length, other_length = int(mask.sum()), int(other_mask.sum())
        index = torch.arange(length, device=states.device)
        index = torch.where(index < prefix, index, prefix + (index - prefix) % (other_length - prefix))
        states[row, -length:] = other.source_states[row, -other_length:][index]
    plan = models.plan(own)
    own = models.translator.read_target(replace(own, source_states=states), models.target, plan)
    return models.assemble(models.translator, models.translator.run(own, plan), own)


def zero_cache(batch: Batch) -> TranslatedCache:
    """A translation of zeros."""
    ids, mask = batch.padded
    return _made_up(batch, torch.zeros(*ids.shape, _width(batch.models), device=ids.device))


def random_cache(batch: Batch) -> TranslatedCache:
    """A translation of noise that has, per context and channel, mean and variance of the target's own states."""
    ids, mask = batch.padded
    geometry, positions = batch.models.translator.target_geometry, positions_from_mask(mask)
    states = source_states(batch.native_cache, geometry, range(len(geometry.layers)), positions).float()
    noise = torch.zeros_like(states)
    kept = mask.bool() & (positions >= len(batch.models.prefix_ids))
    for row, context in enumerate(batch.contexts):
        own = states[row][kept[row]]
        # By content, so that the batch it is in makes no difference.
        generator = torch.Generator().manual_seed(zlib.crc32(context.text.encode()))
        drawn = torch.randn(own.shape, generator=generator).to(own.device)
        noise[row, kept[row]] = own.mean(0) + own.std(0, correction=0) * drawn
    return _made_up(batch, noise)


def _width(models: Models) -> int:
    return sum(layer.width for layer in models.translator.target_geometry.layers)


def _made_up(batch: Batch, states: torch.Tensor) -> TranslatedCache:
    """A cache of position-free states `[batch, seq, width]`, by the way that translations take."""
    models = batch.models
    inputs = TranslationInputs(None, None, *batch.padded)
    return models.assemble(models.identity, models.identity(states, None), inputs)


def text_handoff(batch: Batch) -> TranslatedCache:
    """The target reads what the source writes about the context, without knowing the question."""
    models = batch.models
    writer = models.prompters["source"]
    prompt_ids = writer.encode(writer.summary_prompt())
    cache = read_on(models.source, batch.source_cache, [prompt_ids[:-1]] * len(batch.contexts))
    last_ids, plain = prompt_ids[-1:] * len(batch.contexts), writer.style == "plain"
    summaries = greedy_answers(models.source, models.source_tokenizer, cache, last_ids, SUMMARY_TOKENS, one_line=plain)
    rows = [models.prompters["target"].context_ids(summary) for summary in summaries]
    if not any(rows):
        return no_context(batch)
    ids, mask = left_pad(rows)
    mask = mask.to(batch.padded[1])
    return wrap(prefill(models.target, ids, mask), mask, models.translator.target_geometry.sliding)


def source_alone(batch: Batch) -> TranslatedCache:
    """The source reads the context, and answers itself."""
    return batch.source_cache


def _native_flops(models: Models, context_length: int) -> float:
    return native_flops(models.translator.target_geometry, context_length)


def _translated_flops(models: Models, context_length: int) -> float:
    return ReplayPlan.parse(models.replay).flops(models.translator.config, context_length)


def _no_source_flops(models: Models, context_length: int) -> float:
    return ReplayPlan.parse(models.replay).unguided.flops(models.no_source.config, context_length)


def _replay_flops(models: Models, context_length: int) -> float:
    return ReplayPlan.parse(models.replay).target_flops(models.translator.config, context_length)


def _baseline(name: str, about: str) -> Arm:
    return Arm(
        about,
        lambda batch: batch.models.baselines[name](batch),
        needs=name,
        flops=lambda models, context_length: (
            models.baselines[name].flops(context_length) + _replay_flops(models, context_length)
        ),
    )


ARMS = {
    "native": Arm("the context itself", native, flops=_native_flops),
    "no_context": Arm("nothing", no_context, flops=lambda models, context_length: 0),
    "translated": Arm("the source's cache of the context, translated", translated, flops=_translated_flops),
    "identity": Arm("its own cache, through the translator's path: must equal native", identity, needs="identity"),
    "wrong_document": Arm("the translation of another document", translated, wrong=True),
    "native_wrong_document": Arm("another document itself", native, wrong=True),
    "wrong_source": Arm(
        "a translation of its own tokens with another document's states", wrong_source, needs="source"
    ),
    "no_source": Arm(
        "what a twin without source makes of its own embeddings", no_source, needs="no_source", flops=_no_source_flops
    ),
    "target_layers_only": Arm(
        "what a twin without source makes of its own first layers",
        target_layers_only,
        needs="no_source",
        flops=_no_source_flops,
    ),
    "zero_cache": Arm("a cache of zeros", zero_cache, needs="identity"),
    "random_cache": Arm("noise with the mean and variance of its own cache", random_cache, needs="identity"),
    "raw_copy": _baseline("raw_copy", "the source's cache, copied channel by channel"),
    "ridge": _baseline("ridge", "a full-head ridge map of the source's cache"),
    "text_handoff": Arm("what the source wrote about the context", text_handoff, needs="source", tasks_only=True),
    "source_alone": Arm("(the source itself answers)", source_alone, needs="source", reader="source", tasks_only=True),
}


def find_arm(name: str) -> Arm:
    """The arm of that name; with a plan of its own, `"translated@bottom:6"`."""
    arm, _, plan = name.partition("@")
    arm = ARMS[arm]
    if not plan:
        return arm
    return replace(arm, cache=lambda batch: arm.cache(batch.under(plan)), plan=ReplayPlan.parse(plan))


def continuation_nll(target: PreTrainedModel, cache: Cache, continuation_ids: torch.Tensor) -> torch.Tensor:
    """
    How well the target goes on from a cache without pads: the mean NLL of y_2 .. y_n, teacher-forced.

    Args:
        target (`PreTrainedModel`): The target, with its LM head.
        cache (`Cache`): The context's cache; it is written to.
        continuation_ids (`torch.Tensor` of shape `(batch, n)`): y_1 .. y_n.

    Returns:
        `torch.Tensor` of shape `(batch,)`: Nats per token, in fp32, on the CPU.
    """
    continuation_ids = continuation_ids.to(target.get_input_embeddings().weight.device)
    logits = target(input_ids=continuation_ids[:, :-1], **{cache_argument(target): cache}).logits
    return cross_entropy(logits, continuation_ids[:, 1:]).mean(dim=1)
