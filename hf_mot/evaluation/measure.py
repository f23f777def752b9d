"""The loop over batches and arms: what is scored once is never scored again, and a crash in one arm is its own."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tqdm.auto import tqdm
from transformers.utils import logging

from hf_mot.evaluation.arms import find_arm
from hf_mot.evaluation.batch import Batch, Models
from hf_mot.evaluation.describe import fingerprint
from hf_mot.evaluation.store import ResultStore

logger = logging.get_logger(__name__)

CRASHES = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, OSError)


class Item(Protocol):
    """What is scored: a context with an id of its own and, in `group`, what it shares with others (a document). A
    dataclass, so that its `repr` tells all of it."""

    id: str
    group: Any
    text: str
    context_ids: list[int]


def grouped(items: Sequence[Item]) -> list[Item]:
    """The items with those of one group next to each other, else in the same order."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    return [item for members in groups.values() for item in members]


def partner_shift(items: Sequence[Item], arms: str = "wrong_document") -> int:
    """
    How far ahead in the (grouped) order another document surely is: 1 where each has one item. `arms` need it.

    Raises:
        ValueError: If there is none, or one document has more items than all others together.
    """
    sizes: dict[Any, int] = {}
    for item in items:
        sizes[item.group] = sizes.get(item.group, 0) + 1
    shift = max(sizes.values())
    others = [items[(index + shift) % len(items)] for index in range(len(items))]
    if len(sizes) < 2:
        raise ValueError(
            f"`arms` holds {arms}, which needs at least 2 documents, got {len(sizes)} of sufficient length. Give more "
            "documents, or leave the arm out."
        )
    if any(item.group == other.group for item, other in zip(items, others, strict=True)):
        raise ValueError(
            f"`arms` holds {arms}, which needs another document for each window or question, but one document has "
            f"{shift} of {len(items)}. Give more documents, or leave the arm out."
        )
    return shift


def measure(
    part: str,
    items: Sequence[Item],
    arms: Sequence[str],
    models: Models,
    score: Callable[[str, Batch, list[int]], list[dict[str, Any]]],
    store: ResultStore,
    *,
    batch_size: int = 4,
    progress: bool = True,
) -> dict[str, str]:
    """
    Scores all items in all arms.

    Args:
        part (`str`): What the results belong to.
        items (`Sequence[Item]`): Grouped, in the order in which they are read.
        arms (`Sequence[str]`): Names of arms, as in `find_arm`.
        models (`Models`): All that the arms may use.
        score (`Callable`): From an arm's name, contexts and the numbers of the items that are judged on its caches of
            these to a result each.
        store (`ResultStore`): Keeps the results.
        batch_size (`int`, *optional*, defaults to 4): Contexts read together; changes nothing but speed and memory.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

    Returns:
        `dict`: Why an arm has not all its results, by its name.

    Raises:
        ValueError, RuntimeError, …: Without an arm; or what the last arm crashed with, if none has gone through.
    """
    if not arms:
        raise ValueError(
            f"`arms` holds none that has a meaning for {part}. text_handoff and source_alone have one for questions "
            "alone, native_wrong_document for documents alone. Add an arm."
        )
    needs_other = [arm for arm in arms if find_arm(arm).needs_other]
    shift = partner_shift(items, ", ".join(needs_other)) if needs_other else 0
    failed: dict[str, str] = {}
    done = sum(item.id in store.results(part, arm) for arm in arms for item in items)
    with tqdm(
        total=len(items) * len(arms), initial=done, desc=part, disable=not progress, unit="example", smoothing=0.05
    ) as bar:
        for start in range(0, len(items), batch_size):
            contexts = range(start, min(start + batch_size, len(items)))
            batch = _batch(models, items, list(contexts), shift)
            for arm in arms:
                if arm in failed:
                    continue
                judged = {row: (row - shift) % len(items) if find_arm(arm).wrong else row for row in contexts}
                known = store.results(part, arm)
                pending = [row for row in contexts if items[judged[row]].id not in known]
                if not pending:
                    continue
                bar.set_postfix_str(arm, refresh=False)
                # What a killed run left of a batch is read alone: nothing is scored twice.
                own = batch if len(pending) == len(contexts) else _batch(models, items, pending, shift)
                rows = [judged[row] for row in pending]
                try:
                    results = score(arm, own, rows)
                except CRASHES as error:
                    if set(arms) == {*failed, arm}:
                        raise
                    failed[arm] = describe_crash(error)
                    logger.warning(f"The arm {arm} of {part} crashed and is left out: {failed[arm]}")
                    continue
                store.add(part, arm, [(items[row].id, result) for row, result in zip(rows, results, strict=True)])
                bar.update(len(rows))
    return failed


def describe_crash(error: Exception) -> str:
    """An error as a line of a report."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def has_crashed(report: Mapping[str, Any]) -> bool:
    """Whether an arm of the evaluation's own plan, or its cost, is missing of a report. What is missing of a curve may
    be a plan of more tokens than a context has: that is none."""
    return any("@" not in arm for arms in report.get("missing", {}).values() for arm in arms)


def _batch(models: Models, items: Sequence[Item], rows: list[int], shift: int) -> Batch:
    others = [items[(row + shift) % len(items)] for row in rows] if shift else []
    return Batch(models, [items[row] for row in rows], others)


def own_settings(models: Models, arms: Sequence[str]) -> dict[str, dict[str, str]]:
    """By arm what its results depend on, and no other arm's."""
    twin = {} if models.no_source is None else {"twin": fingerprint(models.no_source)}
    asked = {"source_prompt": models.prompters["source"].style} if "source" in models.prompters else {}
    baselines = {
        name: {"baseline": hashlib.sha256(json.dumps(baseline.report).encode()).hexdigest()[:16]}
        for name, baseline in models.baselines.items()
        if baseline.report
    }
    found = {name: find_arm(name) for name in arms}
    return {
        name: (twin if arm.needs == "no_source" else baselines.get(arm.needs, {})) | (asked if arm.tasks_only else {})
        for name, arm in found.items()
    }


def digest(items: Sequence[Item]) -> str:
    """A short hash of all that is read, asked and scored, in its order, by which results of others are told apart."""
    found = hashlib.sha256()
    for item in items:
        found.update(f"{item!r}\n".encode())
    return found.hexdigest()[:16]
