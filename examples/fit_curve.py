"""What a closed-form fit's recovery depends on: calibration tokens, source layers, rank, embedding window.

One pass over the text feeds two sets of statistics: a wide one (more source layers, a longer window), from which any
narrower fit can be solved, up to `--wide-tokens`; and that of the chosen setting up to `--tokens`. Every fit is judged
by context-NLL on documents of the same files that were held out. The result file is written anew after each fit.

    python examples/fit_curve.py --text train/*.txt.gz --json model_cards/results/fit_curve.json
"""

import argparse
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path

import torch

from hf_mot.capture_mot import prefill
from hf_mot.cli import command_line
from hf_mot.data.documents import read_documents
from hf_mot.evaluation.answers import continuation_nll
from hf_mot.evaluation.metrics import ratio_of_means
from hf_mot.evaluation.windows import cut_windows
from hf_mot.fit.build import build_translator
from hf_mot.fit.layers import choose_source_layers
from hf_mot.fit.pair import Pair, held_out_rows, split
from hf_mot.fit.solve import choose_ridge, solve
from hf_mot.fit.statistics import Moments, Statistics
from hf_mot.fit.weights import output_blocks
from hf_mot.fit.windows import batched, calibration_windows, characters_per_token
from hf_mot.hub.resolve import load_model, load_tokenizer
from hf_mot.modeling_mot import MoTModel
from hf_mot.versions import versions

LAYERS, WINDOW, RANK = 10, 5, 1024  # the default setting
WIDE_WINDOW = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo/smollm2-135m-instruct")
    parser.add_argument("--target", default="demo/gemma-3-270m")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[25_000, 50_000, 100_000, 200_000, 300_000])
    parser.add_argument("--wide-tokens", type=int, default=50_000)
    parser.add_argument("--documents", type=int, default=48, help="held-out documents that judge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--save", type=Path, help="keep the translator of each number of tokens here")
    args = parser.parse_args()
    torch.set_grad_enabled(False)

    pair = Pair(
        *(load_model(name) for name in (args.source, args.target)),
        *(load_tokenizer(name) for name in (args.source, args.target)),
    )
    # 32 documents choose the ridge strength; of the others set apart, the first long enough judge.
    stream, held_out, _ = split(read_documents(args.text), 32 + 2 * args.documents, args.seed)
    held_out, judges = held_out[:32], held_out[32:]
    windows = calibration_windows(
        stream,
        pair.target_tokenizer,
        characters_per_token(held_out, pair.target_tokenizer),
        4096,
        max(args.tokens),
        random.Random(args.seed),
    )
    sample = list(itertools.takewhile(Budget(8192), windows))
    depth = len(pair.source_geometry.layers)
    greedy = {n: choose_source_layers(pair, batched(sample, 2048), n, WINDOW, args.seed) for n in (5, LAYERS, 15)}
    even = [round(i * (depth - 1) / (LAYERS - 1)) for i in range(LAYERS)]
    wide_layers = sorted({*itertools.chain(*greedy.values()), *even})
    report = {
        "command": command_line(sys.argv[1:], ["python", "examples/fit_curve.py"]),
        "pair": {"source": args.source, "target": args.target},
        "seed": args.seed,
        "n": 0,
        "context_length": 256,
        "layers": {"greedy": greedy, "even": even},
        "fits": [],
        "versions": versions(),
    }

    wide_shell = MoTModel(pair.config(source_layers=wide_layers, rank=1, embedding_window=WIDE_WINDOW))
    judge = Judge(pair, wide_shell, judges, args.documents, args.seed)
    report["n"], report["nll"] = judge.count, judge.references()
    held_x, held_y = held_out_rows(pair, wide_shell, held_out)
    columns = Columns(pair, wide_layers)
    chosen = columns(greedy[LAYERS], WINDOW)
    wide, narrow = (Statistics(output_blocks(pair.target_geometry)) for _ in range(2))

    ridges: dict[tuple, float] = {}

    def record(moments: Moments, layers: list[int], window: int, rank: int | None, name: str) -> MoTModel:
        """`moments` are those of the columns of exactly these layers and this window."""
        started = time.perf_counter()
        own = columns(layers, window)
        key = (moments.count, tuple(layers), window)  # the ridge strength does not depend on the rank
        if key not in ridges:
            ridges[key] = choose_ridge(moments, held_x[:, own], held_y, args.seed)[0]
        ridge = ridges[key]
        config = pair.config(source_layers=layers, rank=rank, embedding_window=window)
        translator = build_translator(config, solve(moments, ridge, rank, args.seed))
        seconds = time.perf_counter() - started
        entry = {
            "name": name,
            "tokens": moments.count,
            "source_layers": layers,
            "embedding_window": window,
            "rank": rank,
            "ridge": ridge,
            "solve_seconds": round(seconds, 1),
            **judge(translator, own),
        }
        report["fits"].append(entry)
        temporary = args.json.with_suffix(".partial")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(temporary, args.json)
        print({key: value for key, value in entry.items() if key != "source_layers"}, flush=True)
        return translator

    def record_wide() -> None:
        moments = wide.moments()
        base = greedy[LAYERS]
        variants = [
            (base, WINDOW, RANK),
            (base, WINDOW, 256),
            (base, WINDOW, 512),
            (base, WINDOW, 1536),
            (base, WINDOW, None),
            (even, WINDOW, RANK),
            (greedy[5], WINDOW, RANK),
            (greedy[15], WINDOW, RANK),
            (base, 1, RANK),
            (base, 3, RANK),
            (base, WIDE_WINDOW, RANK),
            ([], WINDOW, RANK),
        ]
        for layers, window, rank in variants:
            record(moments.select(columns(layers, window)), layers, window, rank, "setting")

    pending, count = sorted(args.tokens), 0
    for batch in batched(itertools.chain(sample, windows), 2048):
        x, y = pair.rows(wide_shell, [window.text for window in batch])
        if wide is not None:
            wide.add(x, y)
            if count + len(x) >= args.wide_tokens:
                record_wide()
                wide = None
        narrow.add(x[:, chosen], y)
        count += len(x)
        print(count, round(pair.seconds["forward"]), flush=True)
        if pending and count >= pending[0]:
            translator = record(narrow.moments(), greedy[LAYERS], WINDOW, RANK, "tokens")
            if args.save:
                translator.save_pretrained(args.save / str(pending[0]))
            pending.pop(0)
    if wide is not None:  # the text has ended
        record_wide()
    if pending:
        record(narrow.moments(), greedy[LAYERS], WINDOW, RANK, "tokens")


