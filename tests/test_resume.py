"""Results of each example are kept as they come: what is there is never scored again, nor mixed with others."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import make_documents
from evaluation_pair import Killed, answer_shortly, make_examples, make_pair, watch_scores

from hf_mot import MoTConfig, MoTModel
from hf_mot.evaluation import context_nll, describe, evaluate, run
from hf_mot.evaluation.store import ResultStore
from hf_mot.evaluation.tasks import TASKS

ARMS = ["native", "no_context", "translated", "wrong_document"]


@pytest.fixture(scope="module")
def pair():
    return {**make_pair(), "arms": ARMS, "batch_size": 2}


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    answer_shortly(monkeypatch)


@pytest.fixture
def scored(monkeypatch):
    return watch_scores(monkeypatch)


def test_killed_run_goes_on_where_it_stopped(pair, scored, tmp_path):
    tasks, documents = {"squad": make_examples(5)}, make_documents(3)
    whole = evaluate(documents=documents, tasks=tasks, **pair)
    scored["done"].clear()
    file = tmp_path / "out.examples.jsonl"
    for kill_after in (5, 17, 23, None):
        scored["kill_after"] = kill_after
        if kill_after is None:
            resumed = evaluate(documents=documents, tasks=tasks, results=file, **pair)
        else:
            with pytest.raises(Killed):
                evaluate(documents=documents, tasks=tasks, results=file, **pair)
    questions = [call for call in scored["done"] if call[1] is not None]
    assert len(questions) == len(set(questions)) == 5 * 4
    assert resumed == whole
    scored["done"].clear()
    assert evaluate(documents=documents, tasks=tasks, results=file, **pair) == whole
    assert not scored["done"]


def test_half_a_line_is_taken_away(pair, scored, tmp_path):
    tasks, file = {"squad": make_examples(4)}, tmp_path / "results.jsonl"
    whole = evaluate(tasks=tasks, results=file, **pair)
    text = file.read_bytes()
    file.write_bytes(text[:-20])
    scored["done"].clear()
    # One row of a batch is scored anew, alone: processors round that differently.
    assert_close(evaluate(tasks=tasks, results=file, **pair), whole)
    assert len(scored["done"]) == 1
    lines = [
        sorted(map(json.loads, each.splitlines()), key=lambda line: str([line.get("arm"), line.get("id")]))
        for each in (file.read_bytes(), text)
    ]
    assert len(lines[0]) == len(lines[1])
    for found, expected in zip(*lines, strict=True):
        assert_close(found, expected)


def assert_close(found, expected):
    """Equal but for the rounding of floats."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_close(*pair)
    else:
        assert found == (pytest.approx(expected, rel=1e-5, abs=1e-6) if isinstance(expected, float) else expected)


def test_an_arm_can_be_added_later(pair, scored, tmp_path):
    tasks, file = {"squad": make_examples(4)}, tmp_path / "results.jsonl"
    evaluate(tasks=tasks, results=file, **{**pair, "arms": ["native"]})
    scored["done"].clear()
    report = evaluate(tasks=tasks, results=file, **{**pair, "arms": ["native", "no_context"]})
    assert {arm for arm, _ in scored["done"]} == {"no_context"}
    assert {"native", "no_context"} <= report["tasks"]["squad"].keys()


def test_an_arm_that_is_added_later_is_compared_with_native_as_ever(pair, tmp_path):
    documents, file = make_documents(3), tmp_path / "results.jsonl"
    whole = evaluate(documents=documents, **{**pair, "arms": ["native", "no_context", "translated"]})
    evaluate(documents=documents, results=file, **{**pair, "arms": ["native", "no_context"]})
    later = evaluate(documents=documents, results=file, **{**pair, "arms": ["native", "no_context", "translated"]})
    assert "missing" not in later and later["similarity"] == whole["similarity"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "results of squad with seed 0, but this run has 1"),
        ({"limit": 2}, "results of squad with items"),
    ],
)
def test_results_of_other_settings_are_not_mixed_in(pair, tmp_path, change, message):
    file = tmp_path / "results.jsonl"
    evaluate(tasks={"squad": make_examples(3)}, results=file, **pair)
    with pytest.raises(ValueError, match=message):
        evaluate(tasks={"squad": make_examples(3)}, results=file, **{**pair, **change})


