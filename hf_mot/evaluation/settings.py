"""What is checked of an evaluation before it costs anything: its options, and its models."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.baselines import BASELINES
from hf_mot.contract_mot import check_model, check_tokenizer
from hf_mot.evaluation.arms import ARMS, find_arm
from hf_mot.evaluation.batch import Baseline
from hf_mot.evaluation.curve import NEEDED_ARMS, check_plans, planned_arms
from hf_mot.evaluation.gate import GATE_ARMS, Gate
from hf_mot.evaluation.question_answering import CLOSED_SETS
from hf_mot.evaluation.tasks import find_task
from hf_mot.evaluation.windows import check_context_length
from hf_mot.guidance_mot import check_guide
from hf_mot.modeling_mot import MoTModel
from hf_mot.names import did_you_mean
from hf_mot.replay_mot import ReplayPlan
from hf_mot.sparse_mot import sparse_way
from hf_mot.uncertain_mot import check_runs_slots

DEFAULT_ARMS = ("native", "no_context", "translated", "wrong_document")


def check_parts(
    documents: Any,
    tasks: Collection[str],
    closed_sets: str = "likelihood",
    cost_context_length: int | None = None,
) -> None:
    """Refuses to measure on nothing, and options of another part than there is. Arguments as in [`evaluate`]."""
    if documents is None and not tasks:
        raise ValueError("`documents` and `tasks` are both missing: there is nothing to measure on. Give one of them.")
    if cost_context_length is not None and documents is None:
        raise ValueError(
            "`cost_context_length` needs documents to take so many tokens from. Give some, or leave it out: cost is "
            "measured on the longest context of the first task then."
        )
    if closed_sets not in CLOSED_SETS:
        raise ValueError(f"`closed_sets` must be one of {', '.join(CLOSED_SETS)}, got {closed_sets!r}.")


def check_settings(
    translator: MoTModel,
    *,
    arms: Sequence[str] = DEFAULT_ARMS,
    tasks: Iterable[str] = (),
    context_length: int = 256,
    limit: int | None = None,
    batch_size: int = 4,
    replay: str | None = None,
    cost_context_length: int | None = None,
    gate: Gate | None = None,
    curve: Sequence[str] | None = None,
) -> list[str]:
    """
    What can be checked before a model is loaded. Arguments as in [`evaluate`].

    Returns:
        `list[str]`: The arms to run, each once, and those that content recovery, the gate and the curve need.

    Raises:
        ValueError: On an unknown arm, task or plan, or a bad `context_length`, `limit` or `batch_size`.
    """
    if not arms:
        raise ValueError(f"`arms` is empty. Choose from {', '.join(ARMS)}.")
    for arm in arms:
        if arm not in ARMS:
            hint = did_you_mean(arm, ARMS)
            raise ValueError(f"`arms` holds {arm!r}, which is no arm. {hint}Choose from {', '.join(ARMS)}.")
    for name in tasks:
        find_task(name)
    for length in (context_length, cost_context_length):
        if length is not None:
            check_context_length(length, translator.target_geometry.max_positions)
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be at least 1 document, or None for all, got {limit}.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1 document, got {batch_size}.")
    replay = str(translator.plan(replay, context_length))
    if "target_layers_only" in arms and translator.config.target_hidden_layer is None:
        raise ValueError(
            "`arms` holds target_layers_only, but this translator reads no hidden state of the target, so that its "
            "twin does not tell what the target's own layers do alone. Fit one that does, with `target_hidden_layer` "
            "(hf-mot fit --target-hidden-layer N), or leave the arm out."
        )
    arms = [*arms, *(GATE_ARMS if gate is not None else ()), *(NEEDED_ARMS if curve is not None else ())]
    helper = ["native_wrong_document"] if "wrong_document" in arms else []
    arms = list(dict.fromkeys([*arms, *helper]))
    plans = [replay] if curve is None else check_plans(translator, curve, context_length, replay)
    without = [arm for arm in arms if ARMS[arm].states_only]
    resumed = [plan for plan in plans if ReplayPlan.parse(plan).resume is not None]
    if resumed and without:
        raise ValueError(
            f"`arms` holds {', '.join(without)}, which give keys and values alone, but the plan {resumed[0]} runs the "
            "target from a hidden state. Leave them out."
        )
    return arms if curve is None else [*arms, *planned_arms(arms, plans, replay)]


def check_replay(translator: MoTModel, replay: str, context_length: int) -> None:
    """Refuses a plan of more tokens than a document's context has."""
    own = context_length - len(translator.config.target["prefix_ids"])
    if ReplayPlan.parse(replay).run_tokens > own:
        raise ValueError(
            f"`replay` is {replay}, but a context of {context_length} target tokens has {own} besides its special "
            "prefix. Choose fewer tokens, or a longer context."
        )


