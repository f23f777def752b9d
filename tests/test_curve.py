"""`evaluate --curve`: several replay plans in one run, each as if it had been measured alone."""

import argparse
import json
import os
import shutil
from dataclasses import replace

import pytest
from conftest import make_documents, save_pair
from evaluation_pair import (
    CONTEXT,
    Killed,
    answer_shortly,
    make_examples,
    make_pair,
    watch_scores,
    write_examples,
)
from test_auto_plan import make_curve
from test_report import make_report, run_command

from hf_mot import MoTConfig, MoTModel, ReplayPlan, guidance_mot
from hf_mot.cli import generate, inspect
from hf_mot.evaluation import arms as arms_module
from hf_mot.evaluation import evaluate
from hf_mot.evaluation.curve import check_plans, curve_points, default_plans, replay_curve
from hf_mot.evaluation.curve_report import CURVE_PLOT, curve_table, curve_words
from hf_mot.evaluation.gate import MIN_DOCUMENTS
from hf_mot.evaluation.report import render_markdown
from hf_mot.evaluation.report_page import render_page, write_report
from hf_mot.hub.record import record_evaluation
from hf_mot.hub.resolve import load_translator

PLANS = ["none", "tokens:6", "bottom:2+tokens:3"]
ARMS = ["native", "no_context", "translated", "wrong_document", "no_source"]


@pytest.fixture(scope="module")
def pair():
    return {**make_pair(), "arms": ARMS, "batch_size": 2}


@pytest.fixture(scope="module")
def documents(pair):
    """Some whose context is worth something to the target, so that there are recoveries."""
    drawn = make_documents(24)
    report = evaluate(documents=drawn, **{**pair, "arms": ["native", "no_context"]})
    return [drawn[row["document"]] for row in report["documents"] if row["native"] < row["no_context"]][:3]


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    answer_shortly(monkeypatch)


@pytest.fixture
def scored(monkeypatch):
    return watch_scores(monkeypatch)


def test_curve_equals_separate_evaluations_plan_by_plan(pair, documents):
    tasks = {"squad": make_examples(2)}
    report = evaluate(documents=documents, tasks=tasks, curve=PLANS, **pair)
    assert {point["replay"] for point in report["curve"]} == set(PLANS)
    losses = []
    for point in report["curve"]:
        alone = evaluate(documents=documents, tasks=tasks, **{**pair, "replay": point["replay"]})
        assert point["flops_share"] == alone["flops_ratios"]["translated"]
        assert point["nll"] == pytest.approx(alone["arms"]["translated"]["nll"], abs=1e-6)
        losses.append(point["nll"])
        for metric in ("recovery", "content_recovery", "source_value"):
            assert (metric in point) == (metric in alone)
            if metric in point:
                assert point[metric] == pytest.approx(alone[metric], abs=1e-6)
        assert "recovery" in point
        for arm in ("translated", "wrong_document", "no_source"):
            assert point["arms"][arm]["nll"] == pytest.approx(alone["arms"][arm]["nll"], abs=1e-6)
        ours, theirs = point["tasks"]["squad"], alone["tasks"]["squad"]
        assert (ours["native"], ours["translated"]) == (theirs["native"], theirs["translated"])
        assert ours["answer_nll"]["translated"] == pytest.approx(theirs["answer_nll"]["translated"], abs=1e-6)
    assert len({round(loss, 4) for loss in losses}) == len(PLANS)  # they do differ


def test_evaluation_itself_is_as_without_a_curve(pair, documents):
    settings = {**pair, "replay": "bottom:1", "documents": documents, "tasks": {"squad": make_examples(2)}}
    report, plain = evaluate(curve=PLANS, **settings), evaluate(**settings)
    points = report.pop("curve")
    names = set(ARMS) | {"native_wrong_document", "document"}
    report["documents"] = [{key: row[key] for key in row if key in names} for row in report["documents"]]
    assert report == plain
    assert next(point for point in points if point["replay"] == "bottom:1")["recovery"] == plain["recovery"]


