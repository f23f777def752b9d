import argparse
import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from conftest import make_documents
from evaluation_pair import make_examples, make_pair, write_examples

from hf_mot import MoTConfig, MoTModel
from hf_mot.cli.evaluate import add_arguments, run
from hf_mot.cli.rivals import check_corpus
from hf_mot.evaluation import arms, caches, report_plot
from hf_mot.evaluation.report import facts, plain_words, render_markdown, table
from hf_mot.evaluation.report_page import render_page, write_report
from hf_mot.evaluation.tasks import TASKS
from hf_mot.hub.handwriting import BEGIN, END
from hf_mot.hub.record import record_evaluation


def interval(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def make_report(**changes):
    task = {
        "metric": "f1",
        "version": "1",
        "n": 40,
        "prompt": "plain",
        "native": 0.31,
        "no_context": 0.04,
        "translated": 0.12,
        "em": {"native": 0.2, "no_context": 0.0, "translated": 0.05},
        "intervals": {arm: {"low": 0.0, "high": 1.0} for arm in ("native", "no_context", "translated")},
        "counts": True,
        "answer_nll": {"native": 1.0, "no_context": 3.0, "translated": 2.0, "recovery": interval(0.5)},
    }
    task["answer_nll"]["recoveries"] = {"translated": interval(0.5)}
    closed = {**task, "metric": "accuracy", "native": 0.6, "translated": 0.5, "counts": False}
    return {
        "pair": {"source": "a/<b>", "target": "c"},
        "translator": {
            **{"method": "reduced_rank", "rank": 8, "piece_ranks": [[6, 8], [4, 8]], "source_layers": [1, 3]},
            **{"key_norms": [0, 1], "embedding_window": 3, "bytes": 2_500_000},
        },
        "replay": "none",
        "context_length": 256,
        "n": 128,
        "dtype": "float32",
        "seed": 0,
        "skipped": {},
        "arms": {
            "native": {"nll": 3.0},
            "no_context": {"nll": 4.0},
            "translated": {"nll": 3.3, "recovery": interval(0.7)},
        },
        "recovery": interval(0.7),
        "better_by": {"wrong_document": interval(0.4), "no_source": interval(0.05)},
        "similarity": {"translated": {"keys": 0.91, "values": 0.62, "attention": 0.8}},
        "flops_ratios": {"native": 1.0, "no_context": 0.0, "translated": 0.12},
        "tasks": {"squad": task, "boolq": closed, "pubmedqa": closed},
        "missing": {"squad": {"ridge": "RuntimeError: gone"}},
        "versions": {"hf_mot": "0"},
        "command": "hf-mot evaluate mot",
        **changes,
    }


def test_table_has_an_arm_a_row_and_averages_of_each_kind():
    head, rows = table(make_report())
    assert head[:6] == ["arm", "cos K", "cos V", "cos attention", "NLL", "recovery"]
    assert [row[0] for row in rows] == ["native", "no_context", "translated"]
    own = dict(zip(head, rows[2], strict=True))
    assert own["recovery"] == "0.70 [0.60, 0.80]"
    assert (own["BoolQ"], own["accuracy, mean"], own["SQuAD"]) == ("0.500", "0.500", "0.120")
    assert (own["cos K"], own["FLOPs / native"]) == ("0.91", "0.120")
    assert "F1, mean" not in head  # of one task alone


def test_bad_news_is_said_in_words():
    said = " ".join(plain_words(make_report(gate={"passed": False, "reasons": ["squad: no"]})))
    assert "clearly better than wrong document: by 0.400 nats" in said
    assert "NOT clearly better than no source" in said
    assert "BoolQ counts in no verdict" in said
    assert "Missing: ridge of squad, which crashed (RuntimeError: gone)" in said
    assert "The gate is NOT passed: squad: no." in said


def test_markdown_names_command_and_picture():
    text = render_markdown(make_report(), "plot.png")
    assert "| translated | 0.91 | 0.62 | 0.80 | 3.300 | 0.70 [0.60, 0.80] |" in text
    assert "![recovery against cost](plot.png)" in text and "- command: `hf-mot evaluate mot`" in text


def test_peaks_of_memory_are_among_the_facts(tmp_path):
    cost = {
        "time_ratio": 0.2,
        "time_ratio_low": 0.1,
        "time_ratio_high": 0.3,
        "flops_ratio": 0.1,
        "context_length": 256,
    }
    report = make_report(cost={**cost, "peak_bytes": 12_340_000, "prefill_peak_bytes": 5_600_000})
    text = render_markdown(report, None)
    assert "- peak memory of a handoff: `12.3 MB at 256 tokens`" in text
    assert "- peak memory of the target's own prefill: `5.6 MB at 256 tokens`" in text
    assert "<dt>peak memory of a handoff</dt><dd>12.3 MB" in render_page(report, None)
    assert "peak memory" not in render_markdown(make_report(cost=cost), None)


def test_page_needs_no_other_file_and_escapes_names(tmp_path):
    (tmp_path / "plot.png").write_bytes(b"picture")
    page = render_page(make_report(gate={"passed": True, "reasons": []}), tmp_path / "plot.png")
    assert "data:image/png;base64,cGljdHVyZQ==" in page
    assert "a/&lt;b&gt; → c" in page and "<b>" not in page
    assert "gate passed" in page
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page)


