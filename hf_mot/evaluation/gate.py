"""The gate: whether a translator may be called one, by its controls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GATE_ARMS = ("native", "no_context", "translated", "wrong_document", "wrong_source", "no_source")
CONTROLS = ("wrong_document", "wrong_source", "no_source")
# Bootstrap intervals over fewer are far too narrow: of two documents, one in four says "clearly" by chance.
MIN_DOCUMENTS = 10


@dataclass(frozen=True)
class Gate:
    """
    What a translator must reach.

    Args:
        recovery (`float`, *optional*, defaults to 0.5): Recovery, at least.
        margin (`float`, *optional*, defaults to 0.0): Nats a token by which the whole paired interval must lie above
            each of the controls `wrong_document`, `wrong_source` and `no_source`.

    Raises:
        ValueError: If a threshold makes no sense.
    """

    recovery: float = 0.5
    margin: float = 0.0

    def __post_init__(self):
        if not 0 <= self.recovery <= 1:
            raise ValueError(f"`recovery` of the gate must lie in 0..1, got {self.recovery}.")
        if not self.margin >= 0:
            raise ValueError(f"`margin` of the gate must be at least 0 nats, got {self.margin}.")


def judge(report: dict[str, Any], gate: Gate) -> dict[str, Any]:
    """
    The verdict on a report: over context-NLL, if it was measured, and over the answer NLL of each task that counts
    (one where the interval of native - no_context excludes 0). Fewer than 10 documents are no ground for one.

    Args:
        report (`dict`): What `evaluate` returned.
        gate (`Gate`): The thresholds.

    Returns:
        `dict`: `passed`, `reasons` for a no (each names measure and control), `judged_on`, and the thresholds.
    """
    measures = {"context_nll": report} if "arms" in report else {}
    measures |= {name: task["answer_nll"] for name, task in report.get("tasks", {}).items() if task.get("counts")}
    reasons = [] if measures else ["nothing was measured on which the context makes a clear difference"]
    for name, measure in measures.items():
        missing = report.get("missing", {}).get(name, {})
        part = report if measure is report else report["tasks"][name]
        documents = documents_of(part)
        if documents < MIN_DOCUMENTS:
            reasons.append(f"{name}: {documents} documents are too few for a verdict, needs {MIN_DOCUMENTS}")
        for control in CONTROLS:
            figure = measure.get("better_by", {}).get(control)
            if figure is None:
                reasons.append(f"{name}: {control} was not measured ({missing.get(control, 'no result')})")
            elif not figure["low"] > gate.margin:
                reasons.append(
                    f"{name}: translated is not clearly better than {control} "
                    f"(by {figure['value']:.4f} nats [{figure['low']:.4f}, {figure['high']:.4f}], "
                    f"needs > {gate.margin:g})"
                )
        recovery = measure.get("recovery")
        if recovery is None:
            reasons.append(f"{name}: the recovery could not be had")
        elif recovery["value"] < gate.recovery:
            reasons.append(f"{name}: the recovery is {recovery['value']:.3f}, needs {gate.recovery:g}")
    return {
        "passed": not reasons,
        "reasons": reasons,
        "judged_on": list(measures),
        "recovery": gate.recovery,
        "margin": gate.margin,
    }


def documents_of(part: Mapping[str, Any]) -> int:
    """How many documents a report's figures, or those of one of its tasks, are of; 0 where nothing was measured."""
    return part.get("n_documents", part.get("n", 0))