def test_what_no_plan_plays_a_part_in_is_computed_once(pair, documents, scored, monkeypatch):
    read, native = [], []
    original, own = MoTModel.read_source, arms_module.ARMS["native"]

    def read_source(self, texts, *args, **kwargs):
        read.append(len(texts))
        return original(self, texts, *args, **kwargs)

    def read_natively(batch):
        native.append(len(batch.texts))
        return own.cache(batch)

    monkeypatch.setattr(MoTModel, "read_source", read_source)
    monkeypatch.setitem(arms_module.ARMS, "native", replace(own, cache=read_natively))
    evaluate(documents=documents, tasks={"squad": make_examples(4)}, curve=PLANS, **pair)
    assert sum(read) == sum(native) == len(documents) + 4
    asked = [arm for arm, row in scored["done"] if row is not None]
    assert asked.count("native") == asked.count("no_context") == asked.count("translated") == 4
    assert {asked.count(f"{arm}@{plan}") for arm in ARMS[2:] for plan in PLANS[1:]} == {4}
    # native, no context, another document natively; and three arms by each plan
    assert scored["done"].count(("nll", None)) == len(documents) * (3 + 3 * len(PLANS))


def test_killed_curve_goes_on_where_it_stopped(pair, documents, scored, tmp_path):
    settings = {**pair, "documents": documents, "tasks": {"squad": make_examples(3)}, "curve": PLANS[:2]}
    whole = evaluate(**settings)
    scored["done"].clear()
    file = tmp_path / "out.examples.jsonl"
    for kill_after in (5, 30, None):
        scored["kill_after"] = kill_after
        if kill_after is None:
            resumed = evaluate(results=file, **settings)
        else:
            with pytest.raises(Killed):
                evaluate(results=file, **settings)
    assert resumed == whole
    asked = [arm for arm, row in scored["done"] if row is not None]
    assert {asked.count(arm) for arm in asked} == {3}
    scored["done"].clear()
    assert evaluate(results=file, **settings) == whole and not scored["done"]
    longer = evaluate(results=file, **{**settings, "curve": PLANS})  # plans that are added later
    assert {arm.partition("@")[2] for arm, _ in scored["done"]} == {"", *PLANS[2:]}
    assert [point for point in longer["curve"] if point["replay"] in PLANS[:2]] == whole["curve"]


def test_plan_of_more_tokens_than_a_question_has_is_missing_there_alone(pair, documents, scored):
    examples = make_examples(4)
    own = CONTEXT - 1
    report = evaluate(
        documents=documents,
        tasks={"squad": [*examples, replace(examples[0], id="short", context="river")]},
        curve=["none", f"tokens:{own}"],
        **pair,
    )
    assert set(report["missing"]["squad"]) == {f"{arm}@tokens:{own}" for arm in ARMS[2:]}
    assert set(report["missing"]) == {"squad"}
    by_plan = {point["replay"]: point for point in report["curve"]}
    assert "recovery" in by_plan[f"tokens:{own}"] and "tasks" not in by_plan[f"tokens:{own}"]
    assert by_plan["none"]["tasks"]["squad"]["n"] == 5
    assert f"translated@tokens:{own}" not in {arm for arm, _ in scored["done"]}


def test_arm_that_crashes_leaves_its_point_without_it(pair, documents, monkeypatch):
    translate = arms_module.Batch.translate

    def crash(self, *args):
        if self.models.replay == "full":
            raise RuntimeError("gone")
        return translate(self, *args)

    monkeypatch.setattr(arms_module.Batch, "translate", crash)
    report = evaluate(documents=documents, curve=["none", "full"], **pair)
    assert report["missing"]["context_nll"]["translated@full"] == "RuntimeError: gone"
    none, full = report["curve"]
    assert "recovery" in none and not {"recovery", "nll"} & set(full)
    kept = replay_curve({**report, "n": MIN_DOCUMENTS})["points"]
    assert [point["replay"] for point in kept] == ["none"]