class Budget:
    """True until windows of so many tokens have passed."""

    def __init__(self, tokens: int):
        self.left = tokens

    def __call__(self, window) -> bool:
        self.left -= window.tokens
        return self.left > 0


class Columns:
    """Which columns of the wide features belong to some source layers and an embedding window."""

    def __init__(self, pair: Pair, wide_layers: list[int]):
        widths = [pair.source_geometry.layers[layer_idx].width for layer_idx in wide_layers]
        starts = [0, *itertools.accumulate(widths)]
        self.spans = {layer: range(starts[i], starts[i + 1]) for i, layer in enumerate(wide_layers)}
        self.source_dim, self.embedding_dim = starts[-1], pair.target_geometry.embedding_dim

    def __call__(self, layers: list[int], window: int) -> torch.Tensor:
        embeddings = range(self.source_dim, self.source_dim + window * self.embedding_dim)
        return torch.tensor([*itertools.chain(*(self.spans[layer] for layer in layers)), *embeddings])


class Judge:
    """Context-NLL at C = 256 of many translators on the same documents; what they share is computed once."""

    def __init__(self, pair: Pair, shell: MoTModel, documents: list[str], limit: int, seed: int):
        self.pair, self.shell = pair, shell
        prefix = pair.target_contract["prefix_ids"]
        self.windows = cut_windows(
            documents, pair.target_tokenizer, prefix_ids=prefix, context_length=256, limit=limit, seed=seed
        ).windows
        self.count = len(self.windows)

    def references(self) -> dict[str, float]:
        native, none = [], []
        prefix = torch.tensor([self.pair.target_contract["prefix_ids"]])
        for window in self.windows:
            ids = torch.tensor([window.continuation_ids])
            native.append(
                continuation_nll(self.pair.target, prefill(self.pair.target, torch.tensor([window.context_ids])), ids)
            )
            none.append(continuation_nll(self.pair.target, prefill(self.pair.target, prefix), ids))
        self.native, self.none = torch.cat(native), torch.cat(none)
        return {"native": self.native.mean().item(), "no_context": self.none.mean().item()}

    def __call__(self, translator: MoTModel, columns: torch.Tensor) -> dict:
        nll = []
        for window in self.windows:
            cache, ids, mask = self.shell.read_source([window.text], self.pair.source, self.pair.source_tokenizer)
            inputs = self.shell.prepare(
                cache,
                ids,
                source_attention_mask=mask,
                source_tokenizer=self.pair.source_tokenizer,
                target=self.pair.target,
                target_tokenizer=self.pair.target_tokenizer,
                text=[window.text],
                target_input_ids=torch.tensor([window.context_ids]),
            )
            x = torch.cat([inputs.source_states, inputs.embeddings], -1)[..., columns]
            source_dim = x.shape[-1] - translator.config.embedding_window * self.pair.target_geometry.embedding_dim
            translated = translator.assemble(
                translator(x[..., :source_dim], x[..., source_dim:]), inputs, self.pair.target
            )
            nll.append(continuation_nll(self.pair.target, translated.fork(), torch.tensor([window.continuation_ids])))
        nll = torch.cat(nll)
        return {"nll": nll.mean().item(), "recovery": ratio_of_means(self.none - nll, self.none - self.native)}


if __name__ == "__main__":
    main()
