"""`hf-mot capture`: keeps what training reads of two models, so that it need not run them at every step."""

import argparse
import re

from hf_mot.cli import check_output_file, check_output_folder, command_line

HELP = "run two models over text once, and keep their states for training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", required=True, help="the model that reads: Hub id, folder, GGUF file or demo name")
    parser.add_argument("--target", required=True, help="the model that answers, likewise")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="text to read, gzipped or not")
    parser.add_argument("--lines", action="store_true", help="one document a line")
    parser.add_argument(
        "--source-layers", nargs="+", type=int, required=True, metavar="L", help="source layers to keep"
    )
    parser.add_argument("--target-layers", nargs="+", type=int, metavar="L", help="of the target's, these [all]")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder to write to; the same command goes on where it stopped"
    )
    parser.add_argument("--max-bytes", type=_bytes, default="20GB", metavar="N", help="size at most, e.g. 2GB [20GB]")
    parser.add_argument("--examples", type=int, metavar="N", help="examples at most [all]")
    parser.add_argument("--length", type=int, default=128, metavar="N", help="tokens of the longest example [128]")
    parser.add_argument(
        "--context", nargs="+", type=int, default=[64], metavar="C", help="tokens of context, or least and most [64]"
    )
    parser.add_argument(
        "--copy-share", type=float, default=0.0, metavar="P", help="share of prompts that copy from the context [0]"
    )
    parser.add_argument(
        "--top-logits",
        type=_top_logits,
        default=64,
        metavar="K",
        help="likeliest tokens to keep of each prediction; hidden: last hidden states instead; 0: neither [64]",
    )
    parser.add_argument("--state-dtype", default="bfloat16", help="dtype on disk, bfloat16 or float32 [bfloat16]")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="examples run at once [8]")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of order, lengths and copies [0]")
    parser.add_argument("--dtype", default="float32", help="dtype of both models, e.g. bfloat16 [float32]")
    parser.add_argument("--json", metavar="PATH", help="also write the figures to this file")


def run(args: argparse.Namespace) -> int:
    check_output_file(args.json, "--json")
    check_output_folder(args.out, "--out")
    if len(args.context) > 2:
        raise ValueError(f"`--context` takes a number, or the least and the most, got {args.context}.")
    if args.examples is not None and args.examples < 1:
        raise ValueError(f"`--examples` must be 1 or more, got {args.examples}.")

    import itertools
    import time
    from collections import Counter

    from hf_mot import MoTConfig
    from hf_mot.data.capture import capture_states
    from hf_mot.data.documents import read_documents
    from hf_mot.evaluation import save_report
    from hf_mot.hub.resolve import load_model, load_tokenizer
    from hf_mot.training.examples import iterate_examples
    from hf_mot.training.start import pair_contracts
    from hf_mot.versions import versions

    documents = read_documents(args.text, lines=args.lines)
    pair = {
        "source": load_model(args.source, dtype=args.dtype),
        "target": load_model(args.target, dtype=args.dtype),
        "source_tokenizer": load_tokenizer(args.source),
        "target_tokenizer": load_tokenizer(args.target),
    }
    contracts = pair_contracts(**pair)
    depth = len(contracts["source"]["geometry"]["layers"])
    source_layers = sorted(set(args.source_layers))
    if not set(source_layers) <= set(range(depth)):
        raise ValueError(f"`--source-layers` must lie in 0..{depth - 1}, got {args.source_layers}.")
    counts: Counter = Counter()
    examples = iterate_examples(
        documents,
        pair["target_tokenizer"],
        prefix_ids=contracts["target"]["prefix_ids"],
        length=args.length,
        context_length=tuple(args.context) if len(args.context) == 2 else args.context[0],
        seed=args.seed,
        copy_share=args.copy_share,
        counts=counts,
    )
    started = time.perf_counter()
    index = capture_states(
        itertools.islice(examples, args.examples),
        MoTConfig(**contracts, source_layers=source_layers),
        **pair,
        folder=args.out,
        target_layers=args.target_layers,
        dtype=args.state_dtype,
        top_logits=args.top_logits,
        max_bytes=args.max_bytes,
        batch_size=args.batch_size,
    )
    names = ("bytes", "examples", "context_tokens", "prompt_tokens")
    figures = {name: sum(shard[name] for shard in index["shards"]) for name in names}
    if args.json is not None:
        report = {
            **figures,
            "complete": index["complete"],
            "settings": index["settings"],
            "documents": dict(counts),
            "seed": args.seed,
            "seconds": round(time.perf_counter() - started, 2),
            "command": command_line(args.argv),
            "versions": versions(),
        }
        save_report(report, args.json)
    end = "" if index["complete"] else "; stopped at --max-bytes"
    print(f"{args.out}: {figures['examples']:,} examples, {figures['bytes'] / 1e9:.2f} GB{end}")
    print(f"{figures['context_tokens']:,} tokens of context, {figures['prompt_tokens']:,} of prompt")
    return 0


def _bytes(value: str) -> int:
    found = re.fullmatch(r"([\d.]+)\s*([kMGT]?)B?", value)
    try:
        return int(float(found[1]) * 1000 ** " kMGT".index(found[2] or " "))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"must be a number of bytes, e.g. 20GB, got {value!r}") from None


def _top_logits(value: str) -> int | None:
    if value == "hidden":
        return None
    try:
        return int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or hidden, got {value!r}") from None
