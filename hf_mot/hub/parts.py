"""Which files of a folder make a translator, and whether they are fit to be published."""

import json
import os
import posixpath
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from hf_mot.hub.errors import private_parts
from hf_mot.hub.metadata import EVAL_PREFIX, EVAL_RESULTS

CARD, FIT_REPORT, TWIN = "README.md", "fit_report.json", "no_source"

_WEIGHTS = ("config.json", FIT_REPORT, "*.safetensors", "*.safetensors.index.json")
# Folder → the files in it that a push writes, and removes when an earlier push has left them behind.
_FILES = {
    "": (*_WEIGHTS, "*_mot.py"),
    TWIN: _WEIGHTS,
    "custom_generate": ("*.py",),
    EVAL_RESULTS: (f"{EVAL_PREFIX}*.yaml",),
}


def is_part(path: str) -> bool:
    """Whether a file of a repository is part of a translator, by its path; the card is not counted."""
    folder, name = posixpath.split(path)
    return any(fnmatch(name, pattern) for pattern in _FILES.get(folder, ()))


def find_parts(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The translator's files, and what is left out: file or folder → why."""
    files, left_out = [], {}
    for path in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()):
        # The card and the figures in hidden .eval_results are rendered anew.
        if path == CARD or path.startswith(".") or "__pycache__/" in path:
            continue
        if is_part(path):
            files.append(path)
        elif fnmatch(path, f"{TWIN}/*.py"):
            left_out[f"{TWIN}/*.py"] = "loaded as a subfolder, the twin takes the code above it"
        else:
            name = path if posixpath.dirname(path) in _FILES else f"{path.split('/')[0]}/"
            left_out[name] = "no part of a translator"
    return files, left_out


def check_parts(folder: Path, files: list[str], token: str | None) -> None:
    """Refuses what nobody could load, and what nobody else should read."""
    if not any(fnmatch(path, "*.safetensors") for path in files if "/" not in path):
        raise ValueError(f"{folder} holds no weights (model.safetensors). Save the translator again.")
    if "modeling_mot.py" not in files:
        raise ValueError(
            f"{folder} holds no code (modeling_mot.py), which loading without the package needs. Save the translator "
            "again, with `import hf_mot` done."
        )
    for path in files:
        if not path.endswith(".safetensors"):
            check_private(path, read_text(folder / path), token)
            continue
        try:
            with safe_open(folder / path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} in {folder} is truncated or damaged ({error}). Save it again.") from error


def check_private(path: str, text: str, token: str | None) -> None:
    if found := private_parts(text, token):
        raise ValueError(f"{path} holds {' and '.join(found)}. Take that out; nothing was published.")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_report(folder: Path) -> tuple[dict[str, Any], str | None]:
    """The fit report, and what is wrong with its file: a damaged one makes a translator unloadable."""
    if not (folder / FIT_REPORT).is_file():
        return {}, None
    try:
        return json.loads(read_text(folder / FIT_REPORT)), None
    except ValueError as error:
        return {}, f"damaged: {error}"


@contextmanager
def as_folder(translator: str | os.PathLike | PreTrainedModel) -> Iterator[Path]:
    """The translator's folder; of a loaded one, a temporary one."""
    if isinstance(translator, str | os.PathLike):
        yield Path(translator).expanduser().absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        translator.save_pretrained(folder)
        yield Path(folder)
