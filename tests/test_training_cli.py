"""`hf-mot train` and the examples of training, on a tiny pair."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_documents, make_pair, save_pair
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_mot import MoTModel
from hf_mot.cli.main import main
from hf_mot.data.states import StatesDataset
from hf_mot.fit import fit, loss_weights, save_fit
from hf_mot.training import MoTTrainer
from hf_mot.training.start import continue_from, new_translator, pair_contracts

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tiny models (`source`, `target`), text to train on and to measure on, and a closed-form fit."""
    folder, pair = tmp_path_factory.mktemp("train"), make_pair()
    save_pair(pair, folder)
    (folder / "train.txt").write_text("\n".join(make_documents(30)), encoding="utf-8")
    (folder / "valid.txt").write_text("\n".join(make_documents(6, words=80, seed=1)), encoding="utf-8")
    found = fit(make_documents(10), **pair, source_layers=[0, 2], rank=8, embedding_window=2, max_tokens=500)
    save_fit(found, folder / "fitted")
    return folder


@pytest.fixture
def command(folder):
    """A short training; `--out` is left to the test."""
    return [
        *("train", "--source", str(folder / "source"), "--target", str(folder / "target")),
        *("--text", str(folder / "train.txt"), "--lines", "--length", "40", "--context", "12-20"),
        *("--init", str(folder / "fitted"), "--batch-size", "2", "--accumulation", "1", "--max-steps", "2"),
    ]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def fails(capsys, argv: list[str]) -> str:
    assert main(argv) == 1
    return " ".join(capsys.readouterr().err.split())


def test_train_goes_on_from_a_fit_and_writes_a_translator(folder, command, tmp_path, capsys):
    out = tmp_path / "out"
    measured = ["--eval-text", str(folder / "valid.txt"), "--eval-context", "24", "--eval-steps", "1"]
    twin = ["--no-source", str(folder / "fitted" / "no_source"), "--best", "loss"]
    assert main([*command, *measured, *twin, "--out", str(out), "--json", str(tmp_path / "report.json")]) == 0
    assert "trained 2 steps" in capsys.readouterr().out
    mot, fitted = MoTModel.from_pretrained(out), MoTModel.from_pretrained(folder / "fitted")
    change = (mot.translator.up.weight - fitted.translator.up.weight).abs().max()
    assert 0 < change < 1e-5  # two steps at a hundredth of the learning rate of 1e-4
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == mot.fit_report and report["ridge"] == fitted.fit_report["ridge"]
    training = report["training"]
    assert training["settings"]["linear_learning_rate"] == pytest.approx(1e-6)
    assert training["steps"] == 2 and training["held_out"]["loss"] > 0
    assert training["corpus"][0]["name"] == "train.txt" and str(tmp_path) not in json.dumps(report)
    card = (out / "README.md").read_text()
    assert "trained: 2 steps of 2 sequences" in card and "losses 1 × cc + 1 × pl" in card
    assert AutoModel.from_pretrained(out, trust_remote_code=True).config.rank == 8


@pytest.mark.parametrize("init", [True, False])
def test_train_trains_a_twin_alike_that_reads_no_source(folder, command, tmp_path, capsys, init):
    out = tmp_path / "out"
    if not init:
        start = command.index("--init")
        command[start : start + 2] = ["--layers", "2", "--config", "hidden_size=8", "num_attention_heads=2"]
    measured = ["--eval-text", str(folder / "valid.txt"), "--eval-context", "24", "--eval-steps", "2"]
    command += [*measured, "--twin", "--best", "loss", "--out", str(out)]
    assert main(command) == 0
    mot, twin = MoTModel.from_pretrained(out), MoTModel.from_pretrained(out / "no_source")
    assert mot.config.source_layers == ([0, 2]) and twin.config.source_layers == []
    assert mot.fit_report["training"]["settings"] == twin.fit_report["training"]["settings"]
    before = twin.state_dict()
    assert main(command) == 0  # both are done: nothing is trained again
    assert MoTModel.from_pretrained(out).fit_report["training"]["steps"] == 2
    assert all(
        torch.equal(w, before[name]) for name, w in MoTModel.from_pretrained(out / "no_source").state_dict().items()
    )
    arms = ["--arms", "native,no_context,translated,no_source", "--no-cost", "--context", "24", "--lines"]
    models = ["--source", str(folder / "source"), "--target", str(folder / "target")]
    assert main(["evaluate", str(out), *models, "--text", str(folder / "valid.txt"), *arms]) == 0
    assert "no_source" in capsys.readouterr().out


