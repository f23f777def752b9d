"""`hf-mot fit`: a translator for two models, from text."""

import argparse
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_mot.cli import check_choice, check_output_file, command_line, read_json

HELP = "fit a translator for two models on text files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", required=True, help="the model that reads: Hub id, folder, GGUF file or demo name")
    parser.add_argument("--target", required=True, help="the model that answers, likewise")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="text to fit on, gzipped or not")
    parser.add_argument("--lines", action="store_true", help="one document a line")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write the translator to")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in DIR")
    parser.add_argument("--method", default="reduced_rank", metavar="M", help="what to fit [reduced_rank]")
    parser.add_argument("--rank", type=_rank, metavar="R", help="width of the shared down-projection, or full")
    parser.add_argument(
        "--max-parameters",
        type=_count,
        metavar="N",
        help="budget, e.g. 14M: the rank (up to R) and how much of it each piece reads are chosen within",
    )
    parser.add_argument(
        "--flops-share", type=float, metavar="X", help="budget, as a share of the target's own prefill at 1,024 tokens"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="number of source layers to read")
    parser.add_argument(
        "--source-window", type=int, metavar="W", help="tokens whose source states to read, own included [2]"
    )
    parser.add_argument(
        "--embedding-window", type=int, metavar="W", help="target token embeddings to read, own included"
    )
    parser.add_argument(
        "--target-hidden-layer",
        type=int,
        metavar="N",
        help="read the target's own hidden state too, what goes into its layer N: layers 0 to N run, by plan bottom",
    )
    parser.add_argument(
        "--resume-layer",
        type=int,
        metavar="N",
        help="fit target layers 0 to N-1 and what goes into layer N, from which the target runs, by plan resume",
    )
    parser.add_argument(
        "--restore",
        type=_layers,
        metavar="LAYERS",
        help="of these target layers (5,11 or all) fit the input of the attention, of which it makes keys and values",
    )
    parser.add_argument(
        "--sensitivity",
        metavar="FILE",
        help="spend the rank where it costs, by hf-mot analyze --sensitivity --json FILE",
    )
    parser.add_argument(
        "--sensitivity-power", type=float, metavar="P", help="exponent of the weights that this gives, 0 for none [1]"
    )
    parser.add_argument(
        "--key-metric", default="plain", metavar="M", help="errors of keys: plain, or by what each query sees [plain]"
    )
    parser.add_argument("--no-key-norms", action="store_true", help="leave keys as short as a regression makes them")
    parser.add_argument("--tokens", type=int, metavar="N", help="target tokens to fit on, at most")
    parser.add_argument(
        "--statistics",
        metavar="FILE",
        help="keep the pass over the text here: it goes on, and other fits skip it",
    )
    parser.add_argument(
        "--eval-text", nargs="+", metavar="FILE", help="other text, to measure the translator on for its card"
    )
    parser.add_argument("--eval-context", type=int, default=256, metavar="C", help="tokens of context then [256]")
    parser.add_argument("--eval-limit", type=int, default=128, metavar="N", help="documents then, at most [128]")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of every choice [0]")
    parser.add_argument("--dtype", default="float32", help="dtype of both models, e.g. bfloat16 [float32]")
    parser.add_argument("--json", metavar="PATH", help="also write the fit report to this file")


