"""`hf-mot search-channels`: the window of target layers that is best translated."""

import argparse
import os
from pathlib import Path
from typing import Any

from hf_mot.cli import check_output_file, command_line, given_options, split_names
from hf_mot.cli.fit import describe_file
from hf_mot.cli.train import add_training_arguments, add_translator_arguments, training_arguments, translator_settings

_NO_EFFECT = ("start", "best", "no_source", "twin", "sensitivity", "sensitivity_power", "save_steps", "eval_steps")
HELP = "find the target layers that are best translated, by short trainings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", required=True, help="the model that reads: Hub id, folder, GGUF file or demo name")
    parser.add_argument("--target", required=True, help="the model that answers, likewise")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="text to train on, gzipped or not")
    parser.add_argument("--lines", action="store_true", help="one document a line")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for figures, plot and the search's state")
    parser.add_argument("--starts", metavar="A,B,…", help="lowest target layers to try [every one]")
    add_translator_arguments(parser)
    add_training_arguments(parser)


def run(args: argparse.Namespace) -> int:
    # Cheap checks come first: a typo must not cost a download or an hour.
    check_output_file(args.json, "--json")
    if args.eval_text is None:
        raise ValueError("`--eval-text` is missing: windows are compared on held-out text. Give it.")
    if Path(args.out).is_file():
        raise ValueError(f"`--out` must be a folder, but {args.out} is a file. Give another name.")
    given = given_options(args, *_NO_EFFECT)
    if given:
        hint = " (see --starts)" if given[0] == "--start" else ""
        raise ValueError(f"`{given[0]}` has no effect on a search{hint}. Leave it out.")
    starts = _numbers(args.starts)
    settings = translator_settings(args)
    if any(field.startswith("num_translators=") for field in args.config):
        raise ValueError(
            f"`num_translators` {settings['num_translators']} cannot be searched: each window is judged by a single "
            "translator. Leave it out."
        )
    if args.layers is not None:
        settings["num_source_layers"] = args.layers

    from hf_mot.analysis import plot_windows
    from hf_mot.evaluation import save_report
    from hf_mot.evaluation.report_plot import require_matplotlib
    from hf_mot.hub.resolve import load_model, load_tokenizer
    from hf_mot.training import MoTTrainer, TextDataset, TextFiles
    from hf_mot.training.channel_search import search_channels
    from hf_mot.training.checkpoints import missing_folders, remove_empty
    from hf_mot.training.report import SETTINGS
    from hf_mot.training.start import pair_contracts

    require_matplotlib()
    training = training_arguments(args)
    training.save_strategy, training.eval_strategy = "no", "no"  # a window is short: it is done, or done again
    text, held_out = TextFiles(args.text, args.lines), TextFiles(args.eval_text, args.lines)
    pair = {
        "source": load_model(args.source, dtype=args.dtype),
        "target": load_model(args.target, dtype=args.dtype),
        "source_tokenizer": load_tokenizer(args.source),
        "target_tokenizer": load_tokenizer(args.target),
    }
    examples = TextDataset.from_args(text, pair["target_tokenizer"], training)
    limits = {"passes": 1, "limit": training.eval_limit}
    eval_examples = TextDataset.from_args(held_out, pair["target_tokenizer"], training, **limits)

    new_folders = missing_folders(training.output_dir)

    def train(model) -> dict[str, float]:
        trainer = MoTTrainer(
            model, training, train_dataset=examples, eval_dataset=eval_examples, eval_documents=held_out, **pair
        )
        try:
            trainer.train()
            return trainer.evaluate()
        finally:
            remove_empty(new_folders)  # no checkpoint is kept

    recipe = {name: getattr(training, name) for name in (*SETTINGS, "max_steps", "eval_limit", "eval_context_length")}
    files = {"corpus": args.text, "held_out": args.eval_text}
    corpora = {name: [describe_file(path) for path in paths] for name, paths in files.items()}
    report = search_channels(
        pair_contracts(**pair),
        train,
        starts=starts,
        settings={**recipe, **corpora, "lines": args.lines, "dtype": args.dtype},
        results=os.path.join(args.out, "windows.jsonl"),
        seed=args.seed,
        **{"channel_ratio": 0.3, **settings},
    )
    report["command"] = command_line(args.argv)
    save_report(report, Path(args.out) / "report.json")
    plot_windows(report, Path(args.out) / "windows.png")
    if args.json is not None:
        save_report(report, args.json)
    print(format_windows(report, args.out))
    return 0


def format_windows(report: dict[str, Any], out: str) -> str:
    """The windows as a table, and how to train in the best one."""
    lines = [f"{'target layers':<15}{'loss':>9}{'recovery':>10}"]
    for window in report["windows"]:
        layers = window["target_layers"]
        recovery = f"{window['eval_recovery']:.3f}" if "eval_recovery" in window else ""
        best = "  best" if window is report["best"] else ""
        lines.append(f"{f'{layers[0]}-{layers[-1]}':<15}{window['eval_loss']:>9.4f}{recovery:>10}{best}")
    best = report["best"]["start"]
    lines += ["", f"train there: hf-mot train … --channel-ratio {report['channel_ratio']} --start {best}"]
    return "\n".join([*lines, f"figures and plot: {out}"])


def _numbers(given: str | None) -> list[int] | None:
    try:
        numbers = None if given is None else [int(number) for number in split_names(given)]
    except ValueError:
        raise ValueError(f"`--starts` must be layer numbers with commas between, got {given!r}.") from None
    if numbers == []:
        raise ValueError(f"`--starts` names no layer, got {given!r}. Give some, or leave it out to try every one.")
    return numbers