def test_train_computes_in_bf16_without_an_accelerator_too(command, tmp_path):
    assert main([*command, "--bf16", "--out", str(tmp_path / "out")]) == 0
    assert MoTModel.from_pretrained(tmp_path / "out").fit_report["training"]["settings"]["bf16"]


def test_best_by_what_is_not_defined_is_an_error(folder, command, tmp_path, capsys):
    """Models without training predict a text no better for having read its beginning."""
    measured = ["--eval-text", str(folder / "valid.txt"), "--eval-context", "24", "--eval-steps", "1"]
    message = fails(capsys, [*command, *measured, "--best", "recovery", "--out", str(tmp_path / "out")])
    assert "`metric_for_best_model` is recovery, which these documents do not define" in message


def test_twin_that_cannot_be_trained_is_refused_before_anything_is_loaded(folder, command, tmp_path, capsys):
    MoTModel.from_pretrained(folder / "fitted").save_pretrained(tmp_path / "alone")
    command += ["--twin", "--out", str(tmp_path / "out"), "--source", str(tmp_path / "none")]
    assert "`--twin` needs a twin to start from" in fails(capsys, [*command, "--init", str(tmp_path / "alone")])
    assert "`--twin` trains the twin that `--no-source` names." in fails(capsys, [*command, "--no-source", "x"])
    assert not (tmp_path / "out").exists()


def test_train_keeps_weights_in_fp32_whatever_it_starts_from(folder, command, tmp_path):
    MoTModel.from_pretrained(folder / "fitted").bfloat16().save_pretrained(tmp_path / "half")
    assert main([*command, "--init", str(tmp_path / "half"), "--out", str(tmp_path / "out")]) == 0
    assert MoTModel.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    assert MoTModel.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_train_goes_on_where_it_was_killed(command, tmp_path, capsys, monkeypatch):
    """And not where its settings are others."""
    save = MoTTrainer._save_rng_state

    def killed_in_the_second_step(trainer, folder):
        if trainer.state.global_step == 2:
            raise KeyboardInterrupt
        save(trainer, folder)

    command += ["--save-steps", "1"]
    monkeypatch.setattr(MoTTrainer, "_save_rng_state", killed_in_the_second_step)
    assert main([*command, "--out", str(tmp_path / "killed")]) == 130
    assert not (tmp_path / "killed" / "config.json").exists()
    monkeypatch.undo()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    message = fails(capsys, [*command, "--out", str(tmp_path / "killed"), "--losses", "pl"])
    assert "was made with other settings: `settings.losses.cc` is 1.0, expected None. Resume with" in message
    message = fails(capsys, [part for part in [*command, "--out", str(tmp_path / "killed")] if part != "--lines"])
    assert "was made with other settings: `lines` is True, expected False" in message
    message = fails(capsys, [*command, "--out", str(tmp_path / "killed"), "--dtype", "bfloat16"])
    assert "was made with other settings: `dtype` is 'float32', expected 'bfloat16'" in message
    for name in ("killed", "whole"):
        assert main([*command, "--out", str(tmp_path / name)]) == 0
    killed, whole = (MoTModel.from_pretrained(tmp_path / name).state_dict() for name in ("killed", "whole"))
    assert all(torch.equal(weight, whole[name]) for name, weight in killed.items())


def test_train_weighs_losses_on_states_by_a_sensitivity(folder, command, tmp_path, capsys):
    measured = tmp_path / "sensitivity.json"
    text = ["--text", str(folder / "valid.txt"), "--lines", "--context", "16", "--json", str(measured)]
    models = ["--source", str(folder / "source"), "--target", str(folder / "target")]
    assert main(["analyze", str(folder / "fitted"), *models, "--sensitivity", *text]) == 0
    weighted = ["--sensitivity", str(measured), "--sensitivity-power", "0.5"]
    assert main([*command, "--out", str(tmp_path / "out"), *weighted]) == 0
    mot = MoTModel.from_pretrained(tmp_path / "out")
    expected = loss_weights(json.loads(measured.read_text()), mot.config.target, 0.5)
    assert mot.fit_report["training"]["settings"]["layer_weights"] == [list(own) for own in expected]
    assert main([*command, "--out", str(tmp_path / "plain")]) == 0
    plain = MoTModel.from_pretrained(tmp_path / "plain")
    assert not torch.equal(mot.translator.up.weight, plain.translator.up.weight)
    resumed = fails(capsys, [*command, "--out", str(tmp_path / "out"), "--max-steps", "3"])
    assert "was made with other settings: `settings.layer_weights` is" in resumed
    unread = fails(capsys, [*command, "--out", str(tmp_path / "new"), *weighted, "--losses", "distill=1"])
    assert "`layer_weights` weigh losses on states, but `losses` has distill alone" in unread


