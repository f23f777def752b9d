"""What `hf-mot evaluate` prints: the prompts that it is asked for, and its figures as aligned tables."""

import argparse
from typing import Any

from hf_mot.cli import named_model


def format_prompts(args: argparse.Namespace, translator: Any, tasks: dict[str, Any]) -> str:
    """What each of the two models would be asked of the first example of each task."""
    from hf_mot.evaluation.prompts import Prompter
    from hf_mot.evaluation.tasks import TASKS
    from hf_mot.hub.resolve import load_tokenizer

    lines = []
    for side in ("target", "source") if translator.config.source_layers else ("target",):
        name, revision = named_model(args, translator, side)
        tokenizer = load_tokenizer(name, **revision)
        make = Prompter.of_source if side == "source" else Prompter.of
        prompter = make(tokenizer, getattr(translator.config, side)["prefix_ids"], args.prompt_style)
        for task, examples in tasks.items():
            asked = prompter.question(TASKS[task], examples[0])
            lines += [
                f"--- {side}, {task} ({examples[0].id}), {prompter.style}: {len(asked.context_ids)} tokens of context "
                f"in the cache, then {len(asked.prompt_ids)} of prompt",
                f"[context] {examples[0].context[:160]!r}" + " …" * (len(examples[0].context) > 160),
                f"[prompt] {prompter.prompt(TASKS[task], examples[0])}",
                f"[answers] {list(examples[0].choices or examples[0].answers)}",
                "",
            ]
    return "\n".join(lines)


_LABELS = {
    "recovery": "what of the context's worth the translation keeps",
    "content_recovery": "the same, against a translation of the wrong document",
    "source_value": "what the source adds to the target's own token embeddings",
}


def format_report(report: dict[str, Any]) -> str:
    """
    The report as a few aligned tables.

    Args:
        report (`dict`): What `evaluation.evaluate` returned.

    Returns:
        `str`: Lines for a terminal.
    """
    pair = " → ".join(report["pair"][side] for side in ("source", "target") if side in report["pair"])
    lines = [f"{pair}, plan {report['replay']}"]
    if "arms" in report:
        lines += _document_lines(report)
    for name, figures in report.get("tasks", {}).items():
        lines += ["", *task_lines(name, figures)]
    for part, arms in report.get("missing", {}).items():
        lines += ["", *(f"missing: {arm} of {part}, which crashed: {reason}" for arm, reason in arms.items())]
    if "overlap" in report:
        lines += ["", _overlap_line(report["overlap"])]
    if "curve" in report:
        lines += ["", *_curve_lines(report["curve"])]
    if "cost" in report:
        lines += ["", *_cost_lines(report["cost"])]
    if "gate" in report:
        lines += ["", *_gate_lines(report["gate"])]
    return "\n".join(lines)


def _document_lines(report: dict[str, Any]) -> list[str]:
    from hf_mot.evaluation.arms import ARMS

    skipped = "".join(f", {count} skipped ({reason})" for reason, count in report["skipped"].items())
    counted = f"{report['n']} documents"
    if "n_documents" in report:
        counted = f"{report['n']} windows of {report['n_documents']} documents"
    lines = [
        f"{counted}{skipped}, {report['context_length']} tokens of context, seed {report['seed']}",
        "",
        f"{'arm':<23}{'NLL':>7}  {'recovery [95 % interval]':<24}  the target reads",
    ]
    for arm, figures in report["arms"].items():
        recovery = _interval(figures["recovery"]) if "recovery" in figures else ""
        lines.append(f"{arm:<23}{figures['nll']:>7.4f}  {recovery:<24}  {ARMS[arm].about}")
    lines.append("")
    for metric, label in _LABELS.items():
        if metric in report:
            lines.append(f"{metric:<18}{_interval(report[metric])}  {label}")
    return lines + report.get("notes", [])


