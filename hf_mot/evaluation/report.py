"""Reports of an evaluation: a table in markdown, a plot, and one page that holds all of it."""

import base64
import html
import importlib.util
import os
from pathlib import Path
from string import Template
from typing import Any

from hf_mot.evaluation.arms import ARMS
from hf_mot.evaluation.curve_report import CURVE_PLOT, curve_table, curve_words, plot_curve
from hf_mot.evaluation.describe import format_form, format_interval, format_number
from hf_mot.evaluation.files import save_report, write_whole
from hf_mot.evaluation.gate import MIN_DOCUMENTS

PLOT = "recovery_against_cost.png"
LOWEST = -0.5  # of the plot: what is far below no context need not be told apart
_TITLES = {
    "squad": "SQuAD",
    "boolq": "BoolQ",
    "pubmedqa": "PubMedQA",
    "mmlu_redux": "MMLU-Redux",
    "hotpotqa": "HotpotQA",
    "hotpotqa_long": "HotpotQA, long",
    "newsqa": "NewsQA",
    "doc2dial": "Doc2Dial",
}


def require_matplotlib() -> None:
    """Raises `ImportError` where the plot could not be drawn, before any work is done for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("A report has a plot, which matplotlib draws: pip install hf-mot[report].")


def write_report(report: dict[str, Any], folder: str | os.PathLike) -> Path:
    """
    Writes `report.json`, `report.md`, the plots (of the curve too, where there is one) and `report.html`, which holds
    the others' content in itself.

    Args:
        report (`dict`): What `evaluate` returned.
        folder (`str` or `os.PathLike`): Where to; it is made.

    Returns:
        `Path`: The page.

    Raises:
        ImportError: Without matplotlib, an extra.
    """
    require_matplotlib()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_report(report, folder / "report.json")
    plots = (
        PLOT if plot_recovery(report, folder / PLOT) else None,
        CURVE_PLOT if plot_curve(report, folder / CURVE_PLOT) else None,
    )
    write_whole(render_markdown(report, *plots), folder / "report.md")
    page = folder / "report.html"
    write_whole(render_page(report, *(folder / plot if plot else None for plot in plots)), page)
    return page


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """
    One row an arm: cosines, recovery, tasks with their averages, FLOPs.

    Args:
        report (`dict`): What `evaluate` returned.

    Returns:
        `tuple`: The head, and the rows; a cell is empty where nothing was measured.
    """
    tasks = report.get("tasks", {})
    closed = [name for name, task in tasks.items() if task["metric"] == "accuracy"]
    extractive = [name for name, task in tasks.items() if task["metric"] == "f1"]
    measured = [arm for arm in ARMS if arm in report.get("arms", {}) or any(arm in task for task in tasks.values())]
    columns: list[tuple[str, Any]] = []
    if "similarity" in report:
        columns += [
            ("cos K", lambda arm: format_number(report["similarity"].get(arm, {}).get("keys"), 2)),
            ("cos V", lambda arm: format_number(report["similarity"].get(arm, {}).get("values"), 2)),
            ("cos attention", lambda arm: format_number(report["similarity"].get(arm, {}).get("attention"), 2)),
        ]
    if "arms" in report:
        columns += [
            ("NLL", lambda arm: format_number(report["arms"].get(arm, {}).get("nll"), 3)),
            ("recovery", lambda arm: format_interval(report["arms"].get(arm, {}).get("recovery"))),
        ]
    for names, average in ((closed, "accuracy, mean"), (extractive, "F1, mean")):
        for name in names:
            title = _TITLES.get(name, name)
            columns.append((title, lambda arm, name=name: format_number(tasks[name].get(arm), 3)))
            if name in extractive:
                recoveries = tasks[name]["answer_nll"].get("recoveries", {})
                columns.append(
                    (
                        f"{title}, NLL recovery",
                        lambda arm, own=recoveries: format_number((own.get(arm) or {}).get("value"), 2),
                    )
                )
        if len(names) > 1:
            columns.append((average, lambda arm, names=names: _mean([tasks[name].get(arm) for name in names])))
    ratios = report.get("flops_ratios", {})
    columns.append(("FLOPs / native", lambda arm: format_number(ratios.get(arm), 3)))
    rows = [[arm, *(cell(arm) for _, cell in columns)] for arm in measured]
    kept = [0, *(n for n in range(1, len(columns) + 1) if any(row[n] for row in rows))]
    head = ["arm", *(title for title, _ in columns)]
    return [head[n] for n in kept], [[row[n] for n in kept] for row in rows]


def plain_words(report: dict[str, Any]) -> list[str]:
    """What the figures say, good or bad, a sentence each."""
    said = []
    documents = report.get("n_documents", report.get("n", MIN_DOCUMENTS))
    if documents < MIN_DOCUMENTS:
        said.append(f"{documents} documents are too few for anything to be clear.")
    if "recovery" in report:
        said.append(
            "Of what the context is worth to the target, the translation keeps "
            f"{format_interval(report['recovery'])} ({report['n']} windows, {report['context_length']} tokens of "
            "context)."
        )
    if "source_value" in report:
        figure = report["source_value"]
        holds = "" if figure["low"] > 0 else " This is not clearly above 0: the source may add nothing."
        said.append(f"Of what a twin without source leaves open, the source closes {format_interval(figure)}.{holds}")
    for control, figure in report.get("better_by", {}).items():
        if control != "no_context":
            sure = figure["low"] > 0 and documents >= MIN_DOCUMENTS
            clear = "clearly better than" if sure else "NOT clearly better than"
            said.append(
                f"On documents, the translation is {clear} {control.replace('_', ' ')}: by {figure['value']:.3f} nats "
                f"a token [{figure['low']:.3f}, {figure['high']:.3f}]."
            )
    for name, task in report.get("tasks", {}).items():
        title, metric = _TITLES.get(name, name), {"f1": "F1"}.get(task["metric"], task["metric"])
        known = [
            f"{arm.replace('_', ' ')} {task[arm]:.3f}" for arm in ("translated", "native", "no_context") if arm in task
        ]
        said.append(f"{title} (n = {task['n']}), {metric}: {', '.join(known)}.")
        if "answers_longer_than_cut" in task:
            said.append(
                f"{title}: {task['answers_longer_than_cut']} of its right answers are longer than what a model may "
                "generate, so that no arm can give them whole."
            )
        if "counts" in task and not task["counts"]:
            said.append(f"{title} counts in no verdict: native and no context are not clearly apart there.")
        said += [f"{title}: {note}" for note in task["answer_nll"].get("notes", [])]
    said += curve_words(report)
    if "cost" in report:
        cost = report["cost"]
        slower = "" if cost["time_ratio"] < 1 else " It is no saving of time."
        said.append(
            f"A handoff takes {cost['time_ratio']:.2f} of the time of the target's own prefill "
            f"[{cost['time_ratio_low']:.2f}, {cost['time_ratio_high']:.2f}], and {cost['flops_ratio']:.2f} of its "
            f"FLOPs; the source's own reading is not counted.{slower}"
        )
    for part, arms in report.get("missing", {}).items():
        said += [f"Missing: {arm} of {part}, which crashed ({reason})." for arm, reason in arms.items()]
    if "overlap" in report:
        own = report["overlap"]
        said.append(
            f"{own['shared']} of {own['tested']} test contexts share a run of {own['run_words']} words with the "
            "fit's corpus."
        )
    if "gate" in report:
        gate = report["gate"]
        said.append(
            "The gate is passed." if gate["passed"] else f"The gate is NOT passed: {'; '.join(gate['reasons'])}."
        )
    return said + report.get("notes", [])


def facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What was measured with what."""
    pair = report["pair"]
    found = [("pair", " → ".join(pair[side] for side in ("source", "target") if side in pair))]
    found.append(("translator", format_form(report["translator"])))
    given = [(key, report.get(key)) for key in ("replay", "dtype", "seed", "n", "skipped")]
    found += [(key, str(value)) for key, value in given if value is not None and value != {}]
    cost = report.get("cost", {})
    for key, what in (("peak_bytes", "of a handoff"), ("prefill_peak_bytes", "of the target's own prefill")):
        if key in cost:
            found.append((f"peak memory {what}", f"{cost[key] / 1e6:.1f} MB at {cost['context_length']} tokens"))
    found.append(("versions", ", ".join(f"{key} {value}" for key, value in report["versions"].items())))
    return found + ([("command", report["command"])] if "command" in report else [])


