"""Recipes of many commands, such as paper_mode.sh: these are real and run once; the pages hold what was measured."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_documents, make_pair
from evaluation_pair import make_pair as make_evaluated_pair

from hf_mot.cli.main import parse
from hf_mot.cli.train import training_arguments, translator_settings, twin_arguments
from hf_mot.configuration_mot import PAPER
from hf_mot.evaluation import evaluate, save_report
from hf_mot.training.start import new_translator, pair_contracts

EXAMPLES = Path(__file__).parent.parent / "examples"
# Keeps what it is told, and leaves behind what the scripts look for.
STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys
with open(os.environ["COMMANDS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
names = ("--out", "--json", "--report", "--max-steps")
given = {{name: value for name, value in zip(sys.argv, sys.argv[1:]) if name in names}}
if "--json" in given:
    pathlib.Path(given["--json"]).write_text("{{}}")
    pathlib.Path(given["--json"]).with_suffix(".examples.jsonl").write_text("")
elif "--report" not in given:
    out = pathlib.Path(given["--out"])
    (out / f"checkpoints/checkpoint-{{given.get('--max-steps')}}").mkdir(parents=True, exist_ok=True)
    (out / f"checkpoints/checkpoint-{{given.get('--max-steps')}}/trainer_state.json").write_text("{{}}")
    (out / "config.json").write_text('{{"target_layers": [0, 1], "source_layers": [0, 2]}}')
    (out / "report.json").write_text('{{"best": {{"start": 2}}}}')
"""


@pytest.fixture
def script(tmp_path):
    """Runs a script with a stand-in for hf-mot; what the real parser makes of its commands, by their output."""
    for name in ("train/a.txt.gz", "train/b.txt.gz", "valid/c.txt.gz"):
        (tmp_path / "data" / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "text" / name).write_text("text")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hf-mot").write_text(STAND_IN)
    (tmp_path / "bin" / "hf-mot").chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)

    def run(name: str, **environment: str) -> list:
        commands = tmp_path / "commands.jsonl"
        commands.unlink(missing_ok=True)
        path = f"{tmp_path / 'bin'}:{os.defpath}"
        words = ["sh", str(EXAMPLES / name), str(tmp_path / "data"), str(tmp_path / "out")]
        environment = {"PATH": path, "COMMANDS": str(commands), **environment}
        subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
        lines = commands.read_text().splitlines() if commands.exists() else []
        return [parse(json.loads(line)) for line in lines]

    return run


@pytest.fixture(scope="module")
def contracts():
    return pair_contracts(**make_pair())


def translator_of(args, contracts):
    return new_translator(contracts, **translator_settings(args)).config


