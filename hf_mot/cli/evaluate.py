"""`hf-mot evaluate`: how much of a context's worth a translator keeps."""

import argparse
import os
from pathlib import Path
from typing import Any

from hf_mot.cli import (
    AUTO,
    PLANS,
    check_choice,
    check_output_file,
    command_line,
    load_pair,
    load_tasks,
    named_model,
    split_names,
)
from hf_mot.cli.rivals import (
    all_arms,
    check_corpus,
    fit_baseline,
    load_baselines,
    load_twin,
    must_refit,
    refit_twin,
)

HELP = "measure a translator: recovery, tasks, controls and cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("translator", metavar="TRANSLATOR", help="folder or Hub id of a translator")
    parser.add_argument("--source", help="source model: Hub id, folder, GGUF file or demo name [the translator's own]")
    parser.add_argument("--target", help="target model, likewise [the translator's own]")
    parser.add_argument("--text", nargs="+", metavar="FILE", help="documents that it was not fitted on")
    parser.add_argument("--lines", action="store_true", help="one document a line")
    parser.add_argument("--tasks", metavar="A,B,…", help="question answering too, e.g. squad,boolq")
    parser.add_argument("--data", metavar="DIR", help="folder with the tasks' folders [the Hub, through datasets]")
    parser.add_argument(
        "--arms",
        metavar="A,B,…",
        help="ways to get the context, or all [native,no_context,translated,wrong_document]",
    )
    parser.add_argument(
        "--replay",
        metavar="PLAN",
        help=f"what the target computes itself: {PLANS}, {AUTO} [what the translator was made for]",
    )
    parser.add_argument(
        "--curve",
        nargs="?",
        const="",
        metavar="PLAN,PLAN,…",
        help="measure these plans too, or some from the cheapest to native; --card keeps that for --replay auto",
    )
    parser.add_argument("--context", type=int, default=256, metavar="C", help="target tokens of context [256]")
    parser.add_argument("--limit", type=int, metavar="N", help="documents, and questions a task [all that fit]")
    parser.add_argument("--batch-size", type=int, default=4, metavar="B", help="contexts per forward [4]")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="order of documents and bootstrap [0]")
    parser.add_argument("--dtype", default="float32", help="dtype of both models, e.g. bfloat16 [float32]")
    parser.add_argument(
        "--prompt-style", default="auto", metavar="STYLE", help="chat, plain, or chat where there is a template [auto]"
    )
    parser.add_argument(
        "--closed-sets", default="likelihood", metavar="HOW", help="choose by likelihood, or generate [likelihood]"
    )
    parser.add_argument("--truncate", action="store_true", help="cut contexts that are too long instead of skipping")
    parser.add_argument("--show-prompts", action="store_true", help="show one prompt of each task, and stop")
    parser.add_argument(
        "--gate", action="store_true", help="exit with 1 unless better than its controls and good enough"
    )
    parser.add_argument("--gate-recovery", type=float, metavar="X", help="recovery it must reach [0.5]")
    parser.add_argument("--gate-margin", type=float, metavar="X", help="nats above each control [0]")
    parser.add_argument(
        "--fit-text", nargs="+", metavar="FILE", help="what it was fitted on: finds overlap, and fits missing rivals"
    )
    parser.add_argument("--no-cost", action="store_true", help="do not measure times and sizes")
    parser.add_argument("--cost-context", type=int, metavar="C", help="tokens of context for the cost [as --context]")
    parser.add_argument("--json", metavar="OUT", help="write all figures to this file, each example's beside it")
    parser.add_argument("--report", metavar="DIR", help="write figures, tables, plot and a page to this folder")
    parser.add_argument("--card", action="store_true", help="put the figures into the translator's card, verdict too")
    parser.add_argument(
        "--reuse",
        metavar="FILE",
        help="examples.jsonl of another evaluation of this pair: take what no translator plays a part in from it",
    )
    parser.add_argument("--overwrite", action="store_true", help="do not go on with the results that are there")


