"""Text that a translator was fitted on must not judge it: runs of 13 words that a test document shares with it."""

import re
from collections.abc import Iterable, Mapping

RUN_WORDS = 13
_WORD = re.compile(r"\w+")


def _runs(text: str) -> set[int]:
    """Hashes of all runs of 13 words, whatever their case and punctuation."""
    words = _WORD.findall(text.lower())
    return {hash(tuple(words[start : start + RUN_WORDS])) for start in range(len(words) - RUN_WORDS + 1)}


def shared_runs(tested: Mapping[str, str], corpus: Iterable[str]) -> list[str]:
    """
    The names of tested texts that share a run of 13 words with the corpus.

    Args:
        tested (`Mapping[str, str]`): Texts by name; held in memory.
        corpus (`Iterable[str]`): The fit's documents, read once.

    Returns:
        `list[str]`: In the order of `tested`.
    """
    holders: dict[int, list[str]] = {}
    for name, text in tested.items():
        for run in _runs(text):
            holders.setdefault(run, []).append(name)
    found: set[str] = set()
    for document in corpus:
        for run in _runs(document) & holders.keys():
            found.update(holders[run])
    return [name for name in tested if name in found]