def test_train_on_captured_states_does_not_load_the_source(folder, command, tmp_path, capsys, monkeypatch):
    pair = [*command[1:5], "--text", str(folder / "train.txt"), "--lines", "--length", "40", "--context", "12", "20"]
    captured = ["capture", *pair, "--source-layers", "0", "2", "--out", str(tmp_path / "states"), "--examples", "8"]
    assert main(captured) == 0
    monkeypatch.setattr("hf_mot.hub.resolve.load_tokenizer", lambda name: AutoTokenizer.from_pretrained(name))
    loaded = []
    monkeypatch.setattr(
        "hf_mot.hub.resolve.load_model",
        lambda name, **kwargs: loaded.append(name) or AutoModelForCausalLM.from_pretrained(name),
    )
    start = command.index("--text")
    arguments = [*command[:start], "--states", str(tmp_path / "states"), *command[command.index("--batch-size") :]]
    options = ["--config", "rank=4", "embedding_window=2", "--losses", "cc=1,distill=1"]
    options += ["--vocabulary-size", "50"]
    assert main([*arguments, *options, "--out", str(tmp_path / "out")]) == 0
    assert loaded == [str(folder / "target")]
    mot = MoTModel.from_pretrained(tmp_path / "out")
    assert mot.config.source_layers == [0, 2] and mot.config.rank == 4
    report = mot.fit_report["training"]
    assert report["corpus"][0]["name"] == "8 captured examples" and report["corpus"][0]["context_tokens"] > 8
    assert not {"length", "context_length", "copy_share"} & report["settings"].keys()  # those are the capture's
    with pytest.raises(ValueError, match="`--length` has no effect with `--states`"):
        main([*arguments, *options, "--length", "40", "--out", str(tmp_path / "other"), "--debug"])
    other = [*arguments, *options, "--out", str(tmp_path / "other")]
    assert "`--lines` has no effect with `--states`" in fails(capsys, [*other, "--lines"])
    message = f"`--source` {folder / 'target'} is not the model whose states {tmp_path / 'states'} holds"
    assert message in fails(capsys, [*other, "--source", str(folder / "target")])
    index = tmp_path / "states" / "index.json"
    index.write_text(index.read_text().replace('"id": null', '"id": "org/one"'))
    message = f"`--source` org/two is not the model whose states {tmp_path / 'states'} holds, org/one"
    assert message in fails(capsys, [*other, "--source", "org/two"])
    index.write_text(index.read_text().replace('"adapter": null', '"adapter": {"float32": "hash"}', 1))
    assert '"hash"' in json.dumps(json.loads(index.read_text())["source"])
    monkeypatch.setattr(
        "hf_mot.hub.resolve.load_tokenizer",
        lambda name: AutoTokenizer.from_pretrained(folder / "source" if name == "org/adapter" else name),
    )
    assert main([*other, "--source", "org/adapter"]) == 0  # the contract's id is that of the model below it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--losses", "kl"], "`losses` names 'kl'"),
        (["--method", "mto"], "`--method` is 'mto'"),
        (["--config", "rank"], "`--config` must be NAME=VALUE, got 'rank'"),
        (["--config", "rank=4"], "`closed_form` was fitted with `rank` 8, but this translator has 4"),
        (["--start", "1"], "`--start` is for a new translator, but `--init` has its layers"),
        (["--config", "rnak=4"], "`rnak` is not a field of MoTConfig"),
        (["--best", "recovery"], "`--best` recovery needs `--eval-text`"),
        (["--length", "2000", "--context", "1900"], "`documents` holds no document of 1900 + 100 target tokens"),
        (["--sensitivity-power", "2"], "`--sensitivity-power` has no effect without `--sensitivity`"),
        (["--eval-context", "24"], "`--eval-context` has no effect without `--eval-text`"),
        (["--eval-limit", "8"], "`--eval-limit` has no effect without `--eval-text`"),
        (["--eval-steps", "8"], "`--eval-steps` has no effect without `--eval-text`"),
        (["--no-source", "x"], "`--no-source` has no effect without `--eval-text`"),
        (
            ["--eval-text", "valid.txt", "--best", "loss", "--save-steps", "1"],
            "`--save-steps` has no effect with `--best`",
        ),
        (["--twin", "--start", "1"], "`--start` is for a new translator, but `--init` has its layers"),
        (["--max-steps", "0"], "`--max-steps` must be 1 step or more, got 0"),
        (["--save-steps", "0"], "`--save-steps` must be 1 step or more, got 0"),
        (["--batch-size", "0"], "`per_device_train_batch_size` must be 1 or more, got 0"),
        (["--accumulation", "0"], "`gradient_accumulation_steps` must be"),
        (["--learning-rate", "nan"], "`learning_rate` must be a number of 0 or more, got nan"),
        (["--linear-learning-rate", "-1"], "`linear_learning_rate` must be"),
        (["--eval-text", "valid.txt", "--eval-limit", "0"], "`eval_limit` must be"),
        (["--eval-text", "valid.txt", "--eval-steps", "0"], "`--eval-steps` must be 1 step or more, got 0"),
        (["--losses", "cc=inf"], "`losses` must have weights of 0 or more, at least one above 0 and all finite"),
        (["--replay", "full", "--config", "replay=none"], "`--config` gives `replay` again, after `--replay`"),
        (["--text", "nowhere.txt"], "nowhere.txt, which does not exist"),
        (["--replay", "uncertain:3"], "no loss would reach these. Train with replay='none'"),
    ],
)
def test_train_refuses_bad_arguments_before_any_step(folder, command, tmp_path, capsys, monkeypatch, change, message):
    monkeypatch.setattr(MoTTrainer, "train", None)
    monkeypatch.chdir(folder)
    assert message in fails(capsys, [*command, "--out", str(tmp_path / "out"), *change])
    assert not any(tmp_path.iterdir())


