"""Checkpoints of a run: the last whole one, and whether it belongs to the translator at hand."""

import json
import re
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from hf_mot.modeling_mot import MoTModel


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


def check_checkpoint(checkpoint: str | Path, model: MoTModel) -> None:
    """
    Refuses a checkpoint of another pair, or of a translator of another form.

    Raises:
        `ValueError`: names the first field that differs, what was expected and what came.
    """
    path = Path(checkpoint) / "config.json"
    if not path.is_file():  # of an adapter, whose base is the model at hand
        return
    # As it would be read back: without what transformers adds at saving, and with JSON's types.
    found = _flat(json.loads(path.read_text(encoding="utf-8")))
    expected = _flat(json.loads(json.dumps(model.config.to_dict(), default=str)))
    for field in expected:
        if field.split(".")[0] in _OWN_OF_A_RUN or found.get(field) == expected[field]:
            continue
        raise ValueError(
            f"The checkpoint {checkpoint} is of another translator: `{field}` is {_short(found.get(field))}, expected "
            f"{_short(expected[field])}. Resume with the pair and settings that it was made with, or start anew in "
            "another folder."
        )


_OWN_OF_A_RUN = ("transformers_version", "architectures", "dtype", "auto_map", "_name_or_path")


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
