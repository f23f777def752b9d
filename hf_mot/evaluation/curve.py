"""The curve: what a translator keeps by each of several replay plans, measured in one run.

The arms of a plan have its name beside theirs, `translated@bottom:6`; those of the evaluation's own plan have not, and
those that no plan plays a part in are shared by all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from hf_mot.evaluation.arms import ARMS
from hf_mot.evaluation.context_nll import compare_arms
from hf_mot.evaluation.gate import MIN_DOCUMENTS, documents_of
from hf_mot.evaluation.metrics import METRICS
from hf_mot.modeling_mot import MoTModel
from hf_mot.replay_mot import ReplayPlan
from hf_mot.uncertain_mot import check_runs_slots

NEEDED_ARMS = ("native", "no_context", "translated")  # without which there is no curve
STEPS = 6  # between none and all of the target's own prefill
_LEFT_OUT = ("version", "categories", "better_by", "native_minus_no_context", "counts")  # of a task, in a point
_T = TypeVar("_T")


def default_plans(translator: MoTModel, context_length: int) -> list[str]:
    """
    Plans from the cheapest that this translator can do to the cost of a native prefill: layers at the bottom so that
    the cost grows in even steps up to all of them, which is native; the last eighth, quarter and half of the tokens;
    an eighth of them above a third of the layers; as many of those that are likeliest translated wrong, where the
    translator predicts which. `full` where a part of the layers is translated: of all, it makes of
    the context what `none` does.

    Args:
        translator (`MoTModel`): The translator.
        context_length (`int`): Target tokens of the context.
    """
    depth, config = len(translator.target_geometry.layers), translator.config
    least = 0 if config.target_hidden_layer is None else config.target_hidden_layer + 1
    base = ReplayPlan(bottom=least) if config.resume_layer is None else ReplayPlan(resume=config.resume_layer - 1)
    bottom = [ReplayPlan(bottom=count) for count in range(depth + 1)]
    last = [replace(base, tokens=context_length // part) for part in (8, 4, 2)]
    both = ReplayPlan(bottom=max(1, depth // 3, least), tokens=context_length // 8)
    last += [replace(base, uncertain=context_length // part) for part in (8, 4)]
    full = [] if len(translator.target_layers) == depth else [ReplayPlan("full")]
    possible = [plan for plan in (base, *bottom, *last, both, *full) if _is_possible(translator, plan)]
    shares = {plan: plan.flops_share(config, context_length) for plan in possible if plan in bottom}
    stairs = [min(shares, key=lambda plan: abs(shares[plan] - step / STEPS)) for step in range(STEPS + 1) if shares]
    first = [
        plan for plan in possible if plan in (base, *bottom[least : least + 2])
    ]  # nothing, and what is next to free
    others = [plan for plan in possible if plan not in shares]
    return list(dict.fromkeys(str(translator.plan(plan)) for plan in (*first, *stairs, *others)))


def _is_possible(translator: MoTModel, plan: ReplayPlan) -> bool:
    """Whether all layers that the plan leaves to the translator are translated."""
    try:
        translator.plan(plan)
    except ValueError:
        return False
    return True


def runnable_plans(plans: Sequence[str], target: PreTrainedModel) -> list[str]:
    """Those of [`default_plans`] that a target can run: not all models run single tokens in the midst of others."""
    if not any(ReplayPlan.parse(plan).uncertain for plan in plans):
        return list(plans)
    try:
        check_runs_slots(target)
    except ValueError:
        return [plan for plan in plans if not ReplayPlan.parse(plan).uncertain]
    return list(plans)


def check_plans(translator: MoTModel, plans: Sequence[str], context_length: int, replay: str) -> list[str]:
    """
    The plans of a curve, each once, by their cost.

    Args:
        translator (`MoTModel`): The translator.
        plans (`Sequence[str]`): Names of replay plans.
        context_length (`int`): Target tokens of the context.
        replay (`str`): The evaluation's own plan, which is one of them.

    Raises:
        ValueError: Without a plan, or for one that is unknown, that this translator cannot do, or that runs more
            tokens than a context has.
    """
    if not plans:
        raise ValueError("`curve` is empty. Name replay plans, e.g. none, bottom:6 and full.")
    found = {str(plan): plan for plan in (translator.plan(name, context_length) for name in (*plans, replay))}
    own = context_length - len(translator.config.target["prefix_ids"])
    for name, plan in found.items():
        if plan.run_tokens > own:
            raise ValueError(
                f"`curve` holds {name}, but a context of {context_length} target tokens has {own} besides its special "
                "prefix. Choose fewer tokens, or a longer context."
            )
    return sorted(found, key=lambda name: (found[name].flops_share(translator.config, context_length), name))


def arm_name(arm: str, plan: str, replay: str) -> str:
    """How an arm is called by a plan, in an evaluation by `replay`."""
    return arm if plan == replay or ARMS[arm].shared else f"{arm}@{plan}"


def planned_arms(arms: Sequence[str], plans: Sequence[str], replay: str) -> list[str]:
    """The arms that a curve adds to `arms`, plan by plan."""
    names = [arm_name(arm, plan, replay) for plan in plans for arm in ARMS if ARMS[arm].by_plan and arm in arms]
    return [name for name in names if name not in arms]


def columns_of(columns: Mapping[str, _T], plan: str, replay: str) -> dict[str, _T]:
    """What a plan is compared by: its own arms, and the shared ones, under their plain names."""
    names = {arm: arm_name(arm, plan, replay) for arm in ARMS if ARMS[arm].shared or ARMS[arm].by_plan}
    return {arm: columns[name] for arm, name in names.items() if name in columns}


def curve_points(
    report: Mapping[str, Any],
    shares: Mapping[str, float],
    tasks: Mapping[str, Mapping[str, dict[str, Any]]],
    costs: Mapping[str, dict[str, float]],
) -> list[dict[str, Any]]:
    """
    The report's `curve`.

    Args:
        report (`dict`): The rest of the report: its `documents` hold the NLL of each window in all arms.
        shares (`dict[str, float]`): The plans, with their share of the target's own prefill FLOPs.
        tasks (`dict`): By task, then by plan, its figures.
        costs (`dict`): By plan, its measured cost.

    Returns:
        `list[dict]`: A point a plan: `replay`, `flops_share`, and as far as they were measured `nll`, `recovery`,
        `content_recovery`, `source_value`, `arms`, `tasks` and `cost`, each as an evaluation by that plan has it.
    """
    rows = report.get("documents", [])
    nll = {
        arm: torch.tensor([row[arm] for row in rows], dtype=torch.float64)
        for arm in (rows[0] if rows else ())
        if arm != "document"
    }
    points = []
    for plan, share in shares.items():
        point: dict[str, Any] = {"replay": plan, "flops_share": share}
        if nll:
            clusters = [row["document"] for row in rows]
            figures = compare_arms(columns_of(nll, plan, report["replay"]), report["seed"], clusters)
            arms = {arm: own for arm, own in figures["arms"].items() if ARMS[arm].by_plan}
            point |= {"nll": arms["translated"]["nll"]} if "translated" in arms else {}
            point |= {metric: figures[metric] for metric in METRICS if metric in figures}
            point["arms"] = arms
        of_tasks = {
            name: {key: value for key, value in figures[plan].items() if key not in _LEFT_OUT}
            for name, figures in tasks.items()
            if plan in figures
        }
        point |= {"tasks": of_tasks} if of_tasks else {}
        point |= {"cost": costs[plan]} if plan in costs else {}
        points.append(point)
    return points


def replay_curve(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """
    What a config keeps of a report, its `replay_curve`: the points that have a recovery, in four digits; `None` if
    there is none, or if they are of too few documents to choose by, less than the gate asks for.

    Args:
        report (`dict`): What `evaluate` returned.
    """
    if documents_of(report) < MIN_DOCUMENTS:
        return None
    points = [
        {
            "replay": point["replay"],
            "flops_share": round(point["flops_share"], 4),
            "recovery": {key: round(point["recovery"][key], 4) for key in ("value", "low", "high")},
        }
        for point in report.get("curve", [])
        if "recovery" in point
    ]
    return {"context_length": report["context_length"], "n": report["n"], "points": points} if points else None