def test_a_window_that_other_options_choose_already_is_refused(command, tmp_path, capsys):
    start = command.index("--init")
    command = [*command[:start], *command[start + 2 :], "--out", str(tmp_path / "out")]
    for options, again in (
        (["--layers", "2", "--config", "source_layers=[0]"], "`source_layers` again, after `--layers`"),
        (["--start", "1", "--config", "target_layers=[0]"], "`target_layers` again, after `--start`"),
        (
            ["--channel-ratio", "0.3", "--config", "target_layers=[0]"],
            "`target_layers` again, after `--channel-ratio`",
        ),
    ):
        assert again in fails(capsys, [*command, *options])


def test_train_overwrites_checkpoints_alone(command, tmp_path, capsys):
    (tmp_path / "letters.txt").write_text("dear")
    assert "is not empty, and holds no checkpoints" in fails(capsys, [*command, "--out", str(tmp_path)])
    assert (tmp_path / "letters.txt").read_text() == "dear"


def test_refused_training_leaves_what_it_was_to_overwrite(command, tmp_path, capsys):
    checkpoint = tmp_path / "out" / "checkpoints" / "checkpoint-2" / "model.safetensors"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"weights")
    again = [*command, "--out", str(tmp_path / "out"), "--overwrite", "--replay", "uncertain:3"]
    assert "no loss would reach these. Train with replay='none'" in fails(capsys, again)
    assert checkpoint.read_bytes() == b"weights"


def test_new_translator_reads_evenly_spaced_layers():
    pair = pair_contracts(**make_pair())
    found = [new_translator(pair, num_source_layers=count).config.source_layers for count in (1, 2, 10)]
    assert found == [[0], [0, 2], [0, 1, 2]]
    with pytest.raises(ValueError, match="`num_source_layers` must be at least 1, got 0"):
        new_translator(pair, num_source_layers=0)
    model = new_translator(pair)
    assert continue_from(model, method="mot") is model


