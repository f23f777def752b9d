"""
Gathers the results of paper_figures.sh into one file, and makes a page with tables and plots of that file.

    python examples/paper_figures_report.py [OUT] --json FILE --markdown FILE

Without OUT the page is made of the file that is there. A part of which nothing was measured is left out.
"""

import argparse
import itertools
import json
import re
from pathlib import Path
from typing import Any

from hf_mot.evaluation.describe import format_interval, format_number
from hf_mot.evaluation.report import render_table
from hf_mot.evaluation.report_plot import require_matplotlib

COLORS = ("#c2410c", "#1f5f8b", "#4d7c0f")
FULL = float("inf")  # layers or positions of plan full
HEAD = """# The paper's choices

Short trainings of the paper's literal form by plan `full`, in kind as its figures 22, 23, 24 and 30 and its Table 7:
not its models, data, length of training or measure (it reports F1). Recovery with its 95 % interval over documents.
*Wrong source* is the recovery with the source's states of another document in the window: what is above it came from
the source. A handoff by plan `full` runs the whole target, so its time is beside that of the target's own prefill, and
above 1. Memory is what a handoff adds at its peak, above the models and the source's cache. Made by
[examples/paper_figures.sh](../examples/paper_figures.sh).
"""
LEFT_OUT = ("documents", "overlap")


def gather(folder: Path) -> dict[str, dict[str, Any]]:
    """The results by name, without the figures of each document."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-*.json"))}
    return {name: {key: own[key] for key in own if key not in LEFT_OUT} for name, own in found.items()}


def trained(result: dict[str, Any]) -> dict[str, Any]:
    """A point that was trained for itself."""
    wrong = result["arms"].get("wrong_source", {}).get("recovery")
    return {"recovery": result.get("recovery"), "wrong": wrong, "cost": result.get("cost", {})}


def planned(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of a curve, with their positions (Top-S) and full layers; plan full has all of both."""
    points = []
    for point in result["curve"]:
        sparse = re.search(r"sparse:(\d+)(?:/(\d+))?", point["replay"])
        top, layers = (int(sparse[1]), int(sparse[2] or 2)) if sparse else (FULL, FULL)
        cost = point.get("cost", {})
        points.append({"top": top, "layers": layers, "recovery": point.get("recovery"), "wrong": None, "cost": cost})
    return points


def cells(point: dict[str, Any]) -> list[str]:
    cost = point["cost"]
    peak = cost.get("peak_bytes")
    return [
        format_interval(point["recovery"]),
        format_interval(point["wrong"]),
        format_number(cost.get("handoff_s"), 2),
        format_number(cost.get("time_ratio"), 2),
        "" if peak is None else f"{peak / 1e6:.0f}",
    ]


CELLS = ["recovery", "wrong source", "handoff (s)", "handoff / prefill", "peak memory (MB)"]


def section(title: str, label: str, lines: dict[str, list[tuple[Any, dict[str, Any]]]], picture: Path) -> list[str]:
    """A table with a row a point, and the picture, which is drawn; nothing without any point."""
    rows = [[name, named(place), *cells(point)] for name, points in lines.items() for place, point in points]
    if not rows:
        return []
    plot(picture, label, lines)
    titles = ["", label, *CELLS]
    kept = [n for n in range(len(titles)) if any(row[n] for row in rows)]
    table = render_table([titles[n] for n in kept], [[row[n] for n in kept] for row in rows])
    return [f"## {title}", "", *table, "", f"![{title}]({picture.parent.name}/{picture.name})", ""]


def named(place: Any) -> str:
    return "full" if place == FULL else str(place)


def plot(path: Path, label: str, lines: dict[str, list[tuple[Any, dict[str, Any]]]]) -> None:
    """Recovery with its interval of each line's points, at equal distances; beside it the handoff's time."""
    from matplotlib.figure import Figure

    places = sorted({place for points in lines.values() for place, _ in points})
    figure = Figure(figsize=(8, 3.6), dpi=160, layout="constrained")
    panels = figure.subplots(1, 2)
    for color, (name, points) in zip(itertools.cycle(COLORS), lines.items(), strict=False):
        points = [(places.index(place), point) for place, point in points if point["recovery"]]
        values = [point["recovery"] for _, point in points]
        spread = [
            [max(0, own["value"] - own["low"]) for own in values],
            [max(0, own["high"] - own["value"]) for own in values],
        ]
        x = [place for place, _ in points]
        panels[0].errorbar(
            x, [own["value"] for own in values], yerr=spread, marker="o", color=color, capsize=3, label=name
        )
        panels[1].plot(x, [p["cost"].get("time_ratio", float("nan")) for _, p in points], marker="o", color=color)
    panels[0].set_ylabel("recovery")
    panels[1].set_ylabel("handoff / prefill")
    for axes in panels:
        axes.set_xlabel(label)
        axes.set_xticks(range(len(places)), [named(place) for place in places])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    if len(lines) > 1:
        panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def page(results: dict[str, dict[str, Any]], folder: Path) -> str:
    """The page; its plots are written to the folder."""
    parts = {name: name.rpartition("-") for name in results}
    channels = {
        mapping: [(size, trained(results[name])) for name, (own, _, size) in parts.items() if own == mapping]
        for mapping in ("depth_ratio", "terminal")
    }
    channels = {mapping: points for mapping, points in channels.items() if points}
    grid = [(name.split("-")[1:], trained(own)) for name, own in results.items() if name.startswith("grid-")]
    grid = {"": [(f"{top_k} of {translators}", point) for (translators, top_k), point in grid]} if grid else {}
    curves: dict[str, dict[str, list]] = {"layers": {}, "sparse": {}}
    for name, (part, _, size) in sorted(parts.items(), key=lambda own: float(own[1][2])):
        if part in curves:
            key, label = ("layers", f"Top-{size}") if part == "layers" else ("top", f"{size} tokens")
            curves[part][label] = sorted(
                ((point[key], point) for point in planned(results[name])), key=lambda own: own[0]
            )
    lines = [HEAD]
    lines += section(
        "Figures 22 and 23: mapping and ratio of channels", "channel ratio", channels, folder / "mapping.png"
    )
    lines += section("Table 7: translators, and how many a token", "translators", grid, folder / "grid.png")
    lines += section(
        "Figure 24: lower layers with full attention", "full layers", curves["layers"], folder / "layers.png"
    )
    lines += section("Figure 30: Top-S by length of the context", "Top-S", curves["sparse"], folder / "sparse.png")
    for name, own in results.items():
        lines.append(
            f"- {name}: n = {own['n']}, {own['context_length']} tokens of context, `{own.get('command', '')}`"
        )
    versions = next(iter(results.values()))["versions"]
    return "\n".join([*lines, "", ", ".join(f"{name} {version}" for name, version in versions.items()), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Gathers the results of paper_figures.sh, and makes a page of them.")
    parser.add_argument("out", nargs="?", type=Path, help="folder of paper_figures.sh")
    parser.add_argument("--json", required=True, type=Path, help="file that keeps all results")
    parser.add_argument("--markdown", required=True, type=Path, help="the page; its plots go to a folder beside it")
    args = parser.parse_args()
    require_matplotlib()
    if args.out is not None:
        args.json.write_text(json.dumps(gather(args.out), indent=1) + "\n", encoding="utf-8")
    pictures = args.markdown.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    text = page(json.loads(args.json.read_text(encoding="utf-8")), pictures)
    args.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
