"""Checkpoints of a run: the last whole one, whether it belongs to the translator at hand, and the folder for them."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import CONFIG_NAME

from hf_mot.modeling_mot import MoTModel
from hf_mot.pretrained_mot import FIT_REPORT

BASE_CONFIG = "translator_config.json"  # of the translator below an adapter


def last_checkpoint(folder: str | Path) -> str | None:
    """The newest checkpoint of a run that was written to its end: a run can be killed while it writes one. The
    trainer's state is its last file."""
    folder = Path(folder)
    numbered = ((path, re.fullmatch(r"checkpoint-(\d+)", path.name)) for path in folder.glob("checkpoint-*"))
    for _, path in sorted(((int(found[1]), path) for path, found in numbered if found), reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def missing_folders(folder: str | Path) -> list[Path]:
    """A folder and those that it lies in, as far as they are not there yet, deepest first."""
    folder = Path(folder).absolute()
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes those folders that are there and empty."""
    for folder in folders:
        with suppress(OSError):  # it is neither
            folder.rmdir()


def save_base(folder: str | Path, model: MoTModel) -> None:
    """Writes beside an adapter what the translator below it is, and how it was trained: its own files say neither."""
    text = json.dumps(model.config.to_dict(), indent=2, default=str)
    (Path(folder) / BASE_CONFIG).write_text(text + "\n", encoding="utf-8")
    text = json.dumps(model.fit_report, indent=2, ensure_ascii=False)
    (Path(folder) / FIT_REPORT).write_text(text + "\n", encoding="utf-8")


def check_checkpoint(checkpoint: str | Path, model: MoTModel) -> None:
    """
    Refuses a checkpoint of another pair, or of a translator of another form, also below an adapter.

    Raises:
        `ValueError`: names the first field that differs, what was expected and what came.
    """
    paths = [Path(checkpoint) / name for name in (CONFIG_NAME, BASE_CONFIG)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:  # no checkpoint, which the trainer says
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    expected = json.loads(json.dumps(model.config.to_dict(), default=str))
    own = [name for name in type(model.config).__annotations__ if name in expected]
    default = json.loads(json.dumps(type(model.config)().to_dict(), default=str))  # a release before had fewer fields
    _refuse_difference(
        {name: found.get(name, default.get(name)) for name in own},
        {name: expected[name] for name in own},
        f"The checkpoint {checkpoint} is of another translator",
        "Resume with the pair and the method that it was made with",
    )


def check_progress(checkpoint: str | Path, max_steps: int, processes: int) -> None:
    """
    Refuses to go on from a checkpoint with fewer steps in all than it has made, or by another number of processes.

    Raises:
        `ValueError`: names what was expected and what came.
    """
    path = Path(checkpoint) / TRAINER_STATE_NAME
    steps = json.loads(path.read_text(encoding="utf-8"))["global_step"] if path.is_file() else 0
    if 0 < max_steps < steps:
        raise ValueError(
            f"`max_steps` is {max_steps}, but the checkpoint {checkpoint} has made {steps} already. Give as many or "
            "more, or start anew in another folder."
        )
    made_by = _training(checkpoint).get("processes", processes)
    if made_by != processes:
        raise ValueError(
            f"The checkpoint {checkpoint} was made by {made_by} processes, but this run has {processes}. Resume with "
            "as many, which share out the examples alike, or start anew in another folder."
        )


def check_run(checkpoint: str | Path, report: dict[str, Any]) -> None:
    """
    Refuses to go on from a checkpoint with other settings, plan, text or dtype of the models than it was made with.

    Args:
        checkpoint (`str` or `Path`): The checkpoint.
        report (`dict`): The training report of the run that is to go on.

    Raises:
        `ValueError`: names the first setting that differs, what was expected and what came.
    """
    found = _training(checkpoint)
    if not found:
        return
    found = {"lines": False, "dtype": "float32", **found}  # a release before did not say
    compared = ("settings", "replay", "corpus", "lines", "dtype")
    _refuse_difference(
        {name: found.get(name) for name in compared},
        {name: json.loads(json.dumps(report.get(name))) for name in compared},
        f"The checkpoint {checkpoint} was made with other settings",
        "Resume with the same ones",
    )


def _training(checkpoint: str | Path) -> dict[str, Any]:
    """How a checkpoint was trained, as far as it says so."""
    path = Path(checkpoint) / FIT_REPORT
    return json.loads(path.read_text(encoding="utf-8")).get("training", {}) if path.is_file() else {}


def _refuse_difference(found: dict[str, Any], expected: dict[str, Any], what: str, way_out: str) -> None:
    found, expected = _flat(found), _flat(expected)
    for field in dict.fromkeys([*expected, *found]):
        if found.get(field) != expected.get(field):
            raise ValueError(
                f"{what}: `{field}` is {_short(found.get(field))}, expected {_short(expected.get(field))}. {way_out}, "
                "or start anew in another folder."
            )


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted names."""
    if not isinstance(values, dict):
        return {prefix: values}
    return {
        name: value
        for key, part in values.items()
        for name, value in _flat(part, f"{prefix}.{key}" if prefix else key).items()
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}…"