def test_example_trains_a_pair(folder, tmp_path, monkeypatch, capsys):
    arguments = {
        **{"--source": folder / "source", "--target": folder / "target", "--text": folder / "train.txt"},
        **{"--eval_text": folder / "valid.txt", "--rank": 8, "--output_dir": tmp_path, "--use_cpu": True},
        **{"--max_steps": 2, "--length": 40, "--context_length": 20, "--losses": "cc=1,distill=0.5"},
        **{"--eval_strategy": "steps", "--eval_steps": 1, "--eval_context_length": 24, "--lines": True},
        **{"--per_device_train_batch_size": 2, "--gradient_accumulation_steps": 1},
    }
    monkeypatch.setattr(sys, "argv", ["train_pair.py", *(str(part) for pair in arguments.items() for part in pair)])
    runpy.run_path(str(EXAMPLES / "train_pair.py"), run_name="__main__")
    assert "2 steps" in capsys.readouterr().out
    training = AutoModel.from_pretrained(tmp_path).fit_report["training"]
    assert training["settings"]["losses"] == {"cc": 1.0, "distill": 0.5} and training["held_out"]["loss"] > 0


def test_overhead_is_measured(folder, tmp_path, monkeypatch, capsys):
    arguments = ["--source", folder / "source", "--target", folder / "target", "--text", folder / "train.txt"]
    arguments += ["--lines"]
    captured = ["--length", 40, "--context", 20, "--source-layers", 0, 2, "--examples", 8]
    captured += ["--out", tmp_path / "states"]
    assert main(["capture", *map(str, [*arguments, *captured])]) == 0
    arguments += ["--steps", 2, "--rank", 8, "--json", tmp_path / "overhead.json", "--use_cpu", "true"]
    arguments += ["--length", 40, "--context_length", 20, "--gradient_accumulation_steps", 1, "--disable_tqdm", "true"]
    arguments += ["--states", tmp_path / "states", "--losses", "cc"]
    monkeypatch.setattr(sys, "argv", ["training_overhead.py", *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / "training_overhead.py"), run_name="__main__")
    report = json.loads((tmp_path / "overhead.json").read_text())
    assert 0 < report["overhead"] < 1 and report["steps"] == 2
    # Regression on states: no text is predicted, so the head does not run.
    assert set(report["passes_s"]) == {"source", "translator", "target", "backward"}
    assert 0 < sum(report["passes_s"].values()) < report["step_s_range"][1]
    assert report["memory_peak_bytes"] >= report["memory_growth_bytes"] >= 0
    states = report["states"]
    assert states["examples"] == 8 and states["speedup"] == pytest.approx(report["step_s"] / states["step_s"])
    assert "from captured states a step takes" in capsys.readouterr().out


def test_learning_curve_judges_a_run_on_held_out_states(folder, command, tmp_path, monkeypatch, capsys):
    pair = [*command[1:5], "--lines", "--length", "60", "--context", "20", "30", "--source-layers", "0", "2"]
    pair += ["--top-logits", "hidden", "--copy-share", "0.5"]
    for name, file in (("states", "train.txt"), ("held_out", "valid.txt")):
        text = ["--text", str(folder / file), "--out", str(tmp_path / name)]
        assert main(["capture", *pair, *text]) == 0
    start, stop = command.index("--text"), command.index("--init")
    run = [*command[:start], *command[stop:], "--states", str(tmp_path / "states"), "--losses", "distill=1"]
    assert main([*run, "--save-steps", "1", "--out", str(tmp_path / "out")]) == 0
    judged = [folder / "fitted", *sorted((tmp_path / "out" / "checkpoints").iterdir()), tmp_path / "out"]
    argv = ["learning_curve.py", tmp_path / "held_out", *judged, "--target", folder / "target", "--short", 24]
    argv += ["--json", tmp_path / "curve.json", "--plot", tmp_path / "curve.png"]
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    runpy.run_path(str(EXAMPLES / "learning_curve.py"), run_name="__main__")
    own = runpy.run_path(str(EXAMPLES / "learning_curve.py"))["_native"]
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    example = StatesDataset(tmp_path / "held_out")[0]
    logits = target(example["prompt_ids"][None].long()).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, example["prompt_ids"][1:].long()).item()
    assert own(target, example, 0)["no_context"] == pytest.approx(expected, rel=1e-4)  # a target without prefix
    report = json.loads((tmp_path / "curve.json").read_text())
    assert [point["steps"] for point in report["points"]] == [0, 1, 2, 2]
    assert report["points"][2]["kl"] == report["points"][3]["kl"] != report["points"][0]["kl"]
    assert {kind.split(",")[0] for kind in report["examples"]} == {"copy", "continuation"}
    assert [entry["step"] for entry in report["training"]] and (tmp_path / "curve.png").stat().st_size > 1000