def run(args: argparse.Namespace) -> int:
    # Cheap checks come first: a typo must not cost a download or an hour.
    check_output_file(args.json, "--json")
    check_output_file(args.statistics, "--statistics")
    _check_out(args.out, args.overwrite)
    check_choice(args.method, ("reduced_rank",), "--method")  # others are trained
    check_choice(args.key_metric, ("plain", "query"), "--key-metric")
    if args.rank == "full" and (args.max_parameters is not None or args.flops_share is not None):
        raise ValueError("`--rank` is full, but a budget needs the most that it may be. Give a number.")
    sensitivity = None if args.sensitivity is None else read_json(args.sensitivity, "--sensitivity")
    if sensitivity is None and args.sensitivity_power is not None:
        raise ValueError("`--sensitivity-power` has no effect without `--sensitivity`. Give both, or neither.")

    from hf_mot.contract_mot import describe_model
    from hf_mot.data.documents import read_documents
    from hf_mot.evaluation import save_report
    from hf_mot.fit import fit, piece_weights, save_fit
    from hf_mot.geometry_mot import probe
    from hf_mot.hub.card import render_card
    from hf_mot.hub.representation import describe_restored
    from hf_mot.hub.resolve import load_model, load_tokenizer

    documents = read_documents(args.text, lines=args.lines)
    eval_documents = read_documents(args.eval_text, lines=args.lines) if args.eval_text else None
    options = {
        "rank": args.rank,
        "num_source_layers": args.layers,
        "source_window": args.source_window,
        "embedding_window": args.embedding_window,
        "target_hidden_layer": args.target_hidden_layer,
        "resume_layer": args.resume_layer,
        "max_parameters": args.max_parameters,
        "flops_share": args.flops_share,
        "max_tokens": args.tokens,
        "statistics": args.statistics,
        "key_norms": False if args.no_key_norms else None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if args.rank == "full":
        options["rank"] = None
    pair = {
        "source": load_model(args.source, dtype=args.dtype),
        "target": load_model(args.target, dtype=args.dtype),
        "source_tokenizer": load_tokenizer(args.source),
        "target_tokenizer": load_tokenizer(args.target),
    }
    if sensitivity is not None:
        power = 1.0 if args.sensitivity_power is None else args.sensitivity_power
        contract = describe_model(pair["target"], pair["target_tokenizer"])
        options["piece_weights"] = piece_weights(sensitivity, contract, power)
    if args.restore is not None:
        first = 0 if args.target_hidden_layer is None else args.target_hidden_layer + 1
        end = len(probe(pair["target"]).layers) if args.resume_layer is None else args.resume_layer
        every = list(range(first, end))
        options["restored_layers"] = every if args.restore == "all" else args.restore
    result = fit(documents, **pair, method=args.method, seed=args.seed, key_metric=args.key_metric, **options)
    if sensitivity is not None:
        result.report["sensitivity"] = {**describe_file(args.sensitivity), "power": power}
    result.report["corpus"] = [describe_file(path) for path in args.text]
    result.report["command"] = command_line(args.argv)
    save_fit(result, args.out, card=render_card(result.translator.config, result.report), overwrite=args.overwrite)
    if eval_documents is not None:  # what goes wrong from here on does not cost the fit
        result.report["evaluation"] = _evaluate(result, pair, eval_documents, args)
        save_fit(result, args.out, card=render_card(result.translator.config, result.report), overwrite=True)
    if args.json is not None:
        save_report(result.report, args.json)
    print(format_fit(result.report, args.out, describe_restored(result.translator.config)))
    return 0


def _evaluate(result, pair: dict[str, Any], documents: Iterable[str], args: argparse.Namespace) -> dict[str, Any]:
    from hf_mot.evaluation import DEFAULT_ARMS, evaluate

    arms = [*DEFAULT_ARMS, "identity", *(["no_source"] if result.no_source is not None else [])]
    if result.translator.config.target_hidden_layer is not None:
        arms.append("target_layers_only")
    report = evaluate(
        result.translator,
        documents,
        **pair,
        no_source=result.no_source,
        arms=arms,
        context_length=args.eval_context,
        limit=args.eval_limit,
        seed=args.seed,
    )
    del report["documents"]  # the figures of each document are of no use in a card
    return {**report, "corpus": [describe_file(path) for path in args.eval_text]}


def describe_file(path: str) -> dict[str, str]:
    """A text file as the fit report names it: without its folder, but so that it can be told from any other."""
    with open(path, "rb") as file:
        return {"name": os.path.basename(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def format_fit(report: dict[str, Any], out: str, notes: Iterable[str] = ()) -> str:
    """A few lines on what was fitted, and what to do with it."""
    layers = ", ".join(map(str, report["source_layers"]))
    counts = ", ".join(f"{report[key]:,} {key}" for key in ("tokens", "windows", "documents"))
    lines = [
        f"{report['method']}, rank {report['rank'] or 'full'}, source layers {layers}",
        *_hidden_lines(report),
        *notes,
        *_rank_lines(report),
        *_norm_lines(report),
        *_metric_lines(report),
        f"fitted on {counts}; ridge {report['ridge']:g}, seed {report['seed']}, {report['seconds']['total']:.0f} s",
    ]
    if "evaluation" in report:
        from hf_mot.cli.evaluate_lines import format_report

        lines += ["", format_report(report["evaluation"]), ""]
    lines.append(f"written to {out}: the translator, its model card and, in no_source, its twin without source")
    if "evaluation" not in report:
        lines.append(f"measure it on other text: hf-mot evaluate {out} --text FILE…")
    return "\n".join(lines)


def _hidden_lines(report: dict[str, Any]) -> list[str]:
    layer_idx, resumed = report.get("target_hidden_layer"), report.get("resume_layer")
    if resumed is not None:
        return [
            f"gives layers 0 to {resumed - 1} and what goes into layer {resumed}, for the plan resume:{resumed - 1}"
        ]
    if layer_idx is None:
        return []
    return [f"reads what goes into layer {layer_idx} of the target too, for the plan bottom:{layer_idx + 1}"]


def _metric_lines(report: dict[str, Any]) -> list[str]:
    said = []
    if "piece_weights" in report:
        said.append(f"weighted; heaviest: {_highest(report['piece_weights'], '.2g')}")
    if report.get("key_metric") == "query":
        said.append("errors of keys measured by the target's queries")
    return said


def _rank_lines(report: dict[str, Any]) -> list[str]:
    if "piece_ranks" not in report:
        return []
    least, first = min(map(min, report["piece_ranks"])), report.get("target_hidden_layer", -1) + 1
    return [f"channels that a piece reads: {least} at least; most: {_highest(report['piece_ranks'], 'd', first)}"]


def _norm_lines(report: dict[str, Any]) -> list[str]:
    layers = report.get("key_norms", [])
    return [f"keys get the weighted length of the target's own in {len(layers)} of its layers"] if layers else []


def _highest(pieces: list[list[float]], form: str, first_layer: int = 0) -> str:
    """The three highest figures of `[keys, values]` per layer, with their names."""
    named = [
        (value, f"{states} of {layer_idx}")
        for layer_idx, pair in enumerate(pieces, first_layer)
        for value, states in zip(pair, ("keys", "values") if len(pair) == 2 else ("state",), strict=True)
    ]
    return ", ".join(f"{name} ({value:{form}})" for value, name in sorted(named, reverse=True)[:3])


def _count(value: str) -> int:
    found = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)([kM])", value)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a number, or one of thousands or millions (14M), got {value!r}")
    return int(found[1]) if found[1] else round(float(found[2]) * {"k": 1_000, "M": 1_000_000}[found[3]])


def _layers(value: str) -> list[int] | str:
    if value == "all":
        return value
    if re.fullmatch(r"\d+(,\d+)*", value) is None:
        raise argparse.ArgumentTypeError(f"must be layers like 5,11 or all, got {value!r}")
    return [int(layer_idx) for layer_idx in value.split(",")]


def _rank(value: str) -> int | str:
    if value == "full":
        return value
    try:
        return int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or full, got {value!r}") from None


def _check_out(out: str, overwrite: bool) -> None:
    path = Path(out)
    if path.is_dir():
        if any(path.iterdir()) and not overwrite:
            raise ValueError(
                f"`--out` {out} is not empty. Give another folder, or --overwrite to replace what is in it."
            )
        config = path / "config.json"
        if any(path.iterdir()) and not (config.is_file() and '"mot"' in config.read_text(encoding="utf-8")):
            raise ValueError(f"`--out` {out} holds something else than a translator, and is not replaced.")
    elif path.exists():
        raise ValueError(f"`--out` must be a folder, but {out} is a file. Give another name.")
