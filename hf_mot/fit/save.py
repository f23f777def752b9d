"""Saves a fit in one step: a fit that is killed leaves no translator."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from .closed_form import FitResult

NO_SOURCE = "no_source"


def save_fit(result: FitResult, out_dir: str | Path, card: str | None = None, overwrite: bool = False) -> Path:
    """
    Writes the translator to `out_dir` and its control to `out_dir/no_source`, through a temporary folder beside it.

    Args:
        result ([`FitResult`]): The fit.
        out_dir (`str` or `Path`): Where to; must not exist, or be empty, unless `overwrite`.
        card (`str`, *optional*): Text of the model card, `README.md`.
        overwrite (`bool`, *optional*, defaults to `False`): Replaces what is there.

    Raises:
        `FileExistsError`: `out_dir` is there and not empty; with `overwrite`, it holds no translator.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and not overwrite and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise FileExistsError(f"`out_dir` {out_dir} exists and is not empty. Choose another, or pass overwrite.")
    if out_dir.is_dir() and any(out_dir.iterdir()) and not _holds_translator(out_dir):
        raise FileExistsError(f"`out_dir` {out_dir} holds something else than a translator, and is not replaced.")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        temporary.chmod(0o755)
        result.translator.save_pretrained(temporary)
        if result.no_source is not None:
            result.no_source.save_pretrained(temporary / NO_SOURCE)
        if card is not None:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        if out_dir.exists():
            shutil.rmtree(out_dir)
        os.replace(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out_dir


def _holds_translator(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("model_type") == "mot"