def run(args: argparse.Namespace) -> int:
    # Cheap checks come first: a typo must not cost a minute of loading.
    check_output_file(args.json, "--json")
    if args.text is None and not split_names(args.tasks):
        raise ValueError("`--text` and `--tasks` are both missing: there is nothing to measure on. Give one of them.")
    _check_options(args)
    if args.report is not None and os.path.exists(args.report) and not os.path.isdir(args.report):
        raise ValueError(f"`--report` must name a folder, got the file {args.report}.")

    if args.card and not os.path.isdir(args.translator):
        raise ValueError(f"`--card` needs the translator's own folder, got {args.translator}. Download it first.")

    from hf_mot.baselines import BASELINES
    from hf_mot.data.documents import read_documents
    from hf_mot.evaluation.arms import find_arm
    from hf_mot.evaluation.curve import default_plans, replay_curve
    from hf_mot.evaluation.files import save_report
    from hf_mot.evaluation.gate import Gate
    from hf_mot.evaluation.prompts import STYLES
    from hf_mot.evaluation.question_answering import CLOSED_SETS
    from hf_mot.evaluation.report import require_matplotlib, write_report
    from hf_mot.evaluation.runner import evaluate
    from hf_mot.evaluation.settings import DEFAULT_ARMS, check_settings
    from hf_mot.evaluation.store import ResultStore
    from hf_mot.hub.resolve import load_translator

    check_choice(args.prompt_style, STYLES, "--prompt-style")
    check_choice(args.closed_sets, CLOSED_SETS, "--closed-sets")
    if args.report is not None:
        require_matplotlib()
    thresholds = {"recovery": args.gate_recovery, "margin": args.gate_margin}
    given = {name: value for name, value in thresholds.items() if value is not None}
    gate = Gate(**given) if args.gate else None
    documents = list(read_documents(args.text, lines=args.lines)) if args.text else None
    tasks = load_tasks(args.tasks, args.data)
    translator = load_translator(args.translator)
    arms = DEFAULT_ARMS if args.arms is None else split_names(args.arms)
    if arms == ["all"]:
        arms = all_arms(args, translator)
    settings = {
        "arms": arms,
        "context_length": args.context,
        "limit": args.limit,
        "batch_size": args.batch_size,
        "replay": args.replay,
        "cost_context_length": args.cost_context,
        "gate": gate,
    }
    if args.curve is not None:
        settings["curve"] = split_names(args.curve) or default_plans(translator, args.context)
    arms = check_settings(translator, tasks=tasks, **settings)
    if args.fit_text:
        check_corpus(translator, args.fit_text)
    needs_twin = any(find_arm(arm).needs == "no_source" for arm in arms)
    no_source = load_twin(args.translator) if needs_twin and not must_refit(args, translator) else None
    if args.show_prompts:
        print(_format_prompts(args, translator, tasks))
        return 0
    baselines = load_baselines(args, arms, translator)
    results = _results_file(args)
    # What cannot be gone on with, or reused, must not cost the loading of the models either.
    store = ResultStore(results, overwrite=args.overwrite, reuse=args.reuse)
    pair = load_pair(args, translator)

    def corpus():
        return read_documents(args.fit_text, lines=args.lines)

    if needs_twin and no_source is None:
        no_source = refit_twin(args.translator, translator, corpus(), pair)
    for name in BASELINES:
        if name in arms and name not in baselines:
            baselines[name] = fit_baseline(args, name, corpus(), pair)
    report = evaluate(
        translator,
        documents,
        **pair,
        no_source=no_source,
        baselines=baselines,
        tasks=tasks,
        seed=args.seed,
        prompt_style=args.prompt_style,
        closed_sets=args.closed_sets,
        truncate=args.truncate,
        fit_corpus=corpus() if args.fit_text else None,
        results=store,
        cost=not args.no_cost,
        **settings,
    )
    report["command"] = command_line(args.argv)
    print(format_report(report))
    if args.json is not None:
        save_report(report, args.json)
        print(f"\nAll figures: {args.json}")
    if args.report is not None:
        page = write_report(report, args.report)
        print(f"\nReport: {page}")
    if args.card:
        from hf_mot.cli.fit import describe_file
        from hf_mot.hub.record import record_evaluation

        corpus = {"corpus": [describe_file(path) for path in args.text]} if args.text else {}
        record_evaluation(args.translator, {**report, **corpus})
        print(f"\nCard: {os.path.join(args.translator, 'README.md')}")
        if "curve" in report and replay_curve(report) is None:
            print("No plan has a recovery: there is nothing for --replay auto to choose from.")
    if gate is not None and not report["gate"]["passed"]:
        return 1
    # What is missing of a curve may be a plan of more tokens than a context has: it is no failure.
    return int(any("@" not in arm for arms in report.get("missing", {}).values() for arm in arms))


def _check_options(args: argparse.Namespace) -> None:
    """Raises `ValueError` for an option that would have no effect."""
    tasks, kept = bool(split_names(args.tasks)), args.json is not None or args.report is not None
    for option, given, needed, there in (
        ("--show-prompts", args.show_prompts, "--tasks", tasks),
        ("--data", args.data is not None, "--tasks", tasks),
        ("--truncate", args.truncate, "--tasks", tasks),
        ("--gate-recovery", args.gate_recovery is not None, "--gate", args.gate),
        ("--gate-margin", args.gate_margin is not None, "--gate", args.gate),
        ("--overwrite", args.overwrite, "--json or --report", kept),
    ):
        if given and not there:
            raise ValueError(f"`{option}` is of no effect without {needed}. Give that too, or leave it out.")
    if args.cost_context is not None and args.no_cost:
        raise ValueError("`--cost-context` and `--no-cost` exclude each other. Leave one of them out.")


def _results_file(args: argparse.Namespace) -> Path | None:
    if args.report is not None:
        Path(args.report).mkdir(parents=True, exist_ok=True)
        return Path(args.report) / "examples.jsonl"
    return None if args.json is None else Path(args.json).with_suffix(".examples.jsonl")


def _format_prompts(args: argparse.Namespace, translator: Any, tasks: dict[str, Any]) -> str:
    """What each of the two models would be asked of the first example of each task."""
    from hf_mot.evaluation.prompts import Prompter
    from hf_mot.evaluation.tasks import TASKS
    from hf_mot.hub.resolve import load_tokenizer

    lines = []
    for side in ("target", "source") if translator.config.source_layers else ("target",):
        name, revision = named_model(args, translator, side)
        tokenizer = load_tokenizer(name, **revision)
        style = "plain" if side == "source" and tokenizer.chat_template is None else args.prompt_style
        prompter = Prompter.of(tokenizer, getattr(translator.config, side)["prefix_ids"], style)
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
        lines += ["", *_task_lines(name, figures)]
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


def _task_lines(name: str, figures: dict[str, Any]) -> list[str]:
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