def test_results_of_another_task_version_are_not_mixed_in(pair, tmp_path, monkeypatch):
    file = tmp_path / "results.jsonl"
    evaluate(tasks={"squad": make_examples(3)}, results=file, **pair)
    monkeypatch.setitem(TASKS, "squad", replace(TASKS["squad"], version="3"))
    with pytest.raises(ValueError, match="holds results of squad with version '2', but this run has '3'"):
        evaluate(tasks={"squad": make_examples(3)}, results=file, **pair)
    store = ResultStore(file, overwrite=True)
    assert evaluate(tasks={"squad": make_examples(3)}, results=store, **pair)["tasks"]["squad"]["version"] == "3"


def test_another_translator_is_another_fingerprint(pair):
    assert describe.fingerprint(pair["translator"]) == describe.fingerprint(pair["translator"])
    assert describe.fingerprint(pair["translator"]) != describe.fingerprint(pair["no_source"])
    literal = MoTModel(MoTConfig(**pair["translator"].config.to_dict() | {"position_free": False}))
    literal.load_state_dict(pair["translator"].state_dict())  # the same weights, read otherwise
    assert describe.fingerprint(pair["translator"]) != describe.fingerprint(literal)


def test_what_no_translator_plays_a_part_in_can_be_reused(pair, scored, tmp_path):
    tasks, documents = {"squad": make_examples(4)}, make_documents(3)
    first = tmp_path / "first.jsonl"
    evaluate(documents=documents, tasks=tasks, results=first, **pair)
    before = first.read_bytes()
    other = {**pair, "translator": read_otherwise(pair["translator"]), "replay": "full"}
    whole = evaluate(documents=documents, tasks=tasks, **other)
    scored["done"].clear()
    store = ResultStore(tmp_path / "second.jsonl", reuse=first)
    report = evaluate(documents=documents, tasks=tasks, results=store, **other)
    assert report == whole
    assert {arm for arm, row in scored["done"] if row is not None} == {"translated", "wrong_document"}
    assert first.read_bytes() == before


def read_otherwise(translator):
    """Another translator of the same pair."""
    other = MoTModel(MoTConfig(**translator.config.to_dict() | {"position_free": False}))
    other.load_state_dict(translator.state_dict())
    return other.eval()


def test_only_results_of_the_same_pair_and_questions_are_reused(pair, tmp_path, monkeypatch):
    file = tmp_path / "results.jsonl"
    evaluate(tasks={"squad": make_examples(3)}, results=file, **pair)
    identity = MoTModel.identity(pair["target"], pair["target_tokenizer"])
    assert describe.pair_fingerprint(pair["translator"]) == describe.pair_fingerprint(pair["no_source"])
    with monkeypatch.context() as patch:
        other = describe.pair_fingerprint(identity)
        patch.setattr(run, "pair_fingerprint", lambda translator: other)
        with pytest.raises(ValueError, match=r"results\.jsonl holds results of squad with pair"):
            evaluate(tasks={"squad": make_examples(3)}, results=ResultStore(reuse=file), **pair)
    with pytest.raises(ValueError, match="results of squad with items"):
        evaluate(tasks={"squad": make_examples(4)}, results=ResultStore(reuse=file), **pair)
    with pytest.raises(ValueError, match=r"`reuse` must name a file of results.*absent"):
        ResultStore(reuse=tmp_path / "absent.jsonl")


def test_file_of_something_else_is_not_touched(tmp_path):
    file = tmp_path / "notes.jsonl"
    file.write_text('{"part": "squad", "settings": {}}\n{"name": "Ada"}\n')
    with pytest.raises(ValueError, match=r"notes\.jsonl, line 2, is no result of an evaluation"):
        ResultStore(file)
    assert json.loads(file.read_text().splitlines()[1]) == {"name": "Ada"}


@pytest.mark.parametrize("change", ["question", "answers"])
def test_results_of_other_questions_of_the_same_names_are_not_mixed_in(pair, tmp_path, change):
    file, examples = tmp_path / "results.jsonl", make_examples(3)
    evaluate(tasks={"squad": examples}, results=file, **pair)
    other = {"question": "Who reads?", "answers": (*examples[1].answers, "another one")}[change]
    examples[1] = replace(examples[1], **{change: other})
    with pytest.raises(ValueError, match="results of squad with items"):
        evaluate(tasks={"squad": examples}, results=file, **pair)


def test_results_of_documents_that_go_on_otherwise_are_not_mixed_in(pair, tmp_path):
    file, documents = tmp_path / "results.jsonl", make_documents(3, seed=1)
    evaluate(documents=documents, results=file, **pair)
    documents[1] = documents[1][:120] + documents[1][:119:-1]
    with pytest.raises(ValueError, match="results of context_nll with items"):
        evaluate(documents=documents, results=file, **pair)


