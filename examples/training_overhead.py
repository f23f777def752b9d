"""What a training step costs: seconds, memory, and the time beyond the models' own forward and backward passes.

python examples/training_overhead.py --source S --target T --text FILE… [--steps 20] [--json PATH] [recipe]
python examples/training_overhead.py … --states DIR --losses cc
python examples/training_overhead.py … --preset paper

Timed are the forward passes of both language models and of the translator, and the backward pass, which runs through
all three; the rest of a step (text to batch, alignment, positions, losses, optimizer) is the overhead. The clock reads
after the accelerator has finished, where there is one. Memory is that of the process, or of the GPU: how far it grows
in training above the loaded models, and where it peaks. `--states` also times steps from captured states (of
`hf-mot capture`, with the same lengths) in place of text and source. `recipe` are arguments of MoTTrainingArguments.
"""

import argparse
import inspect
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager

import psutil  # comes with accelerate
import torch
from transformers import HfArgumentParser, TrainerCallback

from hf_mot.cli import command_line
from hf_mot.configuration_mot import PAPER
from hf_mot.data.states import StatesDataset
from hf_mot.hub.resolve import load_model, load_tokenizer
from hf_mot.training import MoTTrainer, MoTTrainingArguments, TextDataset, TextFiles
from hf_mot.training.start import new_translator, pair_contracts
from hf_mot.versions import versions


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Timer(TrainerCallback):
    """Seconds of each step, and of each kind of pass within it."""

    def __init__(self):
        self.steps, self.passes, self.inner, self.started = [], [], Counter(), 0.0

    def on_step_begin(self, *args, **kwargs):
        if self.started:  # the time from step to step holds the making of batches too
            self.steps.append(clock() - self.started)
            self.passes.append(self.inner)
        self.started, self.inner = clock(), Counter()

    @contextmanager
    def timed(self, kind: str):
        started = clock()
        try:
            yield
        finally:  # the source's pass ends with an exception, after the last layer that is read
            self.inner[kind] += clock() - started

    def wrap(self, kind: str, holder, name: str = "forward") -> None:
        """Times a method. No timed call runs within another."""
        method = getattr(holder, name)

        def timed_method(*args, **kwargs):
            with self.timed(kind):
                return method(*args, **kwargs)

        timed_method.__signature__ = inspect.signature(method)  # from which capabilities are read
        setattr(holder, name, timed_method)


class Memory:
    """Bytes that are in use at the start, and at most, until it is left: on the GPU, else of the process."""

    def __enter__(self):
        self.start = self.peak = self.now()
        self.left = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *args):
        self.left.set()
        self.thread.join()

    def watch(self):
        while not self.left.wait(0.02):  # what lives longer is seen
            self.peak = max(self.peak, self.now())

    @staticmethod
    def now() -> int:
        return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--states")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=1024, help="of the low-rank translator that is trained by default")
    parser.add_argument("--preset", choices=["paper"], help="train the literal Mixture-of-Translators instead")
    parser.add_argument("--json")
    options, recipe = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe += ["--output_dir", folder, "--max_steps", str(options.steps + 2), "--save_strategy", "no"]
        args = HfArgumentParser(MoTTrainingArguments).parse_args_into_dataclasses(recipe)[0]
        report = measure(options, args)
    print(f"{report['overhead']:.1%} of a step of {report['step_s']:.3f} s is none of the models' own passes")
    print(
        f"100 steps take {100 * report['step_s'] / 60:.1f} minutes; memory grows by "
        f"{report['memory_growth_bytes'] / 2**30:.2f} GiB to {report['memory_peak_bytes'] / 2**30:.2f} GiB"
    )
    if "states" in report:
        states = report["states"]
        print(f"from captured states a step takes {states['step_s']:.3f} s: {states['speedup']:.1f} times faster")
    if options.json is not None:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


def measure(options: argparse.Namespace, args: MoTTrainingArguments) -> dict:
    pair = {side: load_model(getattr(options, side)) for side in ("source", "target")}
    pair |= {f"{side}_tokenizer": load_tokenizer(getattr(options, side)) for side in ("source", "target")}
    captured = None if options.states is None else StatesDataset(options.states)
    if options.preset is None:
        layers = {} if captured is None else {"source_layers": captured.source_layers}
        model = new_translator(pair_contracts(**pair), trunk=True, rank=options.rank, **layers)
    else:
        model = new_translator(pair_contracts(**pair), channel_ratio=0.3, **PAPER)
    text = TextDataset.from_args(TextFiles(options.text, options.lines), pair["target_tokenizer"], args)
    timer = Timer()
    trainer = MoTTrainer(model, args, train_dataset=text, callbacks=[timer], **pair)
    timer.wrap("translator", model)
    timer.wrap("source", pair["source"].get_decoder())
    timer.wrap("target", pair["target"].get_decoder())
    timer.wrap("head", pair["target"].get_output_embeddings())
    timer.wrap("backward", trainer.accelerator, "backward")
    with Memory() as memory:
        trainer.train()
    # The first step also measures the scale of the target's states.
    passes = timer.passes[1:]
    shares = [1 - inner.total() / step for step, inner in zip(timer.steps[1:], passes, strict=True)]
    report = {
        "overhead": statistics.median(shares),
        "overhead_range": [min(shares), max(shares)],
        "step_s": statistics.median(timer.steps[1:]),
        "step_s_range": [min(timer.steps[1:]), max(timer.steps[1:])],
        "passes_s": {kind: statistics.median(inner[kind] for inner in passes) for kind in passes[0]},
        "memory_growth_bytes": memory.peak - memory.start,
        "memory_peak_bytes": memory.peak,
        "steps": len(shares),
        "sequences": args.train_batch_size * args.gradient_accumulation_steps,
        "length": args.length,
        "context_length": args.context_length,
        "losses": args.losses,
        "vocabulary_size": args.vocabulary_size,
        "preset": options.preset,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "replay": str(trainer.comparison.plan),
        "source": trainer.translator.config.source["id"],
        "target": trainer.translator.config.target["id"],
        "threads": torch.get_num_threads(),
        "device": str(args.device),
        "command": command_line(sys.argv[1:], ["python", "examples/training_overhead.py"]),
        "versions": versions(),
    }
    if captured is not None:
        states = StatesDataset(options.states, model.config)
        target = {name: part for name, part in pair.items() if name.startswith("target")}
        timer = Timer()
        MoTTrainer(model, args, train_dataset=states, callbacks=[timer], **target).train()
        step_s = statistics.median(timer.steps[1:])
        report["states"] = {"step_s": step_s, "speedup": report["step_s"] / step_s, "examples": len(states)}
    return report


if __name__ == "__main__":
    main()
