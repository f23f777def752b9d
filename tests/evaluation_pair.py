"""A tiny pair with translator, twin and questions, for the tests of evaluation."""

import json
import random
from dataclasses import replace
from pathlib import Path

import torch
from conftest import WORDS, make_documents, make_model, make_tokenizer

from hf_mot import MoTConfig, MoTModel
from hf_mot.evaluation import context_nll, question_answering
from hf_mot.evaluation.tasks import TASKS, Example

CONTEXT = 24


def contract(model, tokenizer) -> dict:
    return MoTModel.identity(model, tokenizer).config.target


def make_translator(source, source_tokenizer, target, target_tokenizer, source_layers):
    config = MoTConfig(
        source=contract(source, source_tokenizer),
        target=contract(target, target_tokenizer),
        source_layers=source_layers,
        rank=12,
        embedding_window=2,
    )
    translator = MoTModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in translator.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return translator


def make_pair(source: str = "llama", target: str = "gemma3") -> dict:
    """Arguments of `evaluate`; by default for a target with windows shorter than a context."""
    source_tokenizer, target_tokenizer = make_tokenizer(bos="<s>", adds_bos=False), make_tokenizer(merges=40)
    source, target = make_model(source, source_tokenizer), make_model(target, target_tokenizer, seed=1)
    both = (source, source_tokenizer, target, target_tokenizer)
    return {
        "translator": make_translator(*both, source_layers=[0, 2]),
        "no_source": make_translator(*both, source_layers=[]),
        "source": source,
        "source_tokenizer": source_tokenizer,
        "target": target,
        "target_tokenizer": target_tokenizer,
        "context_length": CONTEXT,
        "cost": False,
        "progress": False,
    }


def make_examples(count: int, closed: bool = False, seed: int = 0) -> list[Example]:
    """Contexts, questions and answers of unequal length."""
    draw = random.Random(seed)
    contexts = make_documents(count, words=20, seed=seed)
    found = []
    for index, context in enumerate(contexts):
        context = context[: draw.randint(30, 80)]
        question = " ".join(draw.choices(WORDS, k=draw.randint(2, 6)))
        answers, choices = (context[:9].strip(), context[10:14]), None
        if closed:
            choices = ("yes", "no", "perhaps")[: 2 + index % 2]
            answers = (draw.choice(choices),)
        found.append(Example(f"task/{'odd' if index % 2 else 'even'}/{index}", context, question, answers, choices))
    return found


def write_examples(folder: Path, task: str, examples: list[Example]) -> None:
    (folder / task).mkdir(parents=True)
    rows = [
        {
            "id": example.id,
            "context": example.context,
            "question": example.question,
            "answers": list(example.answers),
            "choices": None if example.choices is None else list(example.choices),
            "task": task,
        }
        for example in examples
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / task / "dev.jsonl").write_text(lines, encoding="utf-8")


class Killed(BaseException):
    """A run that is killed while it scores."""


def answer_shortly(monkeypatch) -> None:
    """Answers of SQuAD have 4 tokens at most, to save time."""
    monkeypatch.setitem(TASKS, "squad", replace(TASKS["squad"], max_new_tokens=4))


def watch_scores(monkeypatch) -> dict:
    """In `done` (arm, number of the item) of every score of a question, and `("nll", None)` of every one of a window;
    `kill_after` is how many of them there may be before the run is killed."""
    calls = {"done": [], "kill_after": None}
    original, nll = question_answering.Scorer.__call__, context_nll.continuation_nll

    def check():
        if calls["kill_after"] is not None and len(calls["done"]) >= calls["kill_after"]:
            raise Killed

    def score(self, arm, batch, rows):
        check()
        calls["done"] += [(arm, row) for row in rows]
        return original(self, arm, batch, rows)

    def losses(target, cache, ids):
        check()
        calls["done"] += [("nll", None)] * len(ids)
        return nll(target, cache, ids)

    monkeypatch.setattr(question_answering.Scorer, "__call__", score)
    monkeypatch.setattr(context_nll, "continuation_nll", losses)
    return calls
