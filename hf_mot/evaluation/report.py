"""What an evaluation has found, as a table, in plain words and in markdown."""

from typing import Any

from hf_mot.evaluation.arms import ARMS
from hf_mot.evaluation.curve_report import curve_table, curve_words
from hf_mot.evaluation.describe import format_form, format_interval, format_number
from hf_mot.evaluation.gate import MIN_DOCUMENTS
from hf_mot.evaluation.tasks import title_of


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
            title = title_of(name)
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
        title, metric = title_of(name), {"f1": "F1"}.get(task["metric"], task["metric"])
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


def _mean(values: list[float | None]) -> str:
    return "" if None in values else f"{sum(values) / len(values):.3f}"
