"""Plots of analyses. matplotlib is an extra, and imported where it draws."""

import os
from typing import Any

from hf_mot.evaluation.report_plot import require_matplotlib
from hf_mot.fit.weights import STATES

_COLORS = {"keys": "#c2410c", "values": "#1f5f8b"}


def plot_sensitivity(report: dict[str, Any], path: str | os.PathLike) -> None:
    """
    Bars per layer for keys and values, one panel a measure.

    Args:
        report (`dict`): What `measure_sensitivity` returned.
        path (`str` or `os.PathLike`): The picture, by its ending a PNG, SVG or PDF.

    Raises:
        ImportError: Without matplotlib, an extra.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    measures = report["measures"]
    figure = Figure(figsize=(7, 0.6 + 2.6 * len(measures)), dpi=160, layout="constrained")
    panels = figure.subplots(len(measures), squeeze=False)[:, 0]
    for axes, (name, figures) in zip(panels, measures.items(), strict=True):
        key = "lost" if "lost" in figures else "cost"
        for shift, states in zip((-0.2, 0.2), STATES, strict=True):
            pieces = [piece for piece in figures["pieces"] if piece["states"] == states]
            heights = [piece[key]["value"] for piece in pieces]
            spread = [
                [max(0, piece[key]["value"] - piece[key]["low"]) for piece in pieces],
                [max(0, piece[key]["high"] - piece[key]["value"]) for piece in pieces],
            ]
            places = [piece["layer"] + shift for piece in pieces]
            axes.bar(places, heights, 0.38, yerr=spread, color=_COLORS[states], ecolor="#66788a", label=states)
        layers = sorted({piece["layer"] for piece in figures["pieces"]})
        axes.set_xticks(layers, [str(layer_idx) for layer_idx in layers])
        unit = "share of the context's worth" if key == "lost" else "nats"
        axes.set_title(f"{name.replace('_', ' ')}, n = {figures['n']}", loc="left", fontsize=10)
        axes.set_ylabel(f"lost ({unit})", fontsize=8)
        axes.axhline(0, color="#9aa5b1", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
    panels[0].legend(frameon=False, fontsize=8)
    panels[-1].set_xlabel("layer of the target that alone is translated")
    figure.savefig(path)


def plot_windows(report: dict[str, Any], path: str | os.PathLike) -> None:
    """
    Validation loss of the proxy in each channel window, by its lowest layer: the paper's U-shape, where there is one.

    Args:
        report (`dict`): What `search_channels` returned.
        path (`str` or `os.PathLike`): The picture, by its ending a PNG, SVG or PDF.

    Raises:
        ImportError: Without matplotlib, an extra.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    windows = sorted(report["windows"], key=lambda window: window["start"])
    figure = Figure(figsize=(7, 4), dpi=160, layout="constrained")
    axes = figure.subplots()
    starts = [window["start"] for window in windows]
    axes.plot(starts, [window["eval_loss"] for window in windows], marker="o", color=_COLORS["keys"])
    best = report["best"]
    axes.annotate(
        f"layers {best['target_layers'][0]}-{best['target_layers'][-1]}",
        (best["start"], best["eval_loss"]),
        xytext=(0, -16),
        textcoords="offset points",
        ha="center",
        color=_COLORS["keys"],
    )
    size = len(best["target_layers"])
    axes.set(xlabel=f"lowest target layer of a window of {size}", ylabel="validation loss")
    axes.set_xticks(starts)
    axes.margins(y=0.2)
    if all("eval_recovery" in window for window in windows):
        other = axes.twinx()
        other.plot(starts, [window["eval_recovery"] for window in windows], marker="s", color=_COLORS["values"])
        other.set_ylabel("recovery", color=_COLORS["values"])
        other.spines["top"].set_visible(False)
    axes.spines["top"].set_visible(False)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    figure.savefig(path)
