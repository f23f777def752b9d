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
    check_output_folder,
    command_line,
    load_pair,
    load_tasks,
    split_names,
)
from hf_mot.cli.evaluate_lines import format_prompts, format_report
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
    check_output_folder(args.report, "--report")
    if args.card and not os.path.isdir(args.translator):
        raise ValueError(f"`--card` needs the translator's own folder, got {args.translator}. Download it first.")

    from hf_mot.baselines import BASELINES
    from hf_mot.data.documents import read_documents
    from hf_mot.evaluation.arms import find_arm
    from hf_mot.evaluation.curve import default_plans, runnable_plans
    from hf_mot.evaluation.gate import Gate
    from hf_mot.evaluation.measure import has_crashed
    from hf_mot.evaluation.prompts import STYLES
    from hf_mot.evaluation.question_answering import CLOSED_SETS
    from hf_mot.evaluation.report_plot import require_matplotlib
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
        print(format_prompts(args, translator, tasks))
        return 0
    baselines = load_baselines(args, arms, translator)
    results = _results_file(args)
    # What cannot be gone on with, or reused, must not cost the loading of the models either.
    store = ResultStore(results, overwrite=args.overwrite, reuse=args.reuse)
    pair = load_pair(args, translator)
    if args.curve is not None and not split_names(args.curve):
        settings["curve"] = runnable_plans(settings["curve"], pair["target"])

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
    _keep(args, report)
    return int(has_crashed(report) or not report.get("gate", {"passed": True})["passed"])


def _keep(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Writes what was asked for, and says where it is."""
    from hf_mot.evaluation.files import save_report
    from hf_mot.evaluation.report_page import write_report

    if args.json is not None:
        save_report(report, args.json)
        print(f"\nAll figures: {args.json}")
    if args.report is not None:
        page = write_report(report, args.report)
        print(f"\nReport: {page}")
    if args.card:
        _put_into_card(args, report)


def _put_into_card(args: argparse.Namespace, report: dict[str, Any]) -> None:
    from hf_mot.cli.fit import describe_file
    from hf_mot.evaluation.curve import replay_curve
    from hf_mot.evaluation.gate import MIN_DOCUMENTS, documents_of
    from hf_mot.hub.record import record_evaluation

    corpus = {"corpus": [describe_file(path) for path in args.text]} if args.text else {}
    if not record_evaluation(args.translator, {**report, **corpus}):
        print("\nCard: left as it is. Of this evaluation an arm is missing, and the one in the card is complete.")
        return
    print(f"\nCard: {os.path.join(args.translator, 'README.md')}")
    if "curve" not in report or replay_curve(report) is not None:
        return
    if any("recovery" in point for point in report["curve"]):
        print(
            f"The curve is of {documents_of(report)} documents, too few for --replay auto to choose by (it needs "
            f"{MIN_DOCUMENTS}): it is not kept."
        )
    else:
        print("No plan has a recovery: there is nothing for --replay auto to choose from.")


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
        return Path(args.report) / "examples.jsonl"
    return None if args.json is None else Path(args.json).with_suffix(".examples.jsonl")
