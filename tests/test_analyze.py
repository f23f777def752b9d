"""`hf-mot analyze`: table, figures, plot, and a fit that goes by them."""

import json

import pytest
import torch
from conftest import make_documents, make_pair, make_random_translator, make_translator, save_pair
from evaluation_pair import make_examples, write_examples
from transformers.utils import logging as transformers_logging

from hf_mot import MoTModel
from hf_mot.analysis.sensitivity import summarise
from hf_mot.cli.analyze import format_sensitivity
from hf_mot.cli.main import main


@pytest.fixture(autouse=True)
def logging_as_before():
    """The command line changes what this process logs and shows."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    yield
    transformers_logging.set_verbosity(verbosity)
    if bars:
        transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, pair = tmp_path_factory.mktemp("analyze"), make_pair()
    save_pair(pair, folder)
    make_translator(pair).save_pretrained(folder / "translator")
    (folder / "train.txt").write_text("\n".join(make_documents(20)), encoding="utf-8")
    (folder / "valid.txt").write_text("\n".join(make_documents(3, seed=1)), encoding="utf-8")
    write_examples(folder / "data", "squad", make_examples(3))
    return folder


@pytest.fixture(scope="module")
def command(folder):
    models = ("--source", str(folder / "source"), "--target", str(folder / "target"))
    return ["analyze", str(folder / "translator"), *models]


def fails(capsys, argv: list[str]) -> str:
    assert main(argv) == 1
    return capsys.readouterr().err


def test_analyze_then_fit_by_it(folder, command, capsys):
    pytest.importorskip("matplotlib")
    measured = ["--text", str(folder / "valid.txt"), "--lines", "--context", "24", "--tasks", "squad"]
    measured += ["--data", str(folder / "data"), "--limit", "3", "--reverse"]
    out, plot = folder / "sensitivity.json", folder / "sensitivity.png"
    assert main([*command, "--sensitivity", *measured, "--json", str(out), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "llama → gemma3_text, plan none, seed 0" in printed
    assert "context_nll: 3 scored" in printed and "squad: 3 scored" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(out.read_text(encoding="utf-8"))
    assert list(report["measures"]) == ["context_nll", "squad"] and len(report["unexplained"]) == 6
    assert report["command"].startswith("hf-mot analyze translator --source source")

    fit = ["fit", *command[2:], "--text", str(folder / "train.txt"), "--lines", "--layers", "2", "--rank", "8"]
    weighted = ["--sensitivity", str(out), "--sensitivity-power", "0.5", "--key-metric", "query"]
    assert main([*fit, *weighted, "--tokens", "1000", "--out", str(folder / "weighted")]) == 0
    printed = capsys.readouterr().out
    assert "weighted; heaviest: " in printed and "errors of keys measured by the target's queries" in printed
    fitted = MoTModel.from_pretrained(folder / "weighted").fit_report
    assert len(fitted["piece_weights"]) == 3 and fitted["key_metric"] == "query"
    assert (fitted["sensitivity"]["name"], fitted["sensitivity"]["power"]) == ("sensitivity.json", 0.5)


def test_what_is_lost_is_a_share_of_the_contexts_worth():
    losses = {
        "native": torch.tensor([1.0, 2.0, 3.0]).double(),
        "no_context": torch.tensor([3.0, 3.0, 6.0]).double(),  # worth 2 on average
        "translated": torch.tensor([1.5, 2.5, 4.0]).double(),
        (0, "keys"): torch.tensor([1.5, 2.0, 3.4]).double(),
        ("restored", (0, "keys")): torch.tensor([1.0, 2.5, 3.5]).double(),
    }
    figures = summarise(losses, [(0, "keys")], seed=0, clusters=[0, 1, 2])
    assert figures["lost"]["value"] == pytest.approx(2 / 6)
    (piece,) = figures["pieces"]
    assert piece["cost"]["value"] == pytest.approx(0.3)
    assert piece["lost"]["value"] == pytest.approx(0.9 / 6)
    assert piece["restored"]["value"] == pytest.approx(1 / 6)
    assert piece["lost"]["low"] < piece["lost"]["value"] < piece["lost"]["high"]
    report = {
        "pair": {"source": "a", "target": "b"},
        "replay": "none",
        "seed": 0,
        "measures": {"squad": {"n": 3, "skipped": {"too_long": 2}, **figures}},
        "unexplained": [{"layer": 0, "states": "keys", "value": 0.25}],
    }
    text = format_sensitivity(report)
    assert "squad: 3 scored, 2 skipped (too_long); NLL 2.0000 native, 2.6667 translated, 4.0000 without" in text
    assert "0      keys          0.250   0.150  [" in text and "won back by it alone" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--text", "x"], "No analysis is chosen. Give --sensitivity"),
        (["--sensitivity"], "`--text` and `--tasks` are both missing"),
        (["--sensitivity", "--text", "x", "--json", "/no/such/out.json"], "`--json` names a file in a folder that"),
        (["--sensitivity", "--text", "x", "--plot", "out.txt"], "`--plot` must name a .png, .svg or .pdf file"),
        (["--sensitivity", "--tasks", "sqad"], "`tasks` holds 'sqad', which is no task. Did you mean squad?"),
    ],
)
def test_bad_input_is_one_clear_line(command, capsys, argv, message):
    error = fails(capsys, [*command, *argv])
    assert message in error and error.startswith("hf-mot analyze: error: ") and error.count("\n") == 1


def test_plan_that_resumes_is_refused_before_a_model_is_loaded(folder, tmp_path, capsys):
    make_random_translator(make_pair(), resume_layer=2).save_pretrained(tmp_path)
    absent = ["--source", "absent", "--target", "absent", "--text", str(folder / "valid.txt")]
    assert "Pass replay='full', by which they are native" in fails(
        capsys, ["analyze", str(tmp_path), "--sensitivity", *absent]
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sensitivity-power", "2"], "`--sensitivity-power` has no effect without `--sensitivity`"),
        (["--key-metric", "qeury"], "`--key-metric` is 'qeury'. Did you mean query?"),
        (["--sensitivity", "{folder}/valid.txt"], "`--sensitivity` must name a JSON file"),
    ],
)
def test_a_fit_checks_its_weights_first(folder, capsys, argv, message):
    argv = [part.format(folder=folder) for part in argv]
    fit = ["fit", "--source", "a", "--target", "b", "--text", "c", "--out", str(folder / "new")]
    assert message in fails(capsys, [*fit, *argv])
