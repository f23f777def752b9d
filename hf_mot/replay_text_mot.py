"""Replay plans as text, `"bottom:6+tokens:32"`: read and written."""

import re
from collections.abc import Mapping
from typing import Any

_FORMS = {
    "none": "none",
    "full": r"full(:\d+-\d+)?",
    "sparse": r"sparse:[1-9]\d*(/\d+)?",
    "bottom": r"bottom:[1-9]\d*",
    "tokens": r"tokens:[1-9]\d*",
    "uncertain": r"uncertain:[1-9]\d*",
    "resume": r"resume:\d+",
}
COUNTS = ("bottom", "tokens", "uncertain")
FULL_LAYERS = 2  # by default, of a sparse plan


def read_plan(plan: Any) -> dict[str, Any]:
    """The fields of the plan of that name, as [`ReplayPlan.parse`] says. Raises `ValueError` for an unknown one."""
    given: dict[str, list[int]] = {}
    for part in str(plan).split("+"):
        name = part.partition(":")[0]
        if name in given or name not in _FORMS or re.fullmatch(_FORMS[name], part) is None:
            raise ValueError(
                "`replay` must be one of none, full, full:6-11 (the layers to inject), sparse:128 (so many "
                "positions per token, from 1) or sparse:128/2 (but in so many first layers), bottom:6 (so many "
                "first layers are native), tokens:32 (so many last tokens are; both from 1), uncertain:32 (so "
                "many are that are likeliest translated wrong, from 1), resume:5 (the layers above it run from a "
                f"translated state) or several, like bottom:6+tokens:32, got {plan!r}."
            )
        given[name] = [int(number) for number in re.findall(r"\d+", part)]
    if "none" in given and len(given) > 1:
        raise ValueError(f"`replay` none runs nothing natively, so no part goes with it, got {plan!r}. Drop none.")
    window = tuple(given.get("full", ())) or None
    counts = {name: given[name][0] for name in (*COUNTS, "resume") if name in given}
    if "sparse" in given:
        counts |= dict(zip(("sparse", "full_layers"), given["sparse"], strict=False))
    return {"kind": "full" if {"full", "sparse"} & given.keys() else "none", "window": window, **counts}


def write_plan(fields: Mapping[str, Any]) -> str:
    """The name of the plan with these fields, all of them."""
    sparse, full_layers, window = fields["sparse"], fields["full_layers"], fields["window"]
    parts = [f"{name}:{fields[name]}" for name in COUNTS if fields[name]]
    if fields["resume"] is not None:
        parts.insert(0, f"resume:{fields['resume']}")
    if sparse:
        parts.insert(0, f"sparse:{sparse}" + f"/{full_layers}" * (full_layers != FULL_LAYERS))
    if fields["kind"] == "full" and not (sparse and window is None):
        parts.insert(0, "full" if window is None else f"full:{window[0]}-{window[1]}")
    return "+".join(parts) or "none"
