"""What an evaluation costs beside its models: the share of `evaluate`'s time that is spent outside the forward passes
and `generate` of source, target and translator. Tokenisation, alignment, positions, scoring, bootstrap and files are
what is left.

    python examples/harness_overhead.py TRANSLATOR --text valid/*.txt.gz --data data --tasks squad --json OUT
"""

import argparse
import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from hf_mot.cli import command_line, load_pair
from hf_mot.compat_mot import decoder_of
from hf_mot.data.documents import read_documents
from hf_mot.evaluation import DEFAULT_ARMS, evaluate, load_examples, save_report
from hf_mot.hub.resolve import load_translator
from hf_mot.versions import versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("translator", help="folder or Hub id")
    parser.add_argument("--source", help="source model [the translator's own]")
    parser.add_argument("--target", help="target model [the translator's own]")
    parser.add_argument("--text", nargs="+", help="documents, for context-NLL")
    parser.add_argument("--data", help="folder of the tasks' folders")
    parser.add_argument("--tasks", default="", help="tasks, e.g. squad,boolq")
    parser.add_argument("--arms", default=",".join(DEFAULT_ARMS))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--limit", type=int, help="documents, and questions a task")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dtype", default="float32", help="dtype of both models")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()

    translator = load_translator(args.translator)
    pair = load_pair(args, translator)
    documents = list(read_documents(args.text)) if args.text else None
    tasks = {name: load_examples(args.data, name) for name in args.tasks.split(",") if name}

    clock = Clock()
    modules = {name: pair[name] for name in ("source", "target") if pair[name] is not None}
    modules["translator"] = translator
    with tempfile.TemporaryDirectory() as folder, clock.on(modules):
        start = time.perf_counter()
        report = evaluate(
            translator,
            documents,
            **pair,
            tasks=tasks,
            arms=args.arms.split(","),
            context_length=args.context,
            limit=args.limit,
            batch_size=args.batch_size,
            results=Path(folder) / "examples.jsonl",
            cost=False,
            progress=False,
        )
        wall = time.perf_counter() - start
    inside = sum(clock.seconds.values())
    counts = {"context_nll": report["n"]} if "n" in report else {}
    result = {
        "command": command_line(sys.argv[1:], ["python", "examples/harness_overhead.py"]),
        "n": counts | {name: task["n"] for name, task in report.get("tasks", {}).items()},
        "wall_s": wall,
        "model_s": clock.seconds,
        "harness_share": 1 - inside / wall,
        "harness_over_models": wall / inside - 1,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    save_report(result, args.json)
    own = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in clock.seconds.items())
    print(f"{wall:.1f} s, of which {own}")
    print(f"outside the models: {result['harness_share']:.1%} of all, {result['harness_over_models']:.1%} of theirs")


class Clock:
    """Seconds that each model runs, in forward passes and in `generate`; of nested calls the outermost counts."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.depth, self.started = 0, 0.0

    def start(self) -> None:
        if self.depth == 0:
            self.started = time.perf_counter()
        self.depth += 1

    def stop(self, name: str) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.seconds[name] += time.perf_counter() - self.started

    @contextlib.contextmanager
    def on(self, models: dict[str, PreTrainedModel]) -> Iterator[None]:
        """Runs while open, on models by their names."""
        self.seconds |= dict.fromkeys(models, 0.0)
        names = {id(model): name for name, model in models.items()}
        with contextlib.ExitStack() as stack:
            for name, model in models.items():
                answers = model.can_generate()
                # A prefill calls the decoder alone, without the model around it.
                for module in {model, decoder_of(model)} if answers else {model}:
                    before = module.register_forward_pre_hook(lambda *args: self.start())
                    after = module.register_forward_hook(lambda *args, name=name: self.stop(name), always_call=True)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
                if answers:  # on the class, whose method hf_mot's own hook calls
                    timed = self._timed(type(model).generate, names)
                    stack.enter_context(patch.object(type(model), "generate", timed))
            yield

    def _timed(self, generate: Callable, names: dict[int, str]) -> Callable:
        @functools.wraps(generate)
        def timed(model, *args, **kwargs):
            self.start()
            try:
                return generate(model, *args, **kwargs)
            finally:
                self.stop(names[id(model)])

        return timed


if __name__ == "__main__":
    main()
