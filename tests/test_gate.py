"""The gate on a pair for which the context matters and a translation can be exact: a model and itself."""

import copy
import json

import pytest
import torch
from conftest import make_documents, make_model, make_tokenizer
from torch import nn

from hf_mot.evaluation import evaluate
from hf_mot.evaluation.gate import MIN_DOCUMENTS, Gate, judge
from hf_mot.evaluation.overlap import shared_runs
from hf_mot.fit import fit

CONTEXT = 32


def written_by(model, tokenizer, count):
    """Documents that the model itself would write: what it has read makes what follows likelier."""
    letters = set(tokenizer("abcdefghij klmnopqrst", add_special_tokens=False)["input_ids"])
    torch.manual_seed(0)
    bos = torch.full((count, 1), tokenizer.bos_token_id)
    ids = model.generate(
        input_ids=bos,
        attention_mask=torch.ones_like(bos),
        do_sample=True,
        top_k=0,
        max_new_tokens=CONTEXT + 65,
        suppress_tokens=[token for token in range(len(tokenizer)) if token not in letters],
        pad_token_id=tokenizer.pad_token_id,
    )
    return [tokenizer.decode(row, skip_special_tokens=True) for row in ids]


@pytest.fixture(scope="module")
def setting():
    tokenizer = make_tokenizer()
    model = make_model("llama", tokenizer)
    pair = {"source": model, "target": model, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    fitted = fit(
        [*written_by(model, tokenizer, 40), *make_documents(40)],
        **pair,
        source_layers=[0, 1, 2],
        rank=None,
        embedding_window=2,
        held_out_documents=4,
        progress=False,
    )
    return {
        **pair,
        "translator": fitted.translator,
        "no_source": fitted.no_source,
        "documents": written_by(model, tokenizer, 48)[40:] + written_by(model, tokenizer, 40)[:24],
        "context_length": CONTEXT,
        "gate": Gate(),
        "cost": False,
        "progress": False,
        "batch_size": 16,
    }


class Fixed(nn.Module):
    """States of one document, whatever is read."""

    def __init__(self, states):
        super().__init__()
        self.states = states

    def forward(self, source_states, embeddings, attention_mask=None, start=0, target_hidden_states=None):
        rows, length = embeddings.shape[:2]
        return self.states[:, :length, start:].expand(rows, -1, -1)


def verdict(setting, translator):
    return evaluate(**{**setting, "translator": translator})["gate"]


def test_exact_translation_passes(setting):
    report = evaluate(**setting)
    assert report["gate"]["passed"], report["gate"]["reasons"]
    assert report["recovery"]["value"] > 0.9
    assert {"wrong_document", "wrong_source", "no_source"} <= set(report["better_by"])


def test_translator_that_ignores_its_source_is_caught(setting):
    fake, twin = copy.deepcopy(setting["translator"]), setting["no_source"].translator
    with torch.no_grad():
        fake.translator.source_in.weight.zero_()
        fake.translator.embedding_in.weight.copy_(twin.embedding_in.weight)
        fake.translator.bias.copy_(twin.bias)
    gate = verdict(setting, fake)
    assert not gate["passed"]
    assert any("not clearly better than wrong_source" in reason for reason in gate["reasons"])
    assert any("not clearly better than no_source" in reason for reason in gate["reasons"])


def test_translator_that_copies_the_mean_is_caught(setting):
    fake = copy.deepcopy(setting["translator"])
    with torch.no_grad():
        fake.translator.source_in.weight.zero_()
        fake.translator.embedding_in.weight.zero_()
    gate = verdict(setting, fake)
    assert not gate["passed"]
    for control in ("wrong_document", "wrong_source"):
        assert any(f"not clearly better than {control}" in reason for reason in gate["reasons"])


def test_translator_whose_output_is_always_one_document_is_caught(setting):
    fake = copy.deepcopy(setting["translator"])
    geometry = fake.target_geometry
    width = sum(layer.width for layer in geometry.layers)
    fake.translator = Fixed(torch.randn(1, CONTEXT, width, generator=torch.Generator().manual_seed(0)))
    gate = verdict(setting, fake)
    assert not gate["passed"]
    assert any("not clearly better than wrong_document" in reason for reason in gate["reasons"])


def clear(value=1.0):
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def report_with(**changes):
    better = {control: clear() for control in ("wrong_document", "wrong_source", "no_source")}
    return {"arms": {}, "n": 40, "better_by": better, "recovery": clear(0.6), **changes}


def test_each_condition_can_say_no():
    assert judge(report_with(), Gate())["passed"]
    assert judge(report_with(), Gate())["judged_on"] == ["context_nll"]
    assert not judge(report_with(recovery=clear(0.49)), Gate())["passed"]
    assert judge(report_with(recovery=clear(0.49)), Gate(recovery=0.4))["passed"]
    assert not judge(report_with(), Gate(margin=0.95))["passed"]  # the interval's low end is 0.9
    for control in ("wrong_document", "wrong_source", "no_source"):
        report = report_with()
        report["better_by"] = {**report["better_by"], control: {"value": 0.5, "low": -0.01, "high": 1.0}}
        assert f"translated is not clearly better than {control}" in judge(report, Gate())["reasons"][0]
        del report["better_by"][control]
        report["missing"] = {"context_nll": {control: "RuntimeError: broken"}}
        assert judge(report, Gate())["reasons"] == [f"context_nll: {control} was not measured (RuntimeError: broken)"]


def test_only_tasks_that_count_are_judged():
    task = {"counts": True, "n": 40, "answer_nll": report_with(recovery=clear(0.2))}
    assert judge(report_with(tasks={"squad": task}), Gate())["reasons"] == ["squad: the recovery is 0.200, needs 0.5"]
    assert judge(report_with(tasks={"squad": {**task, "counts": False}}), Gate())["passed"]
    alone = judge({"tasks": {"squad": {**task, "counts": False}}}, Gate())
    assert not alone["passed"] and "nothing was measured" in alone["reasons"][0]


@pytest.mark.parametrize(("options", "name"), [({"recovery": 1.2}, "recovery"), ({"margin": -1}, "margin")])
def test_thresholds_are_checked(options, name):
    with pytest.raises(ValueError, match=f"`{name}` of the gate"):
        Gate(**options)


def test_test_text_of_the_fits_corpus_is_named():
    words = [f"word{number}" for number in range(40)]
    corpus = [" ".join(words[:20]), "nothing else"]
    tested = {
        "thirteen": "Before. " + ", ".join(word.upper() for word in words[3:16]) + "! After.",
        "twelve": " ".join(words[3:15]) + " then others",
        "none": "something of its own",
    }
    assert shared_runs(tested, corpus) == ["thirteen"]


def test_evaluate_counts_overlap(setting):
    documents = make_documents(4, words=60)
    report = evaluate(
        **{**setting, "documents": documents, "gate": None, "arms": ["native"]}, fit_corpus=[documents[2]]
    )
    assert report["overlap"] == {
        "run_words": 13,
        "tested": 4,
        "shared": 1,
        "documents": {"context_nll": ["2"]},
    }
    json.dumps(report)


def test_few_documents_are_no_ground_for_a_verdict():
    assert judge(report_with(n=MIN_DOCUMENTS), Gate())["passed"]
    for few in ({"n": MIN_DOCUMENTS - 1}, {"n": 40, "n_documents": 2}):
        reasons = judge(report_with(**few), Gate())["reasons"]
        count = min(few.values())
        assert reasons == [f"context_nll: {count} documents are too few for a verdict, needs {MIN_DOCUMENTS}"]
    task = {"counts": True, "n": 40, "n_documents": 3, "answer_nll": report_with()}
    assert judge({"tasks": {"squad": task}}, Gate())["reasons"][0].startswith("squad: 3 documents are too few")
