"""The examples of tasks from the Hub, through `datasets` (an extra)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hf_mot.evaluation.tasks import Example, check_rows, find_task

Row = Mapping[str, Any]


def _row(task: str, name: Any, context: str, question: str, answers: list[str], choices=None) -> dict[str, Any]:
    return {
        "id": f"{task}/{name}",
        "context": context,
        "question": question,
        "answers": answers,
        "choices": choices,
        "task": task,
    }


def _squad(row: Row, number: int) -> dict[str, Any]:
    answers = list(dict.fromkeys(row["answers"]["text"]))
    return _row("squad", row["id"], row["context"], row["question"], answers)


def _boolq(row: Row, number: int) -> dict[str, Any]:
    answer = "yes" if row["answer"] else "no"
    return _row("boolq", number, row["passage"], row["question"], [answer], ["yes", "no"])


def _pubmedqa(row: Row, number: int) -> dict[str, Any]:
    context = "\n".join(row["context"]["contexts"])
    choices = ["yes", "no", "maybe"]
    return _row("pubmedqa", row["pubid"], context, row["question"], [row["final_decision"]], choices)


def _mmlu_redux(row: Row, number: int) -> dict[str, Any] | None:
    if row["error_type"] != "ok":
        return None
    choices = list(row["choices"])
    lines = [f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True)]
    context = "\n".join([row["question"], *lines])
    name = f"{row['subject']}/{number}"
    return _row("mmlu_redux", name, context, row["question"], [choices[row["answer"]]], choices)


def _hotpotqa(row: Row, number: int) -> dict[str, Any]:
    passages = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
    context = "\n\n".join(
        f"Passage {index}:\n{title}\n{''.join(sentences)}" for index, (title, sentences) in enumerate(passages, 1)
    )
    return _row("hotpotqa", row["id"], context, row["question"], [row["answer"]])


# task: (Hub id, configuration or "*" for all of them, split, from one of its rows to one of ours)
SOURCES: dict[str, tuple[str, str | None, str, Callable[[Row, int], dict[str, Any] | None]]] = {
    "squad": ("rajpurkar/squad", None, "validation", _squad),
    "boolq": ("google/boolq", None, "validation", _boolq),
    "pubmedqa": ("qiaojin/PubMedQA", "pqa_labeled", "train", _pubmedqa),
    "mmlu_redux": ("edinburgh-dawg/mmlu-redux-2.0", "*", "test", _mmlu_redux),
    "hotpotqa": ("hotpotqa/hotpot_qa", "distractor", "validation", _hotpotqa),
}


def load_hub_examples(name: str) -> list[Example]:
    """
    The examples of a task from the Hub.

    Args:
        name (`str`): A task that is there: a key of `SOURCES`.

    Raises:
        ImportError: Without `datasets`.
        ValueError: On an unknown task, one that is not on the Hub, or rows of another form.
    """
    task = find_task(name)
    if name not in SOURCES:
        raise ValueError(
            f"`tasks` holds {name}, which is not on the Hub in a form that is read here. Give `data`, a folder with "
            f"its files; from the Hub there are {', '.join(SOURCES)}."
        )
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "Tasks come from the Hub through datasets: pip install hf-mot[data], or give `data`."
        ) from error
    repository, config, split, convert = SOURCES[name]
    if config != "*":
        parts: Iterable[Row] = datasets.load_dataset(repository, config, split=split)
    else:
        names = datasets.get_dataset_config_names(repository)
        parts = (
            {**row, "subject": subject}
            for subject in names
            for row in datasets.load_dataset(repository, subject, split=split)
        )
    return check_rows(_converted(parts, convert, repository), task, repository)


def _converted(rows: Iterable[Row], convert, repository: str) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        try:
            converted = convert(row, number)
        except KeyError as error:
            raise ValueError(
                f"{repository}, row {number}: the column {error} is missing. Its form has changed."
            ) from error
        if converted is not None:
            yield converted