def render_markdown(report: dict[str, Any], plot: str | None, curve_plot: str | None = None) -> str:
    """The report as markdown; `plot` and `curve_plot` are the pictures' files beside it."""
    lines = [f"# {facts(report)[0][1]}", "", *(f"- {sentence}" for sentence in plain_words(report)), ""]
    lines += render_table(*table(report))
    lines += ["", "In brackets: bootstrap 95 % intervals over documents.", ""]
    lines += [f"![recovery against cost]({plot})", ""] if plot else []
    if "curve" in report:
        lines += ["## Replay plans", "", *render_table(*curve_table(report["curve"])), ""]
    lines += [f"![recovery by plan]({curve_plot})", ""] if curve_plot else []
    return "\n".join([*lines, *(f"- {key}: `{value}`" for key, value in facts(report))]) + "\n"


def render_table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def plot_recovery(report: dict[str, Any], path: Path) -> bool:
    """Draws recovery against FLOPs, each arm that has both; `False` if there is none to draw."""
    recoveries = {arm: own.get("recovery") for arm, own in report.get("arms", {}).items()}
    label = "recovery (context-NLL)"
    if not any(recoveries.values()):
        counting = [name for name, task in report.get("tasks", {}).items() if "recoveries" in task["answer_nll"]]
        if not counting:
            return False
        recoveries = report["tasks"][counting[0]]["answer_nll"]["recoveries"]
        label = f"recovery of the answer's NLL ({_TITLES.get(counting[0], counting[0])})"
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