def test_paper_mode_trains_each_form_once_on_the_same_budget(script, contracts, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    commands = script("paper_mode.sh", WIDTH="8")
    search = commands.pop(0)
    assert search.command == "search-channels" and search.max_steps == 30
    assert not {*search.text, *search.eval_text} & {str(tmp_path / "data" / "text" / "valid" / "c.txt.gz")}
    trained = {Path(args.out).relative_to(tmp_path / "out").as_posix(): args for args in commands if "config" in args}
    assert len(trained) == 16 + 5 and {"start-0/mot-2", "start-2/mot-0", "start-2/control"} <= trained.keys()
    for name, args in trained.items():
        training, config = training_arguments(args), translator_of(args, contracts)
        assert (training.max_steps, training.per_device_train_batch_size) == (200, 4)
        assert training.gradient_accumulation_steps == 1 and training.losses == {"cc": 1, "pl": 1}
        assert args.seed == (0 if name.endswith("control") else int(name[-1]))
        assert config.target_layers[0] == int(name[len("start-")])
        differs = {field for field, value in PAPER.items() if getattr(config, field) != value}
        of_form = {"single": {"num_translators"}, "uniform": {"routing"}, "mlp": {"method"}, "routing": {"routing"}}
        of_form |= {"activation": {"output_activation"}, "position": {"position_free"}}
        of_form |= {"embedding": {"embedding_window"}, "control": {"embedding_window"}}
        of_form["best"] = {"routing", "output_activation", "position_free", "embedding_window", "linear_path"}
        assert differs == of_form.get(Path(name).name.split("-")[0], set())
        assert args.twin == name.endswith("best-0")
        assert args.dtype == ("bfloat16" if name.endswith("bf16-0") else "float32")
    assert translator_of(trained["start-0/moe-0"], contracts).experts == "ffn"
    assert translator_of(trained["start-0/control"], contracts).source_layers == []
    assert translator_of(twin_arguments(trained["start-0/best-0"]), contracts).source_layers == []

    measured = {args.json: args for args in commands if args.command == "evaluate"}
    assert len(measured) == 16 + 5
    assert {args.replay for name, args in measured.items() if "closed" in name} == {"full:0-1"}
    assert (tmp_path / "out" / "start-0" / "mot-0" / "no_source" / "config.json").exists()
    assert [args.tokens for args in commands if args.command == "fit"] == [200 * 4 * 128]
    assert not list((tmp_path / "out").rglob("checkpoint-200"))
    assert script("paper_mode.sh", WIDTH="8") == []


def test_skip_prefill_trains_on_what_the_fit_reads(script, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    fitted, captured, trained, *measured = script("skip_prefill.sh")
    assert fitted.flops_share == 0.125 and captured.source_layers == [0, 2]
    assert trained.init == fitted.out and trained.states == captured.out and trained.twin
    training = training_arguments(trained)
    assert (training.max_steps, training.losses, training.train_only) == (320, {"distill": 1}, "gain|bias|up")
    assert [args.context for args in measured] == [256, 256, 1024, 4096]
    assert {args.translator for args in measured} == {trained.out}
    assert "no_source" in measured[0].arms and not {*captured.text, *fitted.text} & {*measured[1].text}
    back = script("skip_prefill.sh", SOURCE="demo/gemma-3-270m", TARGET="demo/smollm2-135m-instruct")
    assert {(args.source, args.target) for args in back if "source" in args and args.source} == {
        ("demo/gemma-3-270m", "demo/smollm2-135m-instruct")
    }


def test_paper_mode_takes_a_window_and_a_choice_of_runs(script):
    names = [Path(args.out).name for args in script("paper_mode.sh", START="0", RUNS="single-1") if "config" in args]
    assert names == ["control", "single-1"]
    there = script("paper_mode.sh", START="1", WINDOWS="1", RUNS="control mlp-0 moe-0")
    assert ["/".join(Path(args.out).parts[-2:]) for args in there if "config" in args] == [
        "start-1/control",
        "start-1/moe-0",
    ]


def test_paper_figures_trains_each_point_once(script, contracts, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    environment = {"WIDTH": "8", "DEPTH": str(len(contracts["target"]["geometry"]["layers"]))}
    commands = script("paper_figures.sh", **environment)
    trained = {Path(args.out).name: args for args in commands if "config" in args}
    assert len(trained) == 2 * 5 + 5
    depth = int(environment["DEPTH"])
    for name, args in trained.items():
        config, training = translator_of(args, contracts), training_arguments(args)
        assert training.max_steps == 50
        layers = list(range(depth)) if config.target_layers is None else config.target_layers
        if name.startswith("terminal"):
            assert layers[-1] == depth - 1
        if name.startswith("grid"):
            assert f"grid-{config.num_translators}-{config.top_k}" == name
    plans = {Path(args.json).stem: args.curve for args in commands if getattr(args, "curve", None)}
    assert plans.keys() == {"layers-64", "layers-128", "sparse-256", "sparse-1024", "sparse-4096"}
    assert plans["layers-64"].startswith("full,sparse:64/0,sparse:64/1")
    assert script("paper_figures.sh", **environment) == []


def render(name: str, monkeypatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *argv])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture(scope="module")
def results():
    """What an evaluation by plan full within a window gives, cost included, of documents with a measurable context."""
    pair = {**make_evaluated_pair(), "cost": True}
    arms = ["native", "no_context", "translated", "no_source", "wrong_source"]
    report = evaluate(documents=make_documents(4), arms=arms, replay="full:1-1", **{**pair, "context_length": 24})
    figure = {"value": 0.5, "low": 0.4, "high": 0.6}
    report["arms"]["wrong_source"]["recovery"] = figure  # of models without training none is defined
    for row in report["documents"]:
        row["native"] = row["no_context"] - 0.1
    return {
        **report,
        "recovery": figure,
        "source_value": {"value": 0.25, "low": 0.2, "high": 0.3},
        "command": "hf-mot …",
    }


def test_page_of_the_papers_mode(results, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    shifted = {**results, "recovery": {"value": 0.7, "low": 0.6, "high": 0.8}}
    shifted["documents"] = [{**row, "translated": row["translated"] - 0.01} for row in results["documents"]]
    for name, result in (("mot-0", results), ("mot-1", shifted), ("single-0", shifted)):
        made = tmp_path / "out" / "start-1" / name
        made.mkdir(parents=True)
        save_report(result, made.with_suffix(".json"))
        (made / "fit_report.json").write_text(json.dumps({"training": {"steps": 2, "tokens": 1024}}))
        state = {"log_history": [{"router_cv2": 0.31, "router_entropy": 0.52}, {"train_loss": 1}]}
        (made / "trainer_state.json").write_text(json.dumps(state))
    files = ["--json", str(tmp_path / "all.json"), "--markdown", str(tmp_path / "page.md")]
    render("paper_mode_report.py", monkeypatch, str(tmp_path / "out"), *files)
    assert "search" not in (tmp_path / "page.md").read_text()  # there was none
    search = {"windows": [{"start": at, "target_layers": [at, at + 1], "eval_loss": 4.5 - at} for at in (0, 1)]}
    search |= {"best": search["windows"][1], "command": "hf-mot search-channels …", "channel_ratio": 0.3}
    (tmp_path / "out" / "search").mkdir()
    save_report(search, tmp_path / "out" / "search" / "report.json")
    render("paper_mode_report.py", monkeypatch, str(tmp_path / "out"), *files)
    page = (tmp_path / "page.md").read_text()
    assert "| 1-2 | 3.500 |" in page and (tmp_path / "page" / "windows.png").stat().st_size > 1000
    mot, single = (
        next(line for line in page.splitlines() if line.startswith(f"| {own}")) for own in ("MoT, the", "single")
    )
    assert "| 2 | fp32 | 0.60 (0.50 to 0.70) |" in mot and "0.31 | 0.52" in mot and "0.25 (0.25 to 0.25)" in mot
    assert "| 1 | fp32 | 0.70 [0.60, 0.80] | 0.10 [0.10, 0.10] | 0.25 [0.20, 0.30] |" in single
    assert "## Window 1-1" in page and "| Keys, cosine by layer | 1 | 2 |" in page
    first = next(run for run in json.loads((tmp_path / "all.json").read_text())["runs"] if run["name"] == "mot")
    assert "documents" not in first["result"] and first["result"]["versions"]
    render("paper_mode_report.py", monkeypatch, *files)  # of the file alone
    assert (tmp_path / "page.md").read_text() == page
    for path in (tmp_path / "out").rglob("single-0*"):  # measured elsewhere
        path.rename(tmp_path / path.name)
    render("paper_mode_report.py", monkeypatch, str(tmp_path / "out"), *files)
    assert (tmp_path / "page.md").read_text() == page


def test_page_of_the_papers_figures(results, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    (tmp_path / "out").mkdir()
    for name in ("depth_ratio-0.3", "depth_ratio-1.0", "terminal-1.0", "grid-2-1", "grid-4-2"):
        save_report(results, tmp_path / "out" / f"{name}.json")
    points = [
        {"replay": plan, "recovery": results["recovery"], "cost": results["cost"]}
        for plan in ("full:1-1", "full:1-1+sparse:16", "full:1-1+sparse:128/4")
    ]
    for name in ("layers-128", "sparse-256", "sparse-1024"):
        save_report({**results, "curve": points}, tmp_path / "out" / f"{name}.json")
    files = ["--json", str(tmp_path / "all.json"), "--markdown", str(tmp_path / "page.md")]
    render("paper_figures_report.py", monkeypatch, str(tmp_path / "out"), *files)
    page = (tmp_path / "page.md").read_text()
    assert "| terminal | 1.0 | 0.50 [0.40, 0.60] | 0.50 [0.40, 0.60] |" in page
    assert "| 2 of 4 | 0.50 [0.40, 0.60] |" in page and "| Top-128 | full | 0.50" in page
    assert "| Top-128 | 4 | 0.50" in page and "| 1024 tokens | 16 | 0.50" in page
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == [
        *("grid.png", "layers.png", "mapping.png", "sparse.png")
    ]