def test_cost_is_measured_by_plan_in_the_same_rounds(pair, documents):
    report = evaluate(documents=documents, curve=["none", "full"], **{**pair, "cost": True})
    for point in report["curve"]:
        cost = point["cost"]
        assert cost["handoff_s"] > 0 and cost["peak_bytes"] > 0
        assert cost["time_ratio"] == pytest.approx(cost["handoff_s"] / report["cost"]["prefill_s"])
        assert cost["flops_ratio"] == point["flops_share"]
    assert "by_plan" not in report["cost"]


# Which plans


def shares_of(translator, plans, length):
    return [ReplayPlan.parse(plan).flops_share(translator.config, length) for plan in plans]


@pytest.mark.parametrize("length", [CONTEXT, 256])
def test_default_plans_are_spread_over_the_cost(pair, length):
    plans = default_plans(pair["translator"], length)
    assert len(plans) == len(set(plans)) >= 8 and {"none", "bottom:1", "bottom:3"} <= set(plans)
    shares = sorted(shares_of(pair["translator"], plans, length))
    assert max(high - low for low, high in zip(shares[:-1], shares[1:], strict=True)) < 0.3
    assert shares[-1] > 0.7 and shares[0] < 0.2
    checked = check_plans(pair["translator"], plans, length, "none")
    assert set(checked) == set(plans) and shares_of(pair["translator"], checked, length) == shares


def test_default_plans_are_those_that_the_translated_layers_allow(pair):
    config = pair["translator"].config.to_dict()
    upper = MoTModel(MoTConfig(**config | {"target_layers": [1, 2], "replay": "full"}))
    assert all(plan.startswith(("bottom:", "full")) for plan in default_plans(upper, 64))
    lower = MoTModel(MoTConfig(**config | {"target_layers": [0, 1], "replay": "full"}))
    assert default_plans(lower, 64) == ["bottom:3", "full:0-1"]


def test_the_evaluations_own_plan_is_among_them(pair):
    plans = check_plans(pair["translator"], ["full", "bottom:1", "full"], CONTEXT, "none")
    assert plans == ["none", "bottom:1", "full"]


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ([], "`curve` is empty. Name replay plans"),
        (["none", "most"], "`replay` must be one of none, full"),
        (["bottom:7"], "takes the first 7 layers from the target itself, but it has 3"),
        (["tokens:24"], "`curve` holds tokens:24, but a context of 24 target tokens has 23 besides"),
        (["auto:0.3"], "no measured curve"),
    ],
)
def test_plans_that_cannot_be_measured_are_refused_before_anything_runs(pair, documents, scored, curve, message):
    with pytest.raises(ValueError, match=message):
        evaluate(documents=documents, curve=curve, **pair)
    assert not scored["done"]


def test_auto_evaluates_one_plan_for_the_context_length(pair, documents):
    curve = make_curve({"none": 0.5, "tokens:6": 0.9})
    mot = MoTModel(MoTConfig(**pair["translator"].config.to_dict() | {"replay_curve": curve})).eval()
    mot.load_state_dict(pair["translator"].state_dict())
    settings = {key: value for key, value in pair.items() if key != "translator"}
    report = evaluate(mot, documents, replay="auto:recovery=0.8", **settings)
    assert report["replay"] == "tokens:6"
    assert report["arms"] == evaluate(mot, documents, replay="tokens:6", **settings)["arms"]


# What is made of it


def interval(value):
    return {"value": value, "low": value - 0.05, "high": value + 0.05}