def check_pair(
    translator: MoTModel,
    no_source: MoTModel | None,
    source: PreTrainedModel | None,
    target: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """
    Refuses what is not the translator's pair before anything is read. Arguments as in [`evaluate`].

    Raises:
        ValueError: On a missing source, models in training mode, models or tokenizers that are not those of the
            translator's pair, or a twin that reads a source or was made for another target.
    """
    if source is None and translator.config.source_layers:
        raise ValueError("`source` is None, but this translator reads a source. Pass the source and its tokenizer.")
    for name, model in (("source", source), ("target", target), ("translator", translator), ("no_source", no_source)):
        if model is not None and model.training:
            raise ValueError(f"`{name}` is in training mode, where dropout blurs the figures. Call {name}.eval().")
    for side, model, tokenizer in (
        ("source", source, source_tokenizer),
        ("target", target, target_tokenizer),
    ):
        if model is not None:
            contract = getattr(translator.config, side)
            check_model(contract, model, side)
            check_tokenizer(contract, tokenizer, f"{side}_tokenizer")
    if no_source is not None:
        check_twin(no_source, target)


def check_twin(no_source: MoTModel, target: PreTrainedModel, allow_variant: bool = False) -> None:
    """Refuses a twin that reads a source, or was made for another target. Raises `ValueError`."""
    if no_source.config.source_layers:
        raise ValueError(
            f"`no_source` reads the source's layers {no_source.config.source_layers}: it is no control. Pass the twin "
            "that the fit saved in OUT/no_source."
        )
    try:
        check_model(no_source.config.target, target, "target", allow_variant)
    except ValueError as error:
        raise ValueError(f"`no_source` is the twin of another pair: {error}") from error


def check_models(
    arms: Iterable[str],
    translator: MoTModel,
    no_source: MoTModel | None,
    source: PreTrainedModel | None,
    target: PreTrainedModel,
    baselines: Mapping[str, Baseline],
    plans: Iterable[str] = (),
) -> None:
    """
    What can be checked before anything is read. Arguments as in [`evaluate`]; `plans` are all that are measured.

    Raises:
        ValueError: On arms that lack what they need, or models that cannot do a plan.
    """
    for arm in arms:
        needs = find_arm(arm).needs
        if needs == "no_source" and no_source is None:
            raise ValueError(
                f"`no_source` is None, but the arm {arm} needs the translator's twin. Pass the one that the fit "
                "saved in OUT/no_source, or leave the arm out of `arms`."
            )
        if needs == "source" and not translator.config.source_layers:
            raise ValueError(f"`arms` holds {arm}, but this translator reads no source. Leave the arm out.")
        if needs in BASELINES and needs not in baselines:
            raise ValueError(
                f"`arms` holds {arm}, but `baselines` holds none of that name. Make it with hf_mot.baselines, or "
                "leave the arm out."
            )
    plans = [ReplayPlan.parse(plan) for plan in plans]
    if no_source is not None and any(find_arm(arm).needs == "no_source" for arm in arms):
        for plan in plans:  # a twin of another form is refused now, not after hours
            no_source.plan(plan.unguided)
    if any(plan.sparse for plan in plans):
        check_guide(source)
        sparse_way(target)
    if any(plan.uncertain for plan in plans):
        check_runs_slots(target)
