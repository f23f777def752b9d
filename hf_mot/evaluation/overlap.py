"""Text that a translator was fitted on must not judge it: runs of 13 words that a test document shares with it."""

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

RUN_WORDS = 13
_WORD = re.compile(r"\w+")
_Name = TypeVar("_Name", bound=Hashable)


def _runs(text: str) -> set[int]:
    """Hashes of all runs of 13 words, whatever their case and punctuation."""
    words = _WORD.findall(text.lower())
    return {hash(tuple(words[start : start + RUN_WORDS])) for start in range(len(words) - RUN_WORDS + 1)}


def shared_runs(tested: Mapping[_Name, str], corpus: Iterable[str]) -> list[_Name]:
    """
    The names of tested texts that share a run of 13 words with the corpus.

    Args:
        tested (`Mapping`): Texts by name; held in memory.
        corpus (`Iterable[str]`): The fit's documents, read once.

    Returns:
        `list`: In the order of `tested`.
    """
    holders: dict[int, list[_Name]] = {}
    for name, text in tested.items():
        for run in _runs(text):
            holders.setdefault(run, []).append(name)
    found: set[_Name] = set()
    for document in corpus:
        for run in _runs(document) & holders.keys():
            found.update(holders[run])
    return [name for name in tested if name in found]


def count_overlap(tested: Mapping[str, Mapping[str, str]], corpus: Iterable[str]) -> dict[str, Any]:
    """
    Test documents that share runs of words with the fit's corpus.

    Args:
        tested (`Mapping[str, Mapping[str, str]]`): By part of the report, then by name, the texts.
        corpus (`Iterable[str]`): As in [`shared_runs`].

    Returns:
        `dict`: The report's `overlap`: `run_words`, how many were `tested`, how many are `shared`, and `documents`,
        their names by part.
    """
    texts = {(part, name): text for part, own in tested.items() for name, text in own.items()}
    named: dict[str, list[str]] = {}
    for part, name in shared_runs(texts, corpus):
        named.setdefault(part, []).append(name)
    return {
        "run_words": RUN_WORDS,
        "tested": len(texts),
        "shared": sum(map(len, named.values())),
        "documents": named,
    }
