"""Arms: the ways in which the target can come by a context, each from contexts to a cache, behind one protocol."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hf_mot.baselines import BASELINES
from hf_mot.cache_mot import TranslatedCache
from hf_mot.evaluation.batch import Batch, Models
from hf_mot.evaluation.caches import (
    identity,
    native,
    no_context,
    no_source,
    random_cache,
    source_alone,
    target_layers_only,
    text_handoff,
    translated,
    wrong_source,
    zero_cache,
)
from hf_mot.replay_cost_mot import native_flops
from hf_mot.replay_mot import ReplayPlan


@dataclass(frozen=True)
class Arm:
    """
    One way to come by a context.

    Args:
        about (`str`): What is then read, for a table.
        cache (`Callable[[Batch], TranslatedCache]`): From contexts to caches.
        wrong (`bool`, *optional*, defaults to `False`): Whether the cache is judged on an item of another document:
            for that item it is the cache of one some places ahead.
        mixed (`bool`, *optional*, defaults to `False`): Whether it reads contexts of other documents beside its own.
        reader (`str`, *optional*, defaults to `"target"`): Who answers from it.
        needs (`str`, *optional*): What it cannot do without: `"source"`, `"no_source"`, `"identity"` or a baseline.
        flops (`Callable[[Models, int], float]`, *optional*): FLOPs of getting the cache of so many target tokens.
        tasks_only (`bool`, *optional*, defaults to `False`): Whether it has a meaning for questions alone.
        shared (`bool`, *optional*, defaults to `False`): Whether it is alike for every translator of a pair, whatever
            the plan.
        by_plan (`bool`, *optional*, defaults to `False`): Whether a curve measures it by each of its plans.
        similar (`bool`, *optional*, defaults to `False`): Whether its cache, of the right tokens each where it
            belongs, is compared with the target's own.
        states_only (`bool`, *optional*, defaults to `False`): Whether it gives keys and values alone, so that no plan
            can resume from it.
        plan ([`ReplayPlan`], *optional*): A replay plan of its own, instead of the evaluation's.
    """

    about: str
    cache: Callable[[Batch], TranslatedCache]
    wrong: bool = False
    mixed: bool = False
    reader: Literal["target", "source"] = "target"
    needs: str | None = None
    flops: Callable[[Models, int], float] | None = None
    tasks_only: bool = False
    shared: bool = False
    by_plan: bool = False
    similar: bool = False
    states_only: bool = False
    plan: ReplayPlan | None = None

    @property
    def needs_other(self) -> bool:
        """Whether it cannot be had of one document alone."""
        return self.wrong or self.mixed


def _native_flops(models: Models, context_length: int) -> float:
    return native_flops(models.translator.target_geometry, context_length)


def _translated_flops(models: Models, context_length: int) -> float:
    return ReplayPlan.parse(models.replay).flops(models.translator.config, context_length)


def _no_source_flops(models: Models, context_length: int) -> float:
    return ReplayPlan.parse(models.replay).unguided.flops(models.no_source.config, context_length)


def _replay_flops(models: Models, context_length: int) -> float:
    return ReplayPlan.parse(models.replay).target_flops(models.translator.config, context_length)


def _baseline(name: str) -> Arm:
    return Arm(
        BASELINES[name].about,
        lambda batch: batch.models.baselines[name](batch),
        needs=name,
        flops=lambda models, context_length: (
            models.baselines[name].flops(context_length) + _replay_flops(models, context_length)
        ),
        similar=True,
        states_only=True,
    )


ARMS = {
    "native": Arm("the context itself", native, flops=_native_flops, shared=True),
    "no_context": Arm("nothing", no_context, flops=lambda models, context_length: 0, shared=True),
    "translated": Arm(
        "the source's cache of the context, translated",
        translated,
        flops=_translated_flops,
        by_plan=True,
        similar=True,
    ),
    "identity": Arm("its own cache, through the translator's path: must equal native", identity, needs="identity"),
    "wrong_document": Arm("the translation of another document", translated, wrong=True, by_plan=True),
    "native_wrong_document": Arm("another document itself", native, wrong=True, shared=True),
    "wrong_source": Arm(
        "a translation of its own tokens with another document's states",
        wrong_source,
        mixed=True,
        needs="source",
        similar=True,
    ),
    "no_source": Arm(
        "what a twin without source makes of its own embeddings",
        no_source,
        needs="no_source",
        flops=_no_source_flops,
        by_plan=True,
        similar=True,
    ),
    "target_layers_only": Arm(
        "what a twin without source makes of its own first layers",
        target_layers_only,
        needs="no_source",
        flops=_no_source_flops,
        by_plan=True,
    ),
    "zero_cache": Arm("a cache of zeros", zero_cache, needs="identity", similar=True, states_only=True),
    "random_cache": Arm(
        "noise with the mean and variance of its own cache",
        random_cache,
        needs="identity",
        similar=True,
        states_only=True,
    ),
    **{name: _baseline(name) for name in BASELINES},
    "text_handoff": Arm(
        "what the source wrote about the context", text_handoff, needs="source", tasks_only=True, shared=True
    ),
    "source_alone": Arm(
        "(the source itself answers)", source_alone, reader="source", needs="source", tasks_only=True, shared=True
    ),
}


def find_arm(name: str) -> Arm:
    """The arm of that name; with a plan of its own, `"translated@bottom:6"`."""
    arm, _, plan = name.partition("@")
    arm = ARMS[arm]
    if not plan:
        return arm
    # Cosines are of the layers that the evaluation's own plan leaves to a translation.
    return replace(arm, cache=lambda batch: arm.cache(batch.under(plan)), similar=False, plan=ReplayPlan.parse(plan))