def make_points():
    squad = {
        **{"metric": "f1", "n": 40, "native": 0.41, "translated": 0.36, "share_of_native": {"translated": 0.88}},
        "answer_nll": {"recovery": interval(0.9)},
    }
    arms = {
        "translated": {"nll": 3.3, "recovery": interval(0.7)},
        "target_layers_only": {"nll": 3.5, "recovery": interval(0.5)},
    }
    cost = {"time_ratio": 0.3, "time_ratio_low": 0.2, "time_ratio_high": 0.4, "peak_bytes": 12_340_000}
    first = {"replay": "none", "flops_share": 0.12345, "nll": 3.3, "recovery": interval(0.7), "arms": arms}
    last = {"replay": "full", "flops_share": 1.1, "recovery": interval(0.98761)}
    last["arms"] = {"translated": {"nll": 3.0, "recovery": interval(0.98761)}}
    return [{**first, "tasks": {"squad": squad}, "cost": cost}, {"replay": "bottom:1", "flops_share": 0.2}, last]


def test_table_has_a_plan_a_row_and_the_arms_that_were_measured():
    head, rows = curve_table(make_points())
    own = dict(zip(head, rows[0], strict=True))
    assert [row[0] for row in rows] == ["none", "bottom:1", "full"]
    assert (own["FLOPs / native"], own["recovery"]) == ("0.123", "0.70 [0.65, 0.75]")
    assert own["target layers only, recovery"] == "0.50 [0.45, 0.55]" and "no source, recovery" not in head
    assert (own["squad f1, native 0.410"], own["squad / native"]) == ("0.360", "0.88")
    assert (own["time / native"], own["peak, MB"]) == ("0.30 [0.20, 0.40]", "12.3")
    assert set(rows[1][2:]) == {""} and "source value" not in head


def test_words_name_the_best_plan_below_the_cost_of_native():
    assert "none keeps most: 0.70 [0.65, 0.75], at 0.12" in curve_words({"curve": make_points()})[0]
    assert curve_words({}) == []


def test_config_keeps_the_points_that_have_a_recovery_in_four_digits():
    curve = replay_curve(make_report(curve=make_points()))
    assert curve["context_length"] == 256 and curve["n"] == 128
    assert [point["replay"] for point in curve["points"]] == ["none", "full"]
    assert curve["points"][0]["flops_share"] == 0.1235
    assert curve["points"][1]["recovery"] == {"value": 0.9876, "low": 0.9376, "high": 1.0376}
    MoTConfig(replay_curve=curve)
    assert replay_curve(make_report()) is None


def test_curve_of_too_few_documents_is_not_kept():
    curve = make_points()
    assert replay_curve(make_report(curve=curve, n=MIN_DOCUMENTS)) is not None
    assert replay_curve(make_report(curve=curve, n=MIN_DOCUMENTS - 1)) is None
    assert replay_curve(make_report(curve=curve, n=40, n_documents=MIN_DOCUMENTS - 1)) is None  # windows are not more


def test_points_are_of_their_own_arms_and_the_shared_ones():
    losses = {"native": [1.0, 1.0], "no_context": [3.0, 3.0], "translated": [2.0, 2.0], "translated@full": [1.5, 1.5]}
    rows = [{"document": row, **{arm: column[row] for arm, column in losses.items()}} for row in (0, 1)]
    report = {"documents": rows, "replay": "none", "seed": 0}
    none, full = curve_points(report, {"none": 0.1, "full": 1.0}, {}, {})
    assert none["recovery"]["value"] == pytest.approx(0.5) and full["recovery"]["value"] == pytest.approx(0.75)
    assert set(full["arms"]) == {"translated"} and "source_value" not in full


def test_report_shows_the_curve(tmp_path):
    pytest.importorskip("matplotlib")
    report = make_report(curve=make_points())
    write_report(report, tmp_path)
    assert (tmp_path / CURVE_PLOT).read_bytes()[1:4] == b"PNG"
    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert "## Replay plans\n\n| plan | FLOPs / native |" in text and f"![recovery by plan]({CURVE_PLOT})" in text
    assert page.count("data:image/png;base64,") == 2 and "<h2>Replay plans</h2>" in page
    assert "Replay plans" not in render_markdown(make_report(), None) + render_page(make_report(), None)