_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>
body{font:16px/1.55 system-ui,sans-serif;color:#1f2933;background:#f5f7fa;margin:0}
main{max-width:72rem;margin:0 auto;padding:2.5rem 1.25rem}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2.2rem 0 .7rem}
.sub{color:#66788a;margin:0 0 1.6rem}
.verdict{display:inline-block;padding:.25rem .8rem;border-radius:1rem;font-weight:600;margin-bottom:1rem}
.yes{background:#d9f2e3;color:#116149}.no{background:#fde3dd;color:#a12b12}
section{background:#fff;border:1px solid #e4e7eb;border-radius:.6rem;padding:.4rem 1.3rem 1.2rem;margin-bottom:1.2rem}
section h2{margin-top:1rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.88rem}
th,td{padding:.35rem .55rem;text-align:right;border-bottom:1px solid #e4e7eb;white-space:nowrap}
th{color:#52606d;font-weight:600;white-space:normal;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}tr.own td{background:#fff4ec;font-weight:600}
img{max-width:100%;height:auto}dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1.2rem;margin:0}
dt{color:#66788a}dd{margin:0;overflow-wrap:anywhere}.note{color:#66788a;font-size:.9rem}
</style></head><body><main>
<h1>$title</h1><p class="sub">How much of a context's worth survives the translation of its cache</p>
$verdict
<section><h2>In plain words</h2><ul>$words</ul></section>
<section><h2>All arms</h2>$table
<p class="note">In brackets: bootstrap 95&nbsp;% intervals over documents. Recovery: 1 as if the target had read the
context itself, 0 as if it had not.</p></section>
$plot
$curve
<section><h2>What the target reads in each arm</h2><dl>$arms</dl></section>
<section><h2>Measured with</h2><dl>$facts</dl></section>
</main></body></html>
""")


def render_page(report: dict[str, Any], plot: Path | None, curve_plot: Path | None = None) -> str:
    """The report as one HTML page that needs no other file; `plot` and `curve_plot` are the pictures to put in."""
    head, rows = table(report)
    picture = ""
    if plot is not None:
        image = _image(plot, "recovery of each arm against its FLOPs")
        picture = f"<section><h2>Recovery against cost</h2>{image}</section>"
    curve = ""
    if "curve" in report:
        curve_head, curve_rows = curve_table(report["curve"])
        image = "" if curve_plot is None else _image(curve_plot, "recovery by each plan against its FLOPs")
        own = _html_table(curve_head, curve_rows, report["replay"])
        curve = f"<section><h2>Replay plans</h2>{own}{image}</section>"
    verdict = ""
    if "gate" in report:
        passed = report["gate"]["passed"]
        verdict = f'<p class="verdict {"yes" if passed else "no"}">gate {"passed" if passed else "not passed"}</p>'
    return _PAGE.substitute(
        title=html.escape(facts(report)[0][1]),
        verdict=verdict,
        words="".join(f"<li>{html.escape(sentence)}</li>" for sentence in plain_words(report)),
        table=_html_table(head, rows, "translated"),
        plot=picture,
        curve=curve,
        arms="".join(f"<dt>{row[0]}</dt><dd>{html.escape(ARMS[row[0]].about)}</dd>" for row in rows),
        facts="".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in facts(report)),
    )


def _html_table(head: list[str], rows: list[list[str]], marked: str) -> str:
    """A table; the row that starts with `marked` stands out."""
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    body = "".join(
        f'<tr class="{"own" if row[0] == marked else ""}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _image(path: Path, text: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{text}" src="data:image/png;base64,{data}">'


def _mean(values: list[float | None]) -> str:
    return "" if None in values else f"{sum(values) / len(values):.3f}"