@pytest.fixture
def search(command, folder):
    """A search over the windows of one layer; `--out` is left to the test."""
    start = command.index("--init")
    size = ["--config", "hidden_size=8", "num_attention_heads=2", "embedding_window=1"]
    held_out = ["--eval-text", str(folder / "valid.txt"), "--eval-context", "24", "--eval-limit", "3"]
    command = ["search-channels", *command[1:start], *command[start + 2 :], *size, *held_out]
    return [*command, "--channel-ratio", "0.3", "--max-steps", "1"]


def test_search_tries_every_window_and_goes_on_where_it_was_killed(search, tmp_path, capsys, monkeypatch):
    trained, train = [], MoTTrainer.train

    def killed_in_the_third(trainer, *args):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(trainer.translator.target_layers)
        return train(trainer, *args)

    monkeypatch.setattr(MoTTrainer, "train", killed_in_the_third)
    assert main([*search, "--out", str(tmp_path)]) == 130
    monkeypatch.setattr(MoTTrainer, "train", lambda trainer: trained.append(trainer.translator.target_layers))
    assert main([*search, "--out", str(tmp_path)]) == 0
    assert trained == [[0], [1], [2]]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [window["target_layers"] for window in report["windows"]] == trained
    losses = [window["eval_loss"] for window in report["windows"]]
    assert report["best"]["eval_loss"] == min(losses) and len(set(losses)) == 3
    assert (tmp_path / "windows.png").stat().st_size > 1000
    assert f"--channel-ratio 0.3 --start {report['best']['start']}" in capsys.readouterr().out
    assert "with max_steps 1, but this run has 2" in fails(
        capsys, [*search, "--max-steps", "2", "--out", str(tmp_path)]
    )
    other = ["--learning-rate", "0.5", "--out", str(tmp_path)]
    assert "with learning_rate 0.0001, but this run has 0.5" in fails(capsys, [*search, *other])
    other = ["--text", str(tmp_path / "report.json"), "--out", str(tmp_path)]
    assert "with corpus [{'name': 'train.txt'" in fails(capsys, [*search, *other])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--starts", "0,3"], "`starts` must lie in 0..2 for a channel ratio of 0.3, got 3"),
        (["--start", "1"], "`--start` has no effect on a search (see --starts). Leave it out"),
        (["--twin"], "`--twin` has no effect on a search. Leave it out"),
        (["--no-source", "x"], "`--no-source` has no effect on a search"),
        (["--sensitivity", "x"], "`--sensitivity` has no effect on a search"),
        (["--sensitivity-power", "1"], "`--sensitivity-power` has no effect on a search"),
        (["--save-steps", "0"], "`--save-steps` has no effect on a search"),
        (["--eval-steps", "100"], "`--eval-steps` has no effect on a search"),
        (["--starts", ","], "`--starts` names no layer"),
        (
            ["--mapping", "depth"],
            "`--mapping` is 'depth'. Did you mean depth_ratio?",
        ),
        (["--channel-ratio", "1"], "`channel_ratio` 1.0 leaves a single window: there is nothing to search"),
        (["--config", "target_layers=[0]"], "`--config` gives `target_layers` again"),
        (["--config", "target_hidden_layer=0"], "`target_hidden_layer` 0 cannot be searched"),
        (["--config", "resume_layer=2"], "`resume_layer` 2 cannot be searched"),
        (["--config", "num_translators=2"], "`num_translators` 2 cannot be searched"),
        (["--starts", "a"], "`--starts` must be layer numbers with commas between, got 'a'"),
        (["--channel-ratio", "2"], "`channel_ratio` must be above 0 and at most 1, got 2.0"),
        (["--preset", "papers"], "`--preset` is 'papers'. Did you mean paper?"),
        (["--config", "rnak=4"], "`rnak` is not a field of MoTConfig"),
        (["--length", "2000", "--context", "1900"], "`documents` holds no document of 1900 + 100 target tokens"),
        (["--eval-text", "short.txt"], "`documents` holds no document of"),
    ],
)
def test_search_refuses_bad_arguments(search, tmp_path, capsys, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    for folder in ("new", "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        assert message in fails(capsys, [*search, "--out", str(tmp_path / folder), *change])
    assert {path.name for path in tmp_path.rglob("*")} == {"short.txt", "there"}