def test_report_writes_four_files(tmp_path):
    pytest.importorskip("matplotlib")
    page = write_report(make_report(), tmp_path / "out")
    assert page.name == "report.html"
    assert {path.name for path in page.parent.iterdir()} == {
        "report.html",
        "report.json",
        "report.md",
        "recovery_against_cost.png",
    }
    assert (page.parent / "recovery_against_cost.png").read_bytes()[1:4] == b"PNG"
    assert json.loads((page.parent / "report.json").read_text()) == make_report()


def test_report_without_matplotlib_says_so_first(monkeypatch, tmp_path):
    monkeypatch.setattr(report_plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install hf-mot\[report\]"):
        run_command("absent", "--text", "absent.txt", "--report", str(tmp_path / "out"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pair, its translator with twin, text and questions on disk."""
    pair, folder = make_pair(), tmp_path_factory.mktemp("command")
    for side in ("source", "target"):
        pair[side].save_pretrained(folder / side)
        pair[f"{side}_tokenizer"].save_pretrained(folder / side)
    pair["translator"].fit_report = {"tokens": 2000, "seed": 0}
    pair["translator"].save_pretrained(folder / "mot")
    pair["no_source"].save_pretrained(folder / "mot" / "no_source")
    pair["translator"].save_pretrained(folder / "alone")
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(make_documents(3)), encoding="utf-8")
    (folder / "fit.txt").write_text("\n<|endoftext|>\n".join(make_documents(40, seed=5)), encoding="utf-8")
    write_examples(folder / "data", "squad", make_examples(4))
    write_examples(folder / "data", "boolq", make_examples(4, closed=True))
    return folder


def run_command(translator, *arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    argv = [str(translator), *map(str, arguments)]
    return run(argparse.Namespace(**vars(parser.parse_args(argv)), argv=["evaluate", *argv]))


def models(folder):
    return ["--source", folder / "source", "--target", folder / "target", "--no-cost", "--context", "24"]


def test_command_on_tasks_writes_figures_and_examples(folder, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = ["--data", folder / "data", "--tasks", "squad,boolq", *models(folder), "--json", out]
    assert run_command(folder / "mot", *arguments) == 0
    report, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert set(report["tasks"]) == {"squad", "boolq"} and "arms" not in report
    assert "squad: 4 questions, plain prompt, version 2" in printed
    lines = [json.loads(line) for line in (tmp_path / "out.examples.jsonl").read_text().splitlines()]
    assert len([line for line in lines if line.get("arm") == "translated"]) == 8
    assert run_command(folder / "mot", *arguments) == 0  # goes on, with nothing left to do
    with pytest.raises(ValueError, match="out.examples.jsonl holds results of squad with seed 0"):
        run_command(folder / "mot", *arguments, "--seed", "1")
    assert run_command(folder / "mot", *arguments, "--seed", "1", "--overwrite") == 0


def test_command_runs_all_arms_and_fits_what_is_missing_once(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "squad", replace(TASKS["squad"], max_new_tokens=3))
    monkeypatch.setattr(caches, "SUMMARY_TOKENS", 6)
    arguments = ["--text", folder / "text.txt", "--data", folder / "data", "--tasks", "squad", "--arms", "all"]
    arguments += [*models(folder), "--fit-text", folder / "fit.txt", "--json", tmp_path / "out.json"]
    assert run_command(folder / "alone", *arguments) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert {"ridge", "raw_copy", "no_source", "wrong_source", "random_cache"} <= set(report["arms"])
    assert {"text_handoff", "source_alone", "ridge"} <= set(report["tasks"]["squad"]["intervals"])
    assert report["baselines"]["ridge"]["rows"] > 0 and "raw_copy" not in report["baselines"]
    assert report["baselines"]["ridge"]["corpus"][0]["name"] == "fit.txt"
    assert report["overlap"]["tested"] == 7
    made = folder / "alone" / "baselines" / "ridge.safetensors", folder / "alone" / "no_source" / "model.safetensors"
    times = [path.stat().st_mtime_ns for path in made]
    assert run_command(folder / "alone", *arguments, "--arms", "native,ridge,no_source", "--overwrite") == 0
    assert [path.stat().st_mtime_ns for path in made] == times


def test_all_arms_without_text_to_fit_on_are_those_that_are_there(folder, tmp_path):
    out = tmp_path / "out.json"
    assert (
        run_command(folder / "mot", "--text", folder / "text.txt", "--arms", "all", *models(folder), "--json", out)
        == 0
    )
    measured = json.loads(out.read_text())["arms"]
    assert "no_source" in measured and not {"ridge", "text_handoff"} & set(measured)


def test_gate_sets_the_exit_code(folder, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = ["--text", folder / "text.txt", *models(folder), "--gate", "--json", out]
    assert run_command(folder / "mot", *arguments) == 1
    assert "gate: NOT PASSED" in capsys.readouterr().out
    assert json.loads(out.read_text())["gate"]["passed"] is False


def test_verdict_goes_into_the_card_and_what_was_written_there_stays(folder, tmp_path, capsys):
    mot = shutil.copytree(folder / "mot", tmp_path / "mot")
    (mot / "README.md").write_text(f"{BEGIN}\n\nOutdated.\n\n{END}\n\nMy own words.\n", encoding="utf-8")
    arguments = ["--text", folder / "text.txt", "--data", folder / "data", "--tasks", "boolq", *models(folder)]
    assert run_command(folder / "mot", "--gate", *arguments, "--json", tmp_path / "out.json") == 1
    assert not (folder / "mot" / "README.md").exists()  # only where it is asked for
    assert run_command(mot, "--gate", "--card", *arguments, "--json", tmp_path / "out.json") == 1
    assert f"Card: {mot / 'README.md'}" in capsys.readouterr().out
    card, report = (mot / "README.md").read_text(encoding="utf-8"), json.loads((tmp_path / "out.json").read_text())
    assert "**Not passed**, judged on context_nll" in card and f"- {report['gate']['reasons'][0]}" in card
    assert "| boolq | accuracy | 4 |" in card and "documents that it was not fitted on from text.txt" in card
    assert "My own words." in card and "Outdated" not in card
    fit_report = json.loads((mot / "fit_report.json").read_text())
    assert fit_report["tokens"] == 2000 and fit_report["evaluation"]["gate"] == report["gate"]
    assert "documents" not in fit_report["evaluation"]


def test_prompts_are_shown_without_loading_a_model(folder, capsys):
    arguments = ["--data", folder / "data", "--tasks", "squad", "--show-prompts"]
    arguments += ["--source", folder / "source", "--target", folder / "target"]
    assert run_command(folder / "mot", *arguments) == 0
    printed = capsys.readouterr().out
    assert "--- target, squad" in printed and "--- source, squad" in printed
    assert "Question: What is the capital of France?\nAnswer: Paris" in printed


def test_report_of_the_command(folder, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--text", folder / "text.txt", *models(folder), "--report", tmp_path / "out"]
    assert run_command(folder / "mot", *arguments) == 0
    assert {"report.html", "report.json", "report.md", "examples.jsonl"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }


def test_refused_evaluation_makes_no_folder_and_overwrites_nothing(folder, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--text", folder / "text.txt", *models(folder), "--report"]
    assert run_command(folder / "mot", *arguments, tmp_path / "there") == 0
    before = (tmp_path / "there" / "examples.jsonl").read_bytes()
    for name in ("there", "new"):
        for wrong in (["--reuse", "absent"], ["--target", "absent"], ["--seed", "1", "--replay", "half"]):
            with pytest.raises((ValueError, OSError)):
                run_command(folder / "mot", *arguments, tmp_path / name, "--overwrite", *wrong)
    assert (tmp_path / "there" / "examples.jsonl").read_bytes() == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`--text` and `--tasks` are both missing"),
        (["--tasks", "sqad"], "'sqad', which is no task. Did you mean squad"),
        (["--tasks", "squad", "--data", "absent"], "has no folder squad"),
        (["--text", "text.txt", "--arms", "rigde", "--source", "absent"], "Did you mean ridge"),
        (["--text", "text.txt", "--card"], "`--card` needs the translator's own folder, got org/mot"),
        (["--text", "text.txt", "--gate", "--gate-recovery", "2"], "`recovery` of the gate must lie in 0..1, got 2.0"),
        (["--text", "text.txt", "--prompt-style", "plan"], "`--prompt-style` is 'plan'. Did you mean plain"),
        (["--text", "text.txt", "--closed-sets", "generat"], "`--closed-sets` is 'generat'. Did you mean generate"),
        (["--tasks", ","], "`--text` and `--tasks` are both missing"),
        (["--text", "text.txt", "--show-prompts"], "`--show-prompts` is of no effect without --tasks"),
        (["--text", "text.txt", "--data", "data"], "`--data` is of no effect without --tasks"),
        (["--text", "text.txt", "--gate-margin", "0.1"], "`--gate-margin` is of no effect without --gate"),
        (["--text", "text.txt", "--overwrite"], "`--overwrite` is of no effect without --json or --report"),
        (["--text", "text.txt", "--no-cost", "--cost-context", "64"], "`--cost-context` and `--no-cost` exclude"),
        (
            ["--text", "text.txt", "--arms", "ridge", "--source", "absent"],
            "`--arms` holds ridge, which is fitted first",
        ),
    ],
)
def test_bad_arguments_are_found_before_a_model_is_loaded(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_command("org/mot" if "--card" in arguments else "mot", *arguments)


def test_ridge_without_text_to_fit_on_is_asked_for(folder, monkeypatch):
    with pytest.raises(ValueError, match="`--arms` holds ridge, which is fitted first. Give --fit-text"):
        run_command(folder / "mot", "--text", folder / "text.txt", "--arms", "native,ridge", *models(folder))


def test_text_that_is_not_the_fits_own_is_refused(folder, tmp_path):
    class Translator:
        fit_report = {"corpus": [{"name": "train.txt", "sha256": "0" * 64}]}

    with pytest.raises(ValueError, match="missing: train.txt; not of it: fit.txt"):
        check_corpus(Translator, [str(folder / "fit.txt")])


def test_text_of_a_training_is_the_translators_too(folder):
    class Translator:
        fit_report = {"training": {"corpus": [{"name": "more.txt", "sha256": "1" * 64}]}}

    with pytest.raises(ValueError, match="missing: more.txt; not of it: fit.txt"):
        check_corpus(Translator, [str(folder / "fit.txt")])
    Translator.fit_report["training"]["corpus"] = [{"name": "8 captured examples", "digest": "1" * 64}]
    check_corpus(Translator, [str(folder / "fit.txt")])  # which text these are of is not recorded


def test_twin_of_a_trained_translator_is_not_fitted(folder, tmp_path):
    shutil.copytree(folder / "mot", tmp_path / "mot", ignore=shutil.ignore_patterns("no_source"))
    config = MoTModel.from_pretrained(tmp_path / "mot").config.to_dict()
    MoTModel(MoTConfig(**config | {"method": "mlp", "hidden_size": 8})).save_pretrained(tmp_path / "mot")
    arguments = ["--text", folder / "text.txt", *models(folder), "--fit-text", folder / "fit.txt", "--no-cost"]
    with pytest.raises(ValueError, match="a twin of a trained translator is trained, not fitted. Train both"):
        run_command(tmp_path / "mot", *arguments, "--arms", "native,no_source")


def test_facts_are_to_be_read_and_name_seed_0():
    found = dict(facts(make_report()))
    assert found["seed"] == "0" and "skipped" not in found
    assert found["translator"] == (
        "reduced_rank, rank 8 (4 to 8 a piece), source layers 1, 3, keys of native length in 2 layers, "
        "embedding window 3, 2.5 MB"
    )


def test_few_documents_make_nothing_clear():
    report = make_report(n=3, tasks={})
    report["better_by"]["no_source"] = {"value": 0.2, "low": 0.2, "high": 0.2}
    said = plain_words(report)
    assert "3 documents are too few for anything to be clear." in said[0]
    assert not any("is clearly" in sentence for sentence in said)
    assert not any("too few" in sentence for sentence in plain_words(make_report()))


def test_why_a_task_has_no_recovery_is_said():
    report = make_report()
    report["tasks"]["squad"]["answer_nll"]["notes"] = ["recovery of translated is left out: the denominator."]
    assert "SQuAD: recovery of translated is left out: the denominator." in plain_words(report)


def test_report_that_is_killed_while_it_is_written_leaves_the_old_pages_whole(tmp_path):
    pytest.importorskip("matplotlib")
    page = write_report(make_report(), tmp_path)
    for path in (page, tmp_path / "report.md"):
        (tmp_path / "old").unlink(missing_ok=True)
        os.link(path, tmp_path / "old")  # a file that is written in place changes under its other name too
        before = path.read_bytes()
        write_report(make_report(seed=int(path == page) + 1), tmp_path)
        assert path.read_bytes() != before == (tmp_path / "old").read_bytes()


def test_command_with_an_arm_that_crashed_ends_as_failed(folder, tmp_path, monkeypatch, capsys):
    def crash(batch):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(arms.ARMS, "translated", replace(arms.ARMS["translated"], cache=crash))
    out = tmp_path / "out.json"
    assert run_command(folder / "mot", "--text", folder / "text.txt", *models(folder), "--json", out) == 1
    assert "native" in json.loads(out.read_text())["arms"]
    assert "missing: translated of context_nll, which crashed: RuntimeError: out of memory" in capsys.readouterr().out


def test_card_keeps_a_complete_evaluation_when_an_arm_crashes(folder, tmp_path, monkeypatch, capsys):
    def crash(batch):
        raise RuntimeError("out of memory")

    mot = shutil.copytree(folder / "mot", tmp_path / "mot")
    record_evaluation(mot, make_report(missing={}))
    before = {path.name: path.read_bytes() for path in mot.iterdir() if path.is_file()}
    monkeypatch.setitem(arms.ARMS, "wrong_document", replace(arms.ARMS["wrong_document"], cache=crash))
    assert run_command(mot, "--text", folder / "text.txt", *models(folder), "--card") == 1
    assert {path.name: path.read_bytes() for path in mot.iterdir() if path.is_file()} == before
    printed = capsys.readouterr().out
    assert "Card: left as it is. Of this evaluation an arm is missing, and the one in the card is complete." in printed
    assert "README.md" not in printed


def test_evaluation_with_a_crash_is_recorded_where_there_is_no_complete_one(folder, tmp_path):
    mot = shutil.copytree(folder / "mot", tmp_path / "mot")
    crashed = make_report()
    assert record_evaluation(mot, crashed) and record_evaluation(mot, {**crashed, "seed": 1})
    # What is missing of a curve may be a plan of more tokens than a context has: that is no crash.
    assert record_evaluation(mot, {**crashed, "missing": {"squad": {"translated@tokens:9": "short"}}, "seed": 2})
    assert not record_evaluation(mot, crashed)
    assert json.loads((mot / "fit_report.json").read_text())["evaluation"]["seed"] == 2
