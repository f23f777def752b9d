"""`hf-mot evaluate`: how much of a context's worth a translator keeps."""

import argparse
import os
from typing import Any

from hf_mot.cli import check_output_file, command_line, model_name

HELP = "measure a translator: recovery, controls and cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("translator", metavar="TRANSLATOR", help="folder or Hub id of a translator")
    parser.add_argument("--source", help="source model: Hub id, folder, GGUF file or demo name [the translator's own]")
    parser.add_argument("--target", help="target model, likewise [the translator's own]")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="documents that it was not fitted on")
    parser.add_argument("--lines", action="store_true", help="one document a line")
    parser.add_argument(
        "--arms", metavar="A,B,…", help="ways to get the context, e.g. native,no_context,translated [six of them]"
    )
    parser.add_argument("--replay", default="none", metavar="PLAN", help="what the target recomputes [none]")
    parser.add_argument("--context", type=int, default=256, metavar="C", help="target tokens of context [256]")
    parser.add_argument("--limit", type=int, metavar="N", help="number of documents [all that are long enough]")
    parser.add_argument("--batch-size", type=int, default=4, metavar="B", help="documents per forward [4]")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="order of documents and bootstrap [0]")
    parser.add_argument("--dtype", default="float32", help="dtype of both models, e.g. bfloat16 [float32]")
    parser.add_argument("--no-cost", action="store_true", help="do not measure times and sizes")
    parser.add_argument("--cost-context", type=int, metavar="C", help="tokens of context for the cost [as --context]")
    parser.add_argument("--json", metavar="OUT", help="write all figures to this file")


def run(args: argparse.Namespace) -> int:
    # Cheap checks come first: a typo must not cost a minute of loading.
    check_output_file(args.json, "--json")

    from hf_mot.data.documents import read_documents
    from hf_mot.evaluation.runner import DEFAULT_ARMS, check_settings, evaluate, save_report
    from hf_mot.hub.resolve import load_model, load_tokenizer, load_translator

    documents = list(read_documents(args.text, lines=args.lines))
    settings = {
        "arms": DEFAULT_ARMS if args.arms is None else [arm.strip() for arm in args.arms.split(",") if arm.strip()],
        "context_length": args.context,
        "limit": args.limit,
        "batch_size": args.batch_size,
        "replay": args.replay,
        "cost_context_length": args.cost_context,
    }
    translator = load_translator(args.translator)
    arms = check_settings(translator, **settings)
    no_source = _load_twin(args.translator) if "no_source" in arms else None
    source_name = None
    if translator.config.source_layers:
        source_name = model_name(args.source, translator.config.source, "source")
    target_name = model_name(args.target, translator.config.target, "target")
    source = source_tokenizer = None
    if source_name is not None:
        source, source_tokenizer = load_model(source_name, dtype=args.dtype), load_tokenizer(source_name)
    target, target_tokenizer = load_model(target_name, dtype=args.dtype), load_tokenizer(target_name)

    report = evaluate(
        translator,
        documents,
        source=source,
        target=target,
        source_tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        no_source=no_source,
        seed=args.seed,
        cost=not args.no_cost,
        **settings,
    )
    report["command"] = command_line(args.argv)
    print(format_report(report))
    if args.json is not None:
        save_report(report, args.json)
        print(f"\nAll figures: {args.json}")
    return 0


def _load_twin(name: str):
    """The translator's twin without source, which a fit saves beside it."""
    from hf_mot.hub.resolve import load_translator

    way_out = "Fit again (hf-mot fit writes it), or choose --arms without no_source."
    missing = f"`--arms` holds no_source, but there is no twin in {name}/no_source. {way_out}"
    if os.path.isdir(name):
        folder = os.path.join(name, "no_source")
        if not os.path.isdir(folder):
            raise ValueError(missing)
        return load_translator(folder)
    try:
        return load_translator(name, subfolder="no_source")
    except OSError as error:
        raise ValueError(missing) from error


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
    from hf_mot.evaluation.arms import ARMS

    pair = " → ".join(report["pair"][side] for side in ("source", "target") if side in report["pair"])
    skipped = "".join(f", {count} skipped ({reason})" for reason, count in report["skipped"].items())
    lines = [
        f"{pair}, plan {report['replay']}",
        f"{report['n']} documents{skipped}, {report['context_length']} tokens of context, seed {report['seed']}",
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
    lines += report.get("notes", [])
    if "cost" in report:
        lines += ["", *_cost_lines(report["cost"])]
    return "\n".join(lines)


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
    return [f"{label:<20}{text}" for label, text in rows]
