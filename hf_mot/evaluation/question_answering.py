"""One task: its questions in both models' tokens, and their scores in an arm."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hf_mot.evaluation.answers import greedy_answers, read_on, token_losses
from hf_mot.evaluation.arms import find_arm
from hf_mot.evaluation.batch import Batch, Models
from hf_mot.evaluation.caches import SUMMARY_TOKENS
from hf_mot.evaluation.measure import grouped
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