def test_results_of_another_twin_are_not_mixed_in(pair, tmp_path):
    file, documents = tmp_path / "results.jsonl", make_documents(3)
    arms = ["native", "no_context", "translated", "no_source"]
    evaluate(documents=documents, results=file, **{**pair, "arms": arms[:3]})
    evaluate(documents=documents, results=file, **{**pair, "arms": arms})  # an arm can be added later
    other = {**pair, "no_source": read_otherwise(pair["no_source"])}
    evaluate(documents=documents, results=file, **{**other, "arms": arms[:3]})
    with pytest.raises(ValueError, match="results of context_nll/no_source with twin"):
        evaluate(documents=documents, results=file, **{**other, "arms": arms})


def test_answers_of_a_source_that_was_asked_otherwise_are_not_mixed_in(tmp_path):
    pair = {**make_pair(), "arms": ["native", "source_alone"]}
    pair["source_tokenizer"].chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}>"
    file, tasks = tmp_path / "results.jsonl", {"squad": make_examples(3)}
    evaluate(tasks=tasks, results=file, **pair)  # the target has no chat template: plain in both
    message = "results of squad/source_alone with source_prompt 'chat', but this run has 'plain'"
    with pytest.raises(ValueError, match=message):
        evaluate(tasks=tasks, results=file, **pair, prompt_style="plain")
    with pytest.raises(ValueError, match=message):
        evaluate(tasks=tasks, results=ResultStore(reuse=file), **pair, prompt_style="plain")


def test_results_of_a_source_in_another_dtype_are_not_mixed_in(tmp_path):
    pair, file = {**make_pair(), "arms": ARMS}, tmp_path / "results.jsonl"
    assert evaluate(documents=make_documents(3), results=file, **pair)["dtype"] == "float32"
    pair["source"].to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"dtype 'float32', but this run has 'float32, source bfloat16'"):
        evaluate(documents=make_documents(3), results=file, **pair)


def test_what_another_process_adds_meanwhile_is_not_cut_off(tmp_path, monkeypatch):
    file = tmp_path / "results.jsonl"
    ResultStore(file).add("squad", "native", [("a", {"nll": 1.0})])
    read = ResultStore._read

    def read_and_wait(self, path):
        whole = read(self, path)
        with open(path, "a") as other:
            other.write(json.dumps({"part": "squad", "arm": "native", "id": "b", "nll": 2.0}) + "\n")
        return whole

    monkeypatch.setattr(ResultStore, "_read", read_and_wait)
    ResultStore(file)
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.parametrize("line", ["[1]", '{"part": ["squad"], "settings": {}}', "3", "null"])
def test_line_of_another_form_is_named(tmp_path, line):
    (tmp_path / "notes.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"notes\.jsonl, line 1, is no result of an evaluation"):
        ResultStore(tmp_path / "notes.jsonl")


def test_what_is_overwritten_can_be_reused(pair, scored, tmp_path):
    tasks, file = {"squad": make_examples(4)}, tmp_path / "results.jsonl"
    whole = evaluate(tasks=tasks, results=file, **pair)
    with pytest.raises(ValueError, match="`reuse` must name a file"):
        ResultStore(file, overwrite=True, reuse=tmp_path / "absent.jsonl")
    scored["done"].clear()
    assert evaluate(tasks=tasks, results=ResultStore(file, overwrite=True, reuse=file), **pair) == whole
    assert {arm for arm, row in scored["done"]} == {"translated", "wrong_document"}


def test_run_without_results_leaves_the_file_as_it_was(pair, scored, tmp_path):
    tasks, file, new = {"squad": make_examples(4)}, tmp_path / "results.jsonl", tmp_path / "new" / "results.jsonl"
    evaluate(tasks=tasks, results=file, **pair)
    before, scored["kill_after"] = file.read_bytes(), 0
    scored["done"].clear()
    for path in (file, new):
        with pytest.raises(Killed):
            evaluate(tasks=tasks, results=ResultStore(path, overwrite=True), **{**pair, "seed": 1})
    assert file.read_bytes() == before and not new.parent.exists()


def test_results_of_another_version_of_context_nll_are_not_mixed_in(pair, tmp_path, monkeypatch):
    file, documents = tmp_path / "results.jsonl", make_documents(3)
    assert evaluate(documents=documents, results=file, **pair)["context_nll_version"] == context_nll.VERSION
    monkeypatch.setattr(context_nll, "VERSION", "of tomorrow")
    with pytest.raises(ValueError, match="results of context_nll with version"):
        evaluate(documents=documents, results=file, **pair)
