"""The plot of a report: what each arm keeps against what it costs."""

import importlib.util
from pathlib import Path
from typing import Any

from hf_mot.evaluation.tasks import title_of

PLOT = "recovery_against_cost.png"
LOWEST = -0.5  # of the plot: what is far below no context need not be told apart


def require_matplotlib() -> None:
    """Raises `ImportError` where the plot could not be drawn, before any work is done for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("A report has a plot, which matplotlib draws: pip install hf-mot[report].")


def plot_recovery(report: dict[str, Any], path: Path) -> bool:
    """Draws recovery against FLOPs, each arm that has both; `False` if there is none to draw."""
    recoveries = {arm: own.get("recovery") for arm, own in report.get("arms", {}).items()}
    label = "recovery (context-NLL)"
    if not any(recoveries.values()):
        counting = [name for name, task in report.get("tasks", {}).items() if "recoveries" in task["answer_nll"]]
        if not counting:
            return False
        recoveries = report["tasks"][counting[0]]["answer_nll"]["recoveries"]
        label = f"recovery of the answer's NLL ({title_of(counting[0])})"
    ratios = report.get("flops_ratios", {})
    points = {arm: own for arm, own in recoveries.items() if own and arm in ratios}
    if not points:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for height, name in ((1, "native"), (0, "no context")):
        axes.axhline(height, color="#9aa5b1", linewidth=1, linestyle="--")
        axes.annotate(
            name,
            (1, height),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color="#66788a",
        )
    for arm, own in points.items():
        color = "#c2410c" if arm == "translated" else "#1f5f8b"
        name = arm.replace("_", " ")
        if own["value"] < LOWEST:  # far below: at the edge, with its figure
            height, name = LOWEST, f"{name} ({own['value']:.1f})"
            axes.plot(ratios[arm], height, marker="v", color=color)
        else:
            height = own["value"]
            spread = [[max(0, height - own["low"])], [max(0, own["high"] - height)]]
            axes.errorbar(ratios[arm], height, yerr=spread, fmt="o", color=color, capsize=3)
        axes.annotate(
            name,
            (ratios[arm], height),
            xytext=(8, -4) if arm == "translated" else (8, -14),
            textcoords="offset points",
            color=color,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
        )
    axes.set(xlabel="FLOPs as a share of the target's own prefill", ylabel=label)
    axes.margins(x=0.18, y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    figure.savefig(path)
    return True
