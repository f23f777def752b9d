"""The curve as a table, in words and as a plot: what is kept by each replay plan, and what that costs."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_mot.evaluation.describe import format_interval, format_number

CURVE_PLOT = "recovery_by_plan.png"
# Arm → its colour; the translation is drawn last, and named.
_COLORS = {"no_source": "#1f5f8b", "target_layers_only": "#4d7c0f", "translated": "#c2410c"}
LOWEST = -0.5  # of the plot
_OFFSET = {"textcoords": "offset points"}


def curve_table(curve: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """
    One row a plan, by cost.

    Args:
        curve (`list[dict]`): The report's `curve`.

    Returns:
        `tuple`: The head, and the rows; what was measured by no plan has no column, a cell is empty where it was not.
    """
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("plan", lambda point: point["replay"]),
        ("FLOPs / native", lambda point: format_number(point["flops_share"], 3)),
        ("NLL", lambda point: format_number(point.get("nll"), 3)),
    ]
    for metric in ("recovery", "content_recovery", "source_value"):
        columns.append((_plain(metric), lambda point, own=metric: format_interval(point.get(own))))
    for arm in _COLORS:
        if arm != "translated":
            columns.append(
                (f"{_plain(arm)}, recovery", lambda point, own=arm: format_interval(_arm(point, own).get("recovery")))
            )
    for task in dict.fromkeys(name for point in curve for name in point.get("tasks", {})):
        columns += _task_columns(task, curve)
    columns += [
        ("time / native", lambda point: _time(point.get("cost"))),
        ("peak, MB", lambda point: _megabytes(point.get("cost", {}).get("peak_bytes"))),
    ]
    rows = [[cell(point) for _, cell in columns] for point in curve]
    kept = [n for n in range(len(columns)) if any(row[n] for row in rows)]
    return [columns[n][0] for n in kept], [[row[n] for n in kept] for row in rows]


def _task_columns(task: str, curve: Sequence[dict[str, Any]]) -> list[tuple[str, Callable[[dict[str, Any]], str]]]:
    measured = next(point["tasks"][task] for point in curve if task in point.get("tasks", {}))
    native = f", native {measured['native']:.3f}" if "native" in measured else ""

    def of(point: dict[str, Any]) -> dict[str, Any]:
        return point.get("tasks", {}).get(task, {})

    return [
        (f"{task} {measured['metric']}{native}", lambda point: format_number(of(point).get("translated"), 3)),
        (
            f"{task} / native",
            lambda point: format_number(of(point).get("share_of_native", {}).get("translated"), 2),
        ),
        (
            f"{task}, NLL recovery",
            lambda point: format_interval(of(point).get("answer_nll", {}).get("recovery")),
        ),
    ]


def curve_words(report: dict[str, Any]) -> list[str]:
    """What the curve says, in a sentence."""
    points = [point for point in report.get("curve", []) if "recovery" in point and point["flops_share"] < 1]
    if not points:
        return []
    best = max(points, key=lambda point: point["recovery"]["value"])
    return [
        f"Of {len(points)} plans below the cost of a native prefill, {best['replay']} keeps most: "
        f"{format_interval(best['recovery'])}, at {best['flops_share']:.2f} of its FLOPs."
    ]


def plot_curve(report: dict[str, Any], path: Path) -> bool:
    """Draws recovery against the share of native FLOPs, a point a plan with its interval, and the best that each
    budget buys; `False` if there is nothing to draw."""
    curve = report.get("curve", [])
    drawn = {arm: [point for point in curve if "recovery" in _arm(point, arm)] for arm in _COLORS}
    if not drawn["translated"]:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(1, color="#9aa5b1", linewidth=1, linestyle="--")
    axes.annotate("native", (0, 1), xycoords=("axes fraction", "data"), xytext=(4, 4), **_OFFSET, color="#66788a")
    for arm, points in drawn.items():
        if not points:
            continue
        shares = [point["flops_share"] for point in points]
        recoveries = [_arm(point, arm)["recovery"] for point in points]
        heights = [max(own["value"], LOWEST) for own in recoveries]
        spread = [
            [max(0, height - max(own["low"], LOWEST)) for height, own in zip(heights, recoveries, strict=True)],
            [max(0, own["high"] - height) for height, own in zip(heights, recoveries, strict=True)],
        ]
        axes.errorbar(shares, heights, yerr=spread, fmt="o", color=_COLORS[arm], capsize=3, label=_plain(arm))
        best = [max(heights[: number + 1]) for number in range(len(heights))]
        axes.step(shares, best, where="post", color=_COLORS[arm], linewidth=1, alpha=0.45)
    best = -math.inf
    for point in drawn["translated"]:
        own = _arm(point, "translated")["recovery"]
        # Slanting, to tell plans of almost one cost apart; above the best that a budget buys, below the others.
        above = own["value"] > best
        best = max(best, own["value"])
        axes.annotate(
            point["replay"],
            (point["flops_share"], max(own["high" if above else "low"], LOWEST)),
            xytext=(-3, 3 if above else -3),
            **_OFFSET,
            rotation=40 if above else -40,
            rotation_mode="anchor",
            va="bottom" if above else "top",
            fontsize=8,
            color=_COLORS["translated"],
        )
    axes.set(xlabel="FLOPs of translator and replay as a share of the target's own prefill")
    axes.set_ylabel(f"recovery (context-NLL, {report['context_length']} tokens, n = {report['n']})")
    axes.legend(frameon=False, loc="lower right")
    axes.margins(x=0.12, y=0.16)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.savefig(path)
    return True


def _arm(point: dict[str, Any], arm: str) -> dict[str, Any]:
    return point.get("arms", {}).get(arm, {})


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _time(cost: dict[str, float] | None) -> str:
    if cost is None:
        return ""
    return f"{cost['time_ratio']:.2f} [{cost['time_ratio_low']:.2f}, {cost['time_ratio_high']:.2f}]"


def _megabytes(count: float | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f}"
