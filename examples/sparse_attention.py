"""What plan `sparse` saves: attention, replay and guidance, timed in turns on one text of several lengths.

    python examples/sparse_attention.py --source S --target T --text FILE… [--lengths 1024 4096] [--json PATH]

The target's own states take the place of translated ones: what they hold makes no difference to time and memory.
`attention_s` is what the attention of the sparse layers takes, without projections, by either plan (finding keys
and blocks is counted in); `replay_s` the whole replay; `guidance_share` what listening adds to the source's
plain prefill. Bytes are growth above the models.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hf_mot.attention_mot import intercepted_attention
from hf_mot.baselines.states import make_shell
from hf_mot.capture_mot import prefill
from hf_mot.cli import command_line
from hf_mot.contract_mot import describe_model
from hf_mot.data.documents import read_documents
from hf_mot.data.windows import context_text, document_ids
from hf_mot.evaluation.memory import peak_growth
from hf_mot.hub.resolve import load_model, load_tokenizer
from hf_mot.replay_mot import ReplayPlan
from hf_mot.replay_run_mot import replay
from hf_mot.sparse_mot import sparse_attention, sparse_way
from hf_mot.versions import versions


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo/smollm2-135m-instruct")
    parser.add_argument("--target", default="demo/gemma-3-270m")
    parser.add_argument("--text", nargs="+", required=True, help="files, whose documents are put together")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096], help="target tokens of context")
    parser.add_argument("--plan", default="sparse:128")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    plan = ReplayPlan.parse(args.plan)
    models = {side: load_model(getattr(args, side), args.dtype) for side in ("source", "target")}
    tokenizers = {side: load_tokenizer(getattr(args, side)) for side in ("source", "target")}
    report = {
        "command": command_line(sys.argv[1:], ["python", "examples/sparse_attention.py"]),
        "plan": str(plan),
        "way": sparse_way(models["target"]),
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "repeats": args.repeats,
        "lengths": {},
        "versions": versions(),
    }
    documents = "\n\n".join(read_documents(args.text))
    for length in args.lengths:
        report["lengths"][length] = figures = measure(models, tokenizers, documents, length, plan, args.repeats)
        print(f"{length} tokens: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure(
    models: dict[str, Any], tokenizers: dict[str, Any], documents: str, length: int, plan: ReplayPlan, repeats: int
) -> dict[str, float]:
    source, target = models["source"], models["target"]
    contracts = {side: describe_model(models[side], tokenizers[side]) for side in models}
    shell = make_shell(**contracts, source_layers=[0])
    text = context_of(documents, tokenizers["target"], length - len(contracts["target"]["prefix_ids"]))
    cache, ids, mask = shell.read_source([text], source, tokenizers["source"], plan=plan)
    pair = {"target": target, "source_tokenizer": tokenizers["source"], "target_tokenizer": tokenizers["target"]}
    inputs = shell.prepare(cache, ids, source_attention_mask=mask, text=text, **pair)
    guide, geometry = shell.source_guide(plan), shell.target_geometry
    own = prefill(target, inputs.target_ids)
    states = [{idx: getattr(own.layers[idx], name) for idx in range(len(geometry.layers))} for name in STATES]
    sparse_layers = plan.sparse_layers(geometry.windows)
    positions = {idx: inputs.guidance[idx] for idx in sparse_layers}

    def run(chosen: ReplayPlan) -> Any:
        return replay(
            chosen,
            *states,
            target=target,
            contract=contracts["target"],
            position_free=False,
            target_ids=inputs.target_ids,
            target_mask=inputs.target_mask,
            guidance=inputs.guidance,
        )

    works = {
        "source_s": lambda: prefill(source, ids),
        "guided_source_s": lambda: prefill(source, ids, guide=guide),
        "prefill_s": lambda: prefill(target, inputs.target_ids),
        "full_replay_s": lambda: run(plan.unguided),
        "sparse_replay_s": lambda: run(plan),
    }
    rounds = []
    for _ in range(repeats + 1):  # the first one warms up
        seconds = {name: timed(work) for name, work in works.items()}
        seconds["full_attention_s"] = attention_seconds(target, inputs.target_ids, sparse_layers, {})
        seconds["sparse_attention_s"] = attention_seconds(target, inputs.target_ids, sparse_layers, positions)
        rounds.append(seconds)
    figures = {name: statistics.median(seconds[name] for seconds in rounds[1:]) for name in rounds[0]}
    for name, above, below in RATIOS:
        figures[name] = statistics.median(seconds[above] / seconds[below] for seconds in rounds[1:])
    figures["guidance_share"] -= 1
    figures["flops_share"] = plan.target_flops(shell.config, length) / plan.unguided.target_flops(shell.config, length)
    figures |= {"source_tokens": ids.shape[1], "guide_layers": len(guide.layers), "sparse_layers": len(sparse_layers)}
    for name, work in works.items():
        figures[name.removesuffix("_s") + "_peak_bytes"] = peak_growth(work, target.device)
    return figures


STATES = ("keys", "values")
RATIOS = (
    ("attention_ratio", "sparse_attention_s", "full_attention_s"),
    ("replay_ratio", "sparse_replay_s", "full_replay_s"),
    ("guidance_share", "guided_source_s", "source_s"),
)


def context_of(documents: str, tokenizer: Any, length: int) -> str:
    """Text of so many tokens, or of a few more where it would end within a character."""
    ids = document_ids(tokenizer, documents[: 20 * length])
    for end in range(length, len(ids) + 1):
        text = context_text(tokenizer, ids[:end])
        if text is not None:
            return text
    raise ValueError(f"`text` holds {len(ids)} tokens, fewer than the {length} of `lengths`. Give more.")


def clock() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], Any]) -> float:
    started = clock()
    work()
    return clock() - started


def attention_seconds(model: Any, ids: torch.Tensor, layers: list[int], positions: dict[int, torch.Tensor]) -> float:
    """What the attention of some layers takes in a prefill, where they are sparse or, without positions, are not."""
    total = 0.0

    def time_it(layer_idx, attend, *args, **options):
        nonlocal total
        started = clock()
        result = attend(*args, **options)
        total += (clock() - started) * (layer_idx in layers)
        return result

    with ExitStack() as stack:
        started = clock()
        stack.enter_context(sparse_attention(model, positions))
        total += clock() - started
        stack.enter_context(intercepted_attention(model, time_it))
        prefill(model, ids)
    return total


if __name__ == "__main__":
    main()