@pytest.fixture(scope="module")
def folder(pair, documents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("curve")
    save_pair(pair, folder)
    pair["translator"].fit_report = {"tokens": 2000, "seed": 0}
    pair["translator"].save_pretrained(folder / "mot")
    pair["no_source"].save_pretrained(folder / "mot" / "no_source")
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    write_examples(folder / "data", "squad", make_examples(3))
    return folder


@pytest.fixture
def own(folder, tmp_path):
    return shutil.copytree(folder / "mot", tmp_path / "mot")


def arguments(folder, *more):
    models = ["--source", folder / "source", "--target", folder / "target", "--no-cost", "--context", CONTEXT]
    return ["--text", folder / "text.txt", *models, *more]


def test_command_says_that_a_curve_of_few_documents_is_not_for_auto(folder, own, capsys):
    record_evaluation(own, make_report(curve=make_points()))
    before = json.loads((own / "config.json").read_text())
    assert before["replay_curve"]["n"] == 128
    assert run_command(own, *arguments(folder, "--curve", "none,bottom:2", "--card")) == 0
    said = "The curve is of 3 documents, too few for --replay auto to choose by (it needs 10): it is not kept."
    assert said in capsys.readouterr().out
    assert json.loads((own / "config.json").read_text()) == before
    assert "| `bottom:2` | " in (own / "README.md").read_text(encoding="utf-8")


def test_command_puts_the_curve_into_card_and_config_and_auto_takes_it(folder, own, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_mot.evaluation.curve.MIN_DOCUMENTS", 3)  # few, to save time
    before = json.loads((own / "config.json").read_text())
    given = arguments(folder, "--curve", "none,bottom:2", "--card", "--json", tmp_path / "out.json")
    assert run_command(own, *given) == 0
    printed, report = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert [point["replay"] for point in report["curve"]] == ["none", "bottom:2"]
    assert "plan      FLOPs / native  NLL" in printed
    after = json.loads((own / "config.json").read_text())
    assert after.pop("replay_curve") == replay_curve(report) and before.pop("replay_curve", None) is None
    assert after == before
    card = (own / "README.md").read_text(encoding="utf-8")
    assert "## Replay plans" in card and "| `bottom:2` | " in card and 'replay="auto:0.25"' in card

    translator = load_translator(own)
    best = max(report["curve"], key=lambda point: (point["recovery"]["value"], -point["flops_share"]))
    assert str(translator.plan("auto:1")) == best["replay"]
    # The results are still the translator's: nothing is measured again.
    examples = (tmp_path / "out.examples.jsonl").read_bytes()
    assert run_command(own, *given) == 0
    assert (tmp_path / "out.examples.jsonl").read_bytes() == examples

    # An evaluation without a curve leaves it, and the card still shows it.
    assert run_command(own, *arguments(folder, "--card", "--limit", "2")) == 0
    assert json.loads((own / "config.json").read_text())["replay_curve"] == replay_curve(report)
    assert "| `bottom:2` | " in (own / "README.md").read_text(encoding="utf-8")


def test_command_without_plans_takes_the_default_ones_and_reports(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    given = arguments(folder, "--arms", "native,no_context,translated", "--curve", "--report", tmp_path / "out")
    assert run_command(folder / "mot", *given, "--data", folder / "data", "--tasks", "squad", "--limit", "2") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    translator = load_translator(folder / "mot")
    assert {point["replay"] for point in report["curve"]} == set(default_plans(translator, CONTEXT))
    assert "squad f1, native" in capsys.readouterr().out and (tmp_path / "out" / CURVE_PLOT).is_file()
    assert json.loads((folder / "mot" / "config.json").read_text())["replay_curve"] is None


def test_curve_on_questions_alone_chooses_nothing(folder, own, capsys):
    models = ["--source", folder / "source", "--target", folder / "target", "--no-cost"]
    given = ["--data", folder / "data", "--tasks", "squad", "--curve", "none,bottom:2", "--card"]
    assert run_command(own, *given, *models) == 0
    assert "there is nothing for --replay auto to choose from" in capsys.readouterr().out
    assert json.loads((own / "config.json").read_text())["replay_curve"] is None
    assert "| `bottom:2` | " in (own / "README.md").read_text(encoding="utf-8")


def test_config_is_written_whole_or_not_at_all(own, monkeypatch):
    before = {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()}

    def fail(source, path):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        record_evaluation(own, make_report(curve=make_points()))
    assert {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()} == before


def test_damaged_curve_of_a_report_is_refused_before_anything_is_written(own):
    before = {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()}
    points = make_points()
    points[0]["recovery"] = {"value": 0.5, "low": 0.9, "high": 0.6}
    with pytest.raises(ValueError, match="`replay_curve` must hold"):
        record_evaluation(own, make_report(curve=points))
    assert {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()} == before


def run_module(module, *argv):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(part) for part in argv]))


