"""Results per example, kept in a file as they come: a run that was killed goes on where it stopped."""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_mot.evaluation.arms import find_arm

OF_TRANSLATOR = ("translator", "replay")  # the settings that make no difference to shared arms


class ResultStore:
    """
    Results by part (`"context_nll"` or a task), arm and example. With a path, each batch is written at once as lines
    of JSON, and what is there already is not computed again. A run that gives no results leaves the file as it was.

    Args:
        path (`str` or `os.PathLike`, *optional*): The file; its folder is made. By default results are in memory.
        overwrite (`bool`, *optional*, defaults to `False`): Starts anew, whatever is in the file.
        reuse (`str` or `os.PathLike`, *optional*): Such a file of another evaluation of the same pair, which is only
            read: what no translator plays a part in (arms that are `shared`) is taken from it.

    Raises:
        ValueError: If a file holds something else, or the one to reuse does not exist.
    """

    def __init__(
        self,
        path: str | os.PathLike | None = None,
        overwrite: bool = False,
        reuse: str | os.PathLike | None = None,
    ):
        self.path = None if path is None else Path(path)
        self._settings: dict[str, dict[str, Any]] = {}
        self._results: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
        self._unwritten: list[dict[str, Any]] = []  # settings of parts that have no results yet
        self._reused, self._starts_anew = None, overwrite
        if reuse is not None:
            if not os.path.isfile(reuse):
                raise ValueError(f"`reuse` must name a file of results, examples.jsonl of a report, got {reuse}.")
            self._reused = ResultStore()
            self._reused.path = Path(reuse)
            self._reused._read(self._reused.path)
        if self.path is not None and self.path.exists() and not overwrite:
            whole, half = self._read(self.path)
            if half:  # else nothing is cut, in case that another process has added something by now
                os.truncate(self.path, whole)

    def open(
        self, part: str, settings: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """
        Starts a part, or goes on with it. Of `arms` it takes what can be reused; each may have settings that no other
        arm depends on.

        Raises:
            ValueError: If the file's results, or those to reuse, were made with other settings, e.g. another version
                of the task.
        """
        arms = arms or {}
        for name, own in {part: settings, **{f"{part}/{arm}": own for arm, own in arms.items() if own}}.items():
            if name not in self._settings:
                self._settings[name] = dict(own)
                self._unwritten.append({"part": name, "settings": dict(own)})
            self._check(name, own, ())
        if self._reused is None or part not in self._reused._settings:
            return
        self._reused._check(part, settings, OF_TRANSLATOR)
        for arm, own in arms.items():
            if find_arm(arm).shared:
                if f"{part}/{arm}" in self._reused._settings:
                    self._reused._check(f"{part}/{arm}", own, ())
                known = self.results(part, arm)
                rows = self._reused.results(part, arm).items()
                self.add(part, arm, [(name, result) for name, result in rows if name not in known])

    def _check(self, part: str, settings: Mapping[str, Any], but: Collection[str]) -> None:
        known = self._settings[part]
        for key in dict.fromkeys([*settings, *known]):
            if key not in but and known.get(key) != settings.get(key):
                raise ValueError(
                    f"{self.path} holds results of {part} with {key} {known.get(key)!r}, but this run has "
                    f"{settings.get(key)!r}, and the two cannot be mixed. Choose another file, or overwrite this one."
                )

    def results(self, part: str, arm: str) -> dict[str, dict[str, Any]]:
        """What there is of an arm, by the example's id."""
        return self._results.get(part, {}).get(arm, {})

    def add(self, part: str, arm: str, rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Keeps the results of some examples."""
        rows = list(rows)
        self._results.setdefault(part, {}).setdefault(arm, {}).update(rows)
        self._write([{"part": part, "arm": arm, "id": name, **result} for name, result in rows])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self.path is None or not lines:
            return
        lines = [json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in (*self._unwritten, *lines)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "w" if self._starts_anew else "a", encoding="utf-8") as file:
            file.writelines(lines)
        self._unwritten, self._starts_anew = [], False

    def _read(self, path: Path) -> tuple[int, bool]:
        """Bytes up to the end of the last whole line, and whether a killed run has left half of one after it."""
        whole = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return whole, True
                try:
                    row = json.loads(line)
                    part = row.pop("part")
                    if "settings" in row:
                        self._settings[part] = row["settings"]
                    else:
                        self._results.setdefault(part, {}).setdefault(row.pop("arm"), {})[row.pop("id")] = row
                except (ValueError, KeyError, AttributeError, TypeError) as error:
                    raise ValueError(
                        f"{path}, line {number}, is no result of an evaluation. Choose another file, or overwrite it."
                    ) from error
                whole += len(line)
        return whole, False