def task_lines(name: str, figures: dict[str, Any]) -> list[str]:
    from hf_mot.evaluation.arms import ARMS

    metric, nll = figures["metric"], figures["answer_nll"]
    counted = ("too_long", "truncated", "answers_longer_than_cut")
    skipped = "".join(f", {figures[key]} {key.replace('_', ' ')}" for key in counted if key in figures)
    about = f" about {figures['n_documents']} contexts" if "n_documents" in figures else ""
    lines = [
        f"{name}: {figures['n']} questions{about}{skipped}, {figures['prompt']} prompt, version {figures['version']}",
        f"{'arm':<23}{metric:>8}  {'[95 % interval]':<16}{'EM':>7}{'NLL':>9}  recovery of the answer's NLL",
    ]
    for arm in (arm for arm in ARMS if arm in figures):
        ends = figures.get("intervals", {}).get(arm)
        exact = f"{figures['em'][arm]:.3f}" if "em" in figures else ""
        loss = f"{nll[arm]:.4f}" if arm in nll else ""
        recovery = _interval(nll["recoveries"][arm]) if arm in nll.get("recoveries", {}) else ""
        interval = f"[{ends['low']:.3f}, {ends['high']:.3f}]" if ends else ""
        lines.append(f"{arm:<23}{figures[arm]:>8.3f}  {interval:<16}{exact:>7}{loss:>9}  {recovery}".rstrip())
    if "native_minus_no_context" in figures:
        verdict = "counts in a verdict" if figures["counts"] else "does not count in a verdict: the interval holds 0"
        lines.append(f"native - no_context {_interval(figures['native_minus_no_context']).strip()}: {verdict}")
    return lines + nll.get("notes", [])


def _overlap_line(overlap: dict[str, Any]) -> str:
    named = [f"{part} {name}" for part, names in overlap["documents"].items() for name in names]
    shown = ", ".join(named[:8]) + (", …" if len(named) > 8 else "")
    return (
        f"overlap with the fit's corpus: {overlap['shared']} of {overlap['tested']} contexts share a run of "
        f"{overlap['run_words']} words" + (f": {shown}" if named else "")
    )


def _curve_lines(curve: list[dict[str, Any]]) -> list[str]:
    from hf_mot.evaluation.curve_report import curve_table

    head, rows = curve_table(curve)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def _gate_lines(gate: dict[str, Any]) -> list[str]:
    judged = ", ".join(gate["judged_on"]) or "nothing"
    lines = [f"gate: {'passed' if gate['passed'] else 'NOT PASSED'} (judged on {judged})"]
    return lines + [f"  {reason}" for reason in gate["reasons"]]


def _interval(figure: dict[str, float]) -> str:
    return f"{figure['value']:6.3f}  [{figure['low']:.3f}, {figure['high']:.3f}]"


def _cost_lines(cost: dict[str, float]) -> list[str]:
    rows = [
        (
            "handoff / prefill",
            f"{cost['handoff_s'] * 1000:.0f} ms / {cost['prefill_s'] * 1000:.0f} ms = {cost['time_ratio']:.3f}  "
            f"[{cost['time_ratio_low']:.3f}, {cost['time_ratio_high']:.3f}] at {cost['context_length']} tokens",
        ),
        ("same, in FLOPs", f"{cost['flops_ratio']:.3f}"),
        (
            "first token after",
            f"{cost['ttft_translated_s'] * 1000:.0f} ms translated, {cost['ttft_native_s'] * 1000:.0f} ms native "
            f"({cost['prompt_tokens']} prompt tokens; the source's own reading not counted)",
        ),
        ("cache / translator", f"{cost['kv_bytes'] / 1e6:.1f} MB / {cost['translator_bytes'] / 1e6:.1f} MB"),
    ]
    if "peak_bytes" in cost:
        peaks = f"{cost['peak_bytes'] / 1e6:.1f} MB handoff, {cost['prefill_peak_bytes'] / 1e6:.1f} MB prefill"
        rows.append(("peak memory", f"{peaks} (above the models, the cache that it makes included)"))
    return [f"{label:<20}{text}" for label, text in rows]