def test_generate_and_inspect_show_the_plan_that_is_chosen(folder, own, tmp_path, capsys, monkeypatch):
    points = make_curve({"none": 0.5, "tokens:6": 0.9, "bottom:2": 0.7})
    record = {"curve": points["points"], "context_length": CONTEXT, "n": 30, "seed": 0, "replay": "none"}
    record_evaluation(own, record)
    (tmp_path / "context.txt").write_text(make_documents(1, 20)[0], encoding="utf-8")
    models = ["--source", folder / "source", "--target", folder / "target"]
    asked = ["--context", tmp_path / "context.txt", "--prompt", "river", "--max-new-tokens", "3", *models]
    answers = []
    for replay in ("auto:recovery=0.8", "tokens:6"):
        out = tmp_path / "out.json"
        assert run_module(generate, own, *asked, "--replay", replay, "--json", out) == 0
        answers.append(json.loads(out.read_text()))
    assert answers[0] == answers[1] and answers[0]["replay"] == "tokens:6"
    assert capsys.readouterr().err.count("plan: tokens:6") == 1
    monkeypatch.setattr("hf_mot.hub.resolve.load_model", None)  # before a model is loaded
    with pytest.raises(ValueError, match="cheapest measured plan, none, costs"):
        run_module(generate, own, *asked, "--replay", "auto:0.001")
    assert run_module(inspect, own) == 0
    assert "tokens:6: 0.100 of native FLOPs, recovery 0.900  [0.860, 0.940]" in capsys.readouterr().out


def test_sparse_among_the_plans_equals_itself_alone(pair, documents):
    plan = "full:1-1+sparse:2/1"
    report = evaluate(documents=documents, curve=["full:1-1", plan], **{**pair, "cost": True})
    alone = evaluate(documents=documents, **{**pair, "replay": plan})
    point = next(point for point in report["curve"] if point["replay"] == plan)
    for arm in ("translated", "no_source"):
        assert point["arms"][arm]["nll"] == pytest.approx(alone["arms"][arm]["nll"], abs=1e-6)
    assert len({own["nll"] for own in report["curve"]}) == 3
    assert point["cost"]["handoff_s"] > 0
    # And where the evaluation's own plan is sparse, the others are as ever.
    turned = evaluate(documents=documents, curve=["none", "full:1-1"], **{**pair, "replay": plan})
    losses = {own["replay"]: pytest.approx(own["nll"], abs=1e-6) for own in report["curve"]}
    assert {own["replay"]: own["nll"] for own in turned["curve"]} == losses


def test_sparse_among_the_plans_is_refused_before_anything_is_read_where_it_cannot_be(
    pair, documents, scored, monkeypatch
):
    monkeypatch.setitem(guidance_mot._MISSED, pair["source"], [0])
    with pytest.raises(ValueError, match=r"computes the attention of its layers \[0\] outside .* cannot guide"):
        evaluate(documents=documents, curve=["none", "full:1-1+sparse:2/1"], **pair)
    assert not scored["done"]
