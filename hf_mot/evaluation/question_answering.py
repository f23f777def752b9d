"""One task: its questions in both models' tokens, their scores in an arm, and the task's figures."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hf_mot.evaluation.answers import greedy_answers, read_on, token_losses
from hf_mot.evaluation.arms import SUMMARY_TOKENS, find_arm
from hf_mot.evaluation.batch import Batch, Models
from hf_mot.evaluation.measure import grouped
from hf_mot.evaluation.metrics import better_by, compare, mean_with_interval
from hf_mot.evaluation.prompts import Question, cut_to_fit
from hf_mot.evaluation.scoring import best_of, exact_match, normalize_answer, token_f1
from hf_mot.evaluation.tasks import Example, Task

CLOSED_SETS = ("likelihood", "generate")
# Answers that are scored at a time: each takes a copy of its context's cache, and logits over the whole vocabulary.
ANSWER_ROWS = 16


@dataclass
class Questions:
    """
    The questions of a task that fit both models, in the order in which they are read: drawn by seed, then those with
    the longest contexts first, so that batches are even and a wrong document is about as long as the right one.

    Args:
        by_reader (`dict[str, list[Question]]`): In the tokens of `"target"` and, if there is one, `"source"`.
        too_long (`int`): Questions left out because a model has not enough positions.
        truncated (`int`): Questions whose context was cut.
    """

    by_reader: dict[str, list[Question]] = field(default_factory=dict)
    too_long: int = 0
    truncated: int = 0

    @property
    def items(self) -> list[Question]:
        return self.by_reader["target"]


def prepare_questions(
    task: Task,
    examples: Sequence[Example],
    models: Models,
    *,
    limit: int | None = None,
    seed: int = 0,
    truncate: bool = False,
) -> Questions:
    """
    Draws questions, and makes their prompts.

    Args:
        task (`Task`): The task.
        examples (`Sequence[Example]`): All there are.
        models (`Models`): With their prompters.
        limit (`int`, *optional*): Questions, at most. All by default.
        seed (`int`, *optional*, defaults to 0): Seed of the draw.
        truncate (`bool`, *optional*, defaults to `False`): Cut contexts that are too long instead of skipping them.

    Raises:
        ValueError: If there is no question, none fits, or two have one id.
    """
    order = list(examples)
    if not order:
        raise ValueError(f"The task {task.name} is empty. Give it at least one example.")
    for name, count in Counter(example.id for example in order).items():
        if count > 1:  # one would get the other's result
            raise ValueError(f"{count} examples of {task.name} have the id {name!r}. Give each an id of its own.")
    random.Random(f"{seed}/{task.name}").shuffle(order)
    found, chosen = Questions(), []
    for example in order:
        if len(chosen) == limit:
            break
        text = cut_to_fit(example.context, _rooms(task, example, models), truncate)
        if text is None:
            found.too_long += 1
            continue
        found.truncated += text != example.context
        chosen.append((example, text))
    if not chosen:
        raise ValueError(
            f"No question of {task.name} fits: the contexts of all {found.too_long} are longer than a model allows. "
            "Truncate them, or use models with more positions."
        )
    target = [models.prompters["target"].question(task, example, text) for example, text in chosen]
    target = grouped(sorted(target, key=lambda question: -len(question.context_ids)))
    found.by_reader["target"] = target
    if "source" in models.prompters:
        found.by_reader["source"] = [models.prompters["source"].question(task, q.example, q.text) for q in target]
    return found


def _rooms(task: Task, example: Example, models: Models) -> list[tuple[Any, int]]:
    """Each model's tokenizer, and the tokens that it can have for the context beside prefix, prompt and answer."""
    rooms = []
    for side, geometry in (
        ("target", models.translator.target_geometry),
        ("source", models.translator.source_geometry),
    ):
        tokenizer = getattr(models, f"{side}_tokenizer")
        if tokenizer is None or geometry.max_positions is None:
            continue
        room = geometry.max_positions - len(getattr(models.translator.config, side)["prefix_ids"])
        prompter = models.prompters.get(side)
        if prompter is not None:  # it answers, too
            question = prompter.question(task, example, "")
            needed = len(question.prompt_ids) + max(task.max_new_tokens, *map(len, question.answer_ids))
            if side == "source":  # it may be asked for a summary
                needed = max(needed, len(prompter.encode(prompter.summary_prompt())) + SUMMARY_TOKENS)
            room -= needed
        rooms.append((tokenizer, room))
    return rooms


@dataclass(frozen=True)
class Scorer:
    """
    Scores questions in an arm: the answer's NLL (per token, of the first accepted answer) and, for an extractive task,
    what the model answers itself; for a closed set the log-likelihood of each choice.

    Args:
        task (`Task`): The task.
        models (`Models`): With their prompters.
        questions (`Questions`): The questions.
        closed_sets (`str`, *optional*, defaults to `"likelihood"`): Or `"generate"`: the choice that the model's own
            answer names.
    """

    task: Task
    models: Models
    questions: Questions
    closed_sets: Literal["likelihood", "generate"] = "likelihood"

    def __call__(self, arm: str, batch: Batch, rows: list[int]) -> list[dict[str, Any]]:
        side = find_arm(arm).reader
        model = getattr(self.models, side)
        asked = [self.questions.by_reader[side][row] for row in rows]
        cache = read_on(model, find_arm(arm).cache(batch), [question.prompt_ids[:-1] for question in asked])
        last_ids = [question.prompt_ids[-1] for question in asked]
        pairs = [(row, ids) for row, question in enumerate(asked) for ids in question.answer_ids]
        losses = []
        for start in range(0, len(pairs), ANSWER_ROWS):
            part = pairs[start : start + ANSWER_ROWS]
            caches = cache.rows(torch.tensor([row for row, _ in part]))
            losses += token_losses(model, caches, [[last_ids[row], *ids] for row, ids in part])
        each = iter(losses)
        losses = [[next(each) for _ in question.answer_ids] for question in asked]
        texts = [None] * len(asked)
        if not self.task.closed or self.closed_sets == "generate":
            tokenizer = getattr(self.models, f"{side}_tokenizer")
            texts = greedy_answers(model, tokenizer, cache, last_ids, self.task.max_new_tokens)
        return [self._result(question, own, text) for question, own, text in zip(asked, losses, texts, strict=True)]

    def _result(self, question: Question, losses: list[torch.Tensor], text: str | None) -> dict[str, Any]:
        example, nll = question.example, losses[question.gold].mean().item()
        if not all(bool(torch.isfinite(part).all()) for part in losses):
            raise ValueError(
                f"the NLL of {example.id} is {nll}. Check the dtypes of both models and the translator's weights."
            )
        result: dict[str, Any] = {"nll": nll}
        if not self.task.closed:
            scores = {
                "f1": best_of(token_f1, text, example.answers),
                "em": best_of(exact_match, text, example.answers),
            }
            return {**result, **scores, "answer": text}
        if text is None:
            likelihoods = [-part.sum().item() for part in losses]
            prediction = example.choices[likelihoods.index(max(likelihoods))]
            result["log_likelihoods"] = likelihoods
        else:
            prediction = named_choice(text, example.choices)
            result["answer"] = text
        return {**result, "accuracy": float(prediction == example.answers[0]), "prediction": prediction}


def named_choice(answer: str, choices: Sequence[str]) -> str | None:
    """The choice that a generated answer is, or starts with (the longest of several); `None` if it is none."""
    words = normalize_answer(answer).split()
    found = [choice for choice in choices if words[: len(own := normalize_answer(choice).split())] == own and own]
    return max(found, key=len, default=None)


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
