"""Question-answering tasks: what one asks, how it is prompted and scored, and its examples from local files."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_mot.evaluation.original_formats import read_doc2dial, read_newsqa
from hf_mot.names import did_you_mean

_KEYS = ("id", "context", "question", "answers", "choices", "task")
_GZIP_MAGIC = b"\x1f\x8b"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Example:
    """
    One question about one context.

    Args:
        id (`str`): Names it in results, as `task/category/number` where there are categories.
        context (`str`): What the source reads.
        question (`str`): What the target is asked.
        answers (`tuple[str, ...]`): The accepted answers; for a closed set the right one of `choices`.
        choices (`tuple[str, ...]`, *optional*): The answers to choose from.
    """

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] | None = None

    @property
    def category(self) -> str | None:
        """What stands between the first and the last part of the id."""
        return self.id.partition("/")[2].rpartition("/")[0] or None


@dataclass(frozen=True)
class Task:
    """
    What a task asks.

    Args:
        name (`str`): Its name, and that of its folder.
        instruction (`str`): What a chat model is told before the question.
        demonstrations (`tuple[tuple[str, str], ...]`): Questions with answers that show a base model the form of an
            answer, and nothing else: no passage, at most 64 tokens.
        closed (`bool`, *optional*, defaults to `False`): Whether an answer is chosen from a set, else taken from the
            context.
        version (`str`, *optional*, defaults to `"2"`): Changes with anything that changes a result: prompts, scoring,
            the reading of files. Results of two versions are never mixed.
        max_new_tokens (`int`, *optional*, defaults to 16): Length of a generated answer, at most.
        title (`str`, *optional*): How reports call it.
        original (`Callable`, *optional*): Reads the rows from a folder with the files as their authors publish them.
    """

    name: str
    instruction: str
    demonstrations: tuple[tuple[str, str], ...]
    closed: bool = False
    version: str = "2"
    max_new_tokens: int = 16
    title: str | None = None
    original: Callable[[Path], Iterator[dict[str, Any]]] | None = None

    @property
    def metric(self) -> str:
        return "accuracy" if self.closed else "f1"


_EXTRACT = "Answer the question about the text above with as few words of it as possible."
_FACTS = (("What is the capital of France?", "Paris"), ("When did the First World War end?", "1918"))
_YES_NO = (("is the sun a star", "yes"), ("do whales lay eggs", "no"))

TASKS = {
    task.name: task
    for task in (
        Task("squad", _EXTRACT, _FACTS, title="SQuAD"),
        Task("boolq", "Answer the question about the text above with yes or no.", _YES_NO, closed=True, title="BoolQ"),
        Task(
            "pubmedqa",
            "Answer the question about the abstract above with yes, no or maybe.",
            (
                ("Does smoking cause cancer?", "yes"),
                ("Does every patient recover?", "no"),
                ("Does tea prolong life?", "maybe"),
            ),
            closed=True,
            title="PubMedQA",
        ),
        Task(
            "mmlu_redux",
            "Answer the question above with the text of the right choice.",
            (("What is 2 + 3?", "5"), ("Which planet is the largest?", "Jupiter")),
            closed=True,
            title="MMLU-Redux",
        ),
        Task("hotpotqa", _EXTRACT, _FACTS, title="HotpotQA"),
        Task("hotpotqa_long", _EXTRACT, _FACTS, title="HotpotQA, long"),
        Task("newsqa", _EXTRACT, _FACTS, title="NewsQA", original=read_newsqa),
        Task(
            "doc2dial",
            "Give the agent's next answer to the user with words of the text above.",
            (("user: When do you open?", "We open at nine on weekdays."),),
            max_new_tokens=64,
            title="Doc2Dial",
            original=read_doc2dial,
        ),
    )
}


def find_task(name: str) -> Task:
    """The task of that name. Raises `ValueError` for an unknown one, with the one that was probably meant."""
    if name not in TASKS:
        hint = did_you_mean(name, TASKS)
        raise ValueError(f"`tasks` holds {name!r}, which is no task. {hint}Choose from {', '.join(TASKS)}.")
    return TASKS[name]


def title_of(name: str) -> str:
    """How reports call a task; by its name where there is no such task."""
    return (TASKS[name].title if name in TASKS else None) or name


def load_examples(folder: str | Path, name: str) -> list[Example]:
    """
    The examples of a task from `folder/<task>/*.jsonl[.gz]`, one JSON object a line with the keys `id`, `context`,
    `question`, `answers`, `choices` and `task`; or, for NewsQA and Doc2Dial, from the files of their authors there.

    Args:
        folder (`str` or `Path`): The folder of all tasks.
        name (`str`): A key of `TASKS`.

    Raises:
        FileNotFoundError: If the task has no folder, or no file in it.
        ValueError: On an unknown task, an empty one, or a row that lacks a key or has a wrong value; the message names
            file, line and key.
    """
    task = find_task(name)
    own = Path(folder) / name
    if not own.is_dir():
        there = [path.name for path in sorted(Path(folder).glob("*/")) if path.name in TASKS]
        found = f"there are {', '.join(there)}" if there else "it holds no task at all"
        raise FileNotFoundError(f"`data` {folder} has no folder {name} for the task; {found}.")
    files = sorted(path for path in own.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
    if files:
        examples = [example for path in files for example in read_jsonl(path, task)]
    elif task.original is not None:
        examples = check_rows(task.original(own), task, str(own))
    else:
        raise FileNotFoundError(
            f"{own} holds no *.jsonl or *.jsonl.gz. Give the folder that the tasks' folders are in."
        )
    if not examples:
        raise ValueError(f"The task {name} is empty: {', '.join(map(str, files)) or own} hold no example.")
    seen = set()
    for example in examples:
        if example.id in seen:
            raise ValueError(f"{own}: the id {example.id!r} is there twice. Give each example an id of its own.")
        seen.add(example.id)
    return examples


def read_jsonl(path: Path, task: Task) -> list[Example]:
    """The examples of one file. Raises `ValueError` with file, line and key."""
    examples = []
    with open(path, "rb") as raw:
        gzipped = raw.read(2) == _GZIP_MAGIC
    try:
        with gzip.open(path) if gzipped else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except ValueError as error:  # of the encoding, too
                    raise ValueError(f"{path}, line {number}, is not JSON ({error}).") from error
                examples.append(_check(row, task, f"{path}, line {number}"))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is gzipped, but damaged ({error}). Copy or download it again.") from error
    return examples


def check_rows(rows: Iterable[Mapping[str, Any]], task: Task, where: str) -> list[Example]:
    """Examples of rows that come from elsewhere than a file of lines."""
    return [_check(row, task, f"{where}, row {number}") for number, row in enumerate(rows, 1)]


def _check(row: Any, task: Task, where: str) -> Example:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: must be an object with the keys {', '.join(_KEYS)}, got {type(row).__name__}.")
    for key in _KEYS:
        if key not in row:
            raise ValueError(f"{where}: the key {key!r} is missing. A row has {', '.join(_KEYS)}.")
    for key in ("id", "context", "question"):
        if not isinstance(row[key], str) or not row[key].strip():
            raise ValueError(f"{where}: {key!r} must be a text that is not empty, got {row[key]!r}.")
    answers, choices = row["answers"], row["choices"]
    for key, value in (("answers", answers), ("choices", choices)):
        if key == "choices" and value is None and not task.closed:
            continue
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(text, str) and text.strip() for text in value)
        ):
            raise ValueError(f"{where}: {key!r} must be a list of texts that are not empty, got {value!r}.")
    if task.closed and (len(answers) != 1 or answers[0] not in choices):
        raise ValueError(f"{where}: 'answers' must be one of 'choices' {choices!r}, got {answers!r}.")
    for key in ("id", "context", "question", "answers", "choices"):
        if _SURROGATE.search("".join(row[key] or ())):
            raise ValueError(f"{where}: {key!r} holds half a character (a lone surrogate), which no tokenizer reads.")
    return Example(row["id"], row["context"], row["question"], tuple(answers), tuple(choices) if task.closed else None)
