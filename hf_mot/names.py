"""Names that are none: what was probably meant."""

import difflib
from collections.abc import Iterable


def closest(name: object, choices: Iterable[str]) -> str | None:
    """The choice that a name is most like; `None` where it is like none."""
    return next(iter(difflib.get_close_matches(str(name), list(choices), n=1)), None)


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """The same as a sentence to stand before all choices; empty where the name is like none."""
    close = closest(name, choices)
    return f"Did you mean {close}? " if close else ""
