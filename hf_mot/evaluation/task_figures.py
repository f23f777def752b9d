"""The part of a report that is about one task: its questions scored in all arms, and what comes of that."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_mot.evaluation.arms import find_arm
from hf_mot.evaluation.batch import Models
from hf_mot.evaluation.curve import columns_of
from hf_mot.evaluation.measure import digest, measure, own_settings
from hf_mot.evaluation.metrics import better_by, compare, mean_with_interval
from hf_mot.evaluation.prompts import Question
from hf_mot.evaluation.question_answering import Questions, Scorer
from hf_mot.evaluation.store import ResultStore
from hf_mot.evaluation.tasks import TASKS, Task


def measure_task(
    name: str,
    models: Models,
    questions: Questions,
    arms: list[str],
    store: ResultStore,
    settings: dict[str, Any],
    closed_sets: str,
    batch_size: int,
    progress: bool,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The report's part on one task by each plan, the evaluation's own first, and the arms that crashed."""
    task, style = TASKS[name], models.prompters["target"].style
    own = {"version": task.version, "prompt": style, "items": digest(questions.items)}
    own |= {"closed_sets": closed_sets} if task.closed else {}
    # A plan of more tokens than the shortest context has would crash at it, when all others are done.
    shortest = min(len(question.context_ids) for question in questions.items) - len(models.prefix_ids)
    plans = {arm: find_arm(arm).plan for arm in arms}
    short = {
        arm: f"`replay` {plan} runs more tokens than the {shortest} of the shortest context"
        for arm, plan in plans.items()
        if plan and plan.run_tokens > shortest
    }
    arms = [arm for arm in arms if arm not in short]
    store.open(name, {**settings, **own}, own_settings(models, arms))
    scorer = Scorer(task, models, questions, closed_sets)
    failed = measure(name, questions.items, arms, models, scorer, store, batch_size=batch_size, progress=progress)
    results = {arm: store.results(name, arm) for arm in arms if arm not in failed}
    replay = settings["replay"]
    by_plan = {replay: {arm: rows for arm, rows in results.items() if plans[arm] is None}}
    for plan in filter(None, plans.values()):
        if "translated" in (rows := columns_of(results, str(plan), replay)):
            by_plan[str(plan)] = rows
    figures = {
        plan: {"prompt": style, **task_figures(task, questions, rows, settings["seed"])}
        for plan, rows in by_plan.items()
    }
    return figures, failed | short


def task_figures(
    task: Task, questions: Questions, results: Mapping[str, Mapping[str, dict[str, Any]]], seed: int
) -> dict[str, Any]:
    """
    The part of the report that is about one task.

    Args:
        task (`Task`): The task.
        questions (`Questions`): Its questions.
        results (`Mapping`): By arm, then by the question's id; arms with all results.
        seed (`int`): Of the bootstrap.

    Returns:
        `dict`: The mean of the metric by arm; `n_documents`, where several questions are about one context; of two or
        more documents `intervals`; `share_of_native`; `better_by`, by how much `translated` is
        better than a control, paired; `native_minus_no_context` and `counts`, whether its interval excludes 0;
        `answer_nll`, likewise, with `recovery`; `categories`, where there are several; `answers_longer_than_cut`, how
        many first answers are longer, in the target's tokens, than what is generated of one, if there are any.
    """
    items = questions.items
    clusters = [question.group for question in items]
    values = _columns(results, items, task.metric)
    nll = _columns({arm: rows for arm, rows in results.items() if find_arm(arm).reader == "target"}, items, "nll")
    figures: dict[str, Any] = {"metric": task.metric, "version": task.version, "n": len(items)}
    counts = {"too_long": questions.too_long, "truncated": questions.truncated}
    if any("answer" in result for rows in results.values() for result in rows.values()):
        long = [question for question in items if len(question.answer_ids[question.gold]) > task.max_new_tokens]
        counts["answers_longer_than_cut"] = len(long)
    figures |= {name: count for name, count in counts.items() if count}
    figures |= {arm: column.mean().item() for arm, column in values.items()}
    if not task.closed:
        figures["em"] = {arm: column.mean().item() for arm, column in _columns(results, items, "em").items()}
    documents = len(set(clusters))
    if documents < len(items):
        figures["n_documents"] = documents
    if documents > 1:
        intervals = {arm: mean_with_interval(column, seed, clusters) for arm, column in values.items()}
        figures["intervals"] = {arm: {"low": own["low"], "high": own["high"]} for arm, own in intervals.items()}
    if "native" in values and values["native"].mean() > 0:
        figures["share_of_native"] = {
            arm: (column.mean() / values["native"].mean()).item() for arm, column in values.items() if arm != "native"
        }
    if documents > 1 and {"native", "no_context"} <= values.keys():
        difference = mean_with_interval(values["native"] - values["no_context"], seed, clusters)
        figures["native_minus_no_context"] = difference
        figures["counts"] = difference["low"] > 0 or difference["high"] < 0
    figures |= better_by(values, seed, clusters)
    figures["answer_nll"] = _nll_figures(nll, seed, clusters)
    categories = dict.fromkeys(question.example.category for question in items)
    if len(categories) > 1:
        figures["categories"] = {
            category: _category(values, [question.example.category == category for question in items])
            for category in sorted(categories, key=str)
        }
    return figures


def _columns(results, items: Sequence[Question], key: str) -> dict[str, torch.Tensor]:
    return {
        arm: torch.tensor([rows[item.id][key] for item in items], dtype=torch.float64) for arm, rows in results.items()
    }


def _nll_figures(nll: dict[str, torch.Tensor], seed: int, clusters) -> dict[str, Any]:
    figures: dict[str, Any] = {arm: column.mean().item() for arm, column in nll.items()}
    recoveries, notes = {}, []
    for arm in nll:
        if arm in ("native", "no_context"):
            continue
        figure, note = compare(nll, "recovery", arm, seed=seed, clusters=clusters)
        recoveries |= {arm: figure} if figure else {}
        notes += [note] if note and arm == "translated" else []
    if "translated" in recoveries:
        figures["recovery"] = recoveries["translated"]
    if recoveries:
        figures["recoveries"] = recoveries
    return figures | better_by(nll, seed, clusters, sign=-1) | ({"notes": notes} if notes else {})


def _category(values: dict[str, torch.Tensor], members: list[bool]) -> dict[str, Any]:
    index = torch.tensor(members)
    return {"n": sum(members), **{arm: column[index].mean().item() for arm, column in values.items()}}
