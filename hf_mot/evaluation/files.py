"""Files that are written whole or not at all."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def save_report(report: dict[str, Any], path: str | os.PathLike) -> None:
    """
    Writes a report as JSON, whole or not at all.

    Args:
        report (`dict`): What `evaluate` returned.
        path (`str` or `os.PathLike`): The file to write; its folder must exist.
    """
    write_whole(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n", Path(path))


def write_whole(text: str, path: Path) -> None:
    """Writes a file whole or not at all."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
