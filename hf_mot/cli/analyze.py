"""`hf-mot analyze`: where a translation loses what it loses."""

import argparse
from typing import Any

from hf_mot.cli import AUTO, PLANS, check_output_file, command_line, load_pair, load_tasks

HELP = "find out where a translation loses what it loses"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("translator", metavar="TRANSLATOR", help="folder or Hub id of a translator")
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="what translating one layer's keys or values alone costs, all else being the target's own",
    )
    parser.add_argument("--source", help="source model: Hub id, folder, GGUF file or demo name [the translator's own]")
    parser.add_argument("--target", help="target model, likewise [the translator's own]")
    parser.add_argument("--text", nargs="+", metavar="FILE", help="documents that it was not fitted on")
    parser.add_argument("--lines", action="store_true", help="one document a line")
    parser.add_argument("--tasks", metavar="A,B,…", help="by the right answers to questions too, e.g. squad")
    parser.add_argument("--data", metavar="DIR", help="folder with the tasks' folders [the Hub, through datasets]")
    parser.add_argument("--reverse", action="store_true", help="also what one piece wins back, all others translated")
    parser.add_argument(
        "--replay",
        metavar="PLAN",
        help=f"what the target computes itself: {PLANS}, {AUTO} [what the translator was made for]",
    )
    parser.add_argument("--context", type=int, default=256, metavar="C", help="target tokens of context [256]")
    parser.add_argument("--limit", type=int, metavar="N", help="documents, and questions a task [all that fit]")
    parser.add_argument("--batch-size", type=int, default=4, metavar="B", help="contexts per forward [4]")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="order of documents and bootstrap [0]")
    parser.add_argument("--dtype", default="float32", help="dtype of both models, e.g. bfloat16 [float32]")
    parser.add_argument(
        "--prompt-style", default="auto", metavar="STYLE", help="chat, plain, or chat where there is a template [auto]"
    )
    parser.add_argument("--json", metavar="OUT", help="write all figures to this file; hf-mot fit can weigh by it")
    parser.add_argument("--plot", metavar="PNG", help="draw them to this file")


def run(args: argparse.Namespace) -> int:
    # Cheap checks come first: a typo must not cost a minute of loading.
    if not args.sensitivity:
        raise ValueError("No analysis is chosen. Give --sensitivity.")
    check_output_file(args.json, "--json")
    check_output_file(args.plot, "--plot")
    if args.plot is not None and not args.plot.lower().endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"`--plot` must name a .png, .svg or .pdf file, got {args.plot}.")
    if args.text is None and args.tasks is None:
        raise ValueError("`--text` and `--tasks` are both missing: there is nothing to measure on. Give one of them.")

    from hf_mot.analysis import measure_sensitivity, plot_sensitivity
    from hf_mot.analysis.pieces import translated_pieces
    from hf_mot.data.documents import read_documents
    from hf_mot.evaluation.files import save_report
    from hf_mot.evaluation.report_plot import require_matplotlib
    from hf_mot.evaluation.settings import check_settings
    from hf_mot.hub.resolve import load_translator

    if args.plot is not None:
        require_matplotlib()
    documents = list(read_documents(args.text, lines=args.lines)) if args.text else None
    tasks = load_tasks(args.tasks, args.data)
    translator = load_translator(args.translator)
    settings = {
        "context_length": args.context,
        "limit": args.limit,
        "batch_size": args.batch_size,
        "replay": args.replay,
    }
    check_settings(translator, tasks=tasks, **settings)
    translated_pieces(translator, str(translator.plan(args.replay, args.context)))
    report = measure_sensitivity(
        translator,
        documents,
        **load_pair(args, translator),
        tasks=tasks,
        seed=args.seed,
        prompt_style=args.prompt_style,
        reverse=args.reverse,
        **settings,
    )
    report["command"] = command_line(args.argv)
    print(format_sensitivity(report))
    if args.json is not None:
        save_report(report, args.json)
        print(f"\nAll figures: {args.json}")
    if args.plot is not None:
        plot_sensitivity(report, args.plot)
        print(f"\nPlot: {args.plot}")
    return 0


def format_sensitivity(report: dict[str, Any]) -> str:
    """
    A table per measure, a line a layer, for a terminal.

    Args:
        report (`dict`): What `analysis.measure_sensitivity` returned.
    """
    pair = " → ".join(report["pair"][side] for side in ("source", "target") if side in report["pair"])
    lines = [f"{pair}, plan {report['replay']}, seed {report['seed']}"]
    unexplained = {(own["layer"], own["states"]): own["value"] for own in report["unexplained"]}
    for name, figures in report["measures"].items():
        lines += ["", *_measure_lines(name, figures, unexplained)]
    return "\n".join(lines)


def _measure_lines(name: str, figures: dict[str, Any], unexplained: dict[tuple[int, str], float]) -> list[str]:
    key = "lost" if "lost" in figures else "cost"
    skipped = "".join(f", {count} skipped ({reason})" for reason, count in figures.get("skipped", {}).items())
    unit = "share of the context's worth" if key == "lost" else "nats"
    lines = [
        f"{name}: {figures['n']} scored{skipped}; NLL {figures['native']:.4f} native, {figures['translated']:.4f} "
        f"translated, {figures['no_context']:.4f} without context",
        *figures.get("notes", []),
    ]
    if key == "lost":
        lines.append(f"all translated: lost {_interval(figures['lost'])}")
    columns = [("lost by translating it alone", key)]
    if any("restored" in piece for piece in figures["pieces"]):
        columns.append(("won back by it alone", "restored"))
    head = "".join(f"{f'{title}, {unit}':<46}" for title, _ in columns)
    lines.append(f"{'layer':<7}{'states':<8}{'unexplained':>11}  {head}".rstrip())
    for piece in figures["pieces"]:
        share = unexplained[piece["layer"], piece["states"]]
        cells = "".join(f"{_interval(piece[column]):<46}" for _, column in columns)
        lines.append(f"{piece['layer']:<7}{piece['states']:<8}{share:>11.3f}  {cells}".rstrip())
    return lines


def _interval(figure: dict[str, float]) -> str:
    return f"{figure['value']:6.3f}  [{figure['low']:.3f}, {figure['high']:.3f}]"
