import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_documents, make_pair, save_pair
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from hf_mot import MoTConfig, MoTModel
from hf_mot.cli import inspect
from hf_mot.cli.main import COMMANDS, main
from hf_mot.fit import FitResult

ROOT = Path(__file__).parent.parent
CONTEXT = make_documents(1, words=30, seed=2)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tiny models (`source`, `target`), text to fit on (`train.txt`) and to measure on (`valid.txt`)."""
    folder, pair = tmp_path_factory.mktemp("cli"), make_pair()
    # Answers of words: bytes that are no text and pieces of characters, which all look alike, are unlikely.
    decoded = map(pair["target_tokenizer"].decode, range(len(pair["target_tokenizer"])))
    unlikely = [index for index, text in enumerate(decoded) if not text.isprintable() or "\ufffd" in text]
    with torch.no_grad():
        pair["target"].lm_head.weight.normal_()[unlikely] = 0
    save_pair(pair, folder)
    (folder / "train.txt").write_text("\n".join(make_documents(50)), encoding="utf-8")
    (folder / "valid.txt").write_text("\n".join(make_documents(6, seed=1)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def fit_command(folder):
    return [
        *("fit", "--source", str(folder / "source"), "--target", str(folder / "target")),
        *("--text", str(folder / "train.txt"), "--lines", "--layers", "2", "--rank", "24", "--tokens", "2000"),
    ]


@pytest.fixture
def fitted(translator, monkeypatch):
    """Stands in for the fit itself, which costs seconds; returns the arguments it was called with."""
    called = {}

    def fit(documents, **kwargs) -> FitResult:
        called.update(kwargs, documents=list(documents))
        model = MoTModel.from_pretrained(translator)
        for key in ("corpus", "command", "evaluation"):
            del model.fit_report[key]
        return FitResult(model, MoTModel.from_pretrained(translator / "no_source"), model.fit_report)

    monkeypatch.setattr("hf_mot.fit.fit", fit)
    return called


@pytest.fixture(scope="module")
def translator(folder, fit_command):
    """What `hf-mot fit` wrote."""
    out = folder / "translator"
    measured = ["--eval-text", str(folder / "valid.txt"), "--eval-context", "32"]
    assert main([*fit_command, *measured, "--out", str(out), "--json", str(folder / "fit.json")]) == 0
    return out


@pytest.fixture(autouse=True)
def logging_as_before():
    """The command line changes what this process logs and shows."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    yield
    transformers_logging.set_verbosity(verbosity)
    if bars:
        transformers_logging.enable_progress_bar()


def run_as_process(tmp_path, *argv: str, before: str = "", **kwargs) -> subprocess.CompletedProcess:
    """`hf-mot` as pip installs it: a script of that name."""
    script = tmp_path / "hf-mot"
    script.write_text(f"import sys\n{before}\nfrom hf_mot.cli.main import main\nsys.exit(main())\n", encoding="utf-8")
    kwargs.setdefault("stdout", subprocess.PIPE)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        [sys.executable, str(script), *argv], stderr=subprocess.PIPE, text=True, env=environment, timeout=120, **kwargs
    )


@pytest.mark.parametrize("argv", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_does_not_wait_for_torch(tmp_path, argv):
    no_torch = "sys.modules['torch'] = sys.modules['transformers'] = None  # an import of them fails"
    result = run_as_process(tmp_path, *argv, before=no_torch)
    assert (result.returncode, result.stderr) == (0, "")
    assert "hf-mot" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    usage = capsys.readouterr().out
    assert COMMANDS[name].HELP[1:] in " ".join(usage.split())
    assert "--debug" in usage


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fti"], "hf-mot: error: 'fti' is no command: did you mean fit?"),
        (["frobnicate"], f"is no command: choose from {', '.join(COMMANDS)}"),
        ([], "the following arguments are required: COMMAND"),
        (["fit"], "hf-mot fit: error: the following arguments are required: --source, --target, --text, --out"),
        ([*"fit --source a --target b --text c --out d --rank many".split()], "must be a number or full, got 'many'"),
    ],
)
def test_a_command_line_that_cannot_be_understood_is_a_usage_error(argv, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert message in " ".join(capsys.readouterr().err.split())


def fails(capsys, argv: list[str]) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert main(argv) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(rf"hf-mot {argv[0]}: error: .+\n", output.err), output.err
    return output.err


def test_error_is_one_line_and_debug_shows_where_it_comes_from(monkeypatch, capsys):
    def run(args):
        raise ValueError("`x` must be\n  1, got 2.")

    monkeypatch.setattr(COMMANDS["inspect"], "run", run)
    assert fails(capsys, ["inspect", "x"]) == "hf-mot inspect: error: `x` must be 1, got 2.\n"
    with pytest.raises(ValueError, match="must be\n  1"):
        main(["inspect", "x", "--debug"])


@pytest.mark.parametrize("error", [TypeError, OSError, FileNotFoundError, ConnectionError, RuntimeError, ImportError])
def test_error_without_a_message_is_named(monkeypatch, capsys, error):
    def run(args):
        raise error

    monkeypatch.setattr(COMMANDS["inspect"], "run", run)
    assert error.__name__ in fails(capsys, ["inspect", "x"])


def test_bug_is_not_taken_for_bad_input(monkeypatch):
    monkeypatch.setattr(COMMANDS["inspect"], "run", lambda args: {}["no such key"])
    with pytest.raises(KeyError):
        main(["inspect", "x"])


def test_interrupt_is_one_line_and_130(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["inspect"], "run", run)
    assert main(["inspect", "x"]) == 130
    assert capsys.readouterr().err == "\nhf-mot inspect: interrupted\n"


def test_reader_that_leaves_is_no_error(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as gone:
        result = run_as_process(tmp_path, "--help", stdout=gone)
    assert (result.returncode, result.stderr) == (1, "")


def test_command_is_quiet_about_other_libraries(tmp_path, folder, translator):
    (tmp_path / "context.txt").write_text(CONTEXT, encoding="utf-8")
    models = ["--source", str(folder / "source"), "--target", str(folder / "target")]
    context = ["--context", str(tmp_path / "context.txt"), "--prompt", " the river", "--max-new-tokens", "4"]
    result = run_as_process(tmp_path, "generate", str(translator), *context, *models)
    assert (result.returncode, result.stderr) == (0, "")


def test_fit_writes_translator_twin_card_and_report(folder, translator):
    report = json.loads((folder / "fit.json").read_text(encoding="utf-8"))
    assert report == json.loads((translator / "fit_report.json").read_text(encoding="utf-8"))
    (corpus,) = report["corpus"]
    assert corpus["name"] == "train.txt" and re.fullmatch("[0-9a-f]{64}", corpus["sha256"])
    assert "hf-mot fit --source source --target target --text train.txt --lines" in report["command"]
    card = (translator / "README.md").read_text(encoding="utf-8")
    measured = report["evaluation"]
    assert f"Measured on {measured['n']} documents that it was not fitted on from valid.txt, 32 tokens" in card
    assert f"| **the translated cache** | {measured['arms']['translated']['nll']:.3f} |" in card
    assert MoTModel.from_pretrained(translator).config.source_layers
    assert MoTModel.from_pretrained(translator / "no_source").config.source_layers == []
    for file in translator.glob("*.[jm][sd]*"):
        assert str(folder) not in file.read_text(encoding="utf-8"), f"{file.name} holds a local path"


def test_saved_translator_brings_its_code(translator):
    """Without it, `trust_remote_code=True` has nothing to load."""
    config = json.loads((translator / "config.json").read_text(encoding="utf-8"))
    assert config["auto_map"]["AutoModel"] == "modeling_mot.MoTModel"
    assert (translator / "modeling_mot.py").is_file()


def test_card_snippets_run_as_written(folder, translator, monkeypatch, capsys):
    monkeypatch.chdir(translator)
    card = Path("README.md").read_text(encoding="utf-8")
    package, remote = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    for side in ("source", "target"):
        package = package.replace(f"path/to/the/{side}", str(folder / side))
    names = {}
    exec(package, names)
    assert "Where are the keys?" in capsys.readouterr().out
    exec(remote, names)
    assert names["mot"].config.rank == 24


def test_fit_refuses_a_full_folder_before_any_work(folder, fit_command, translator, monkeypatch, capsys):
    monkeypatch.setattr("hf_mot.hub.resolve.load_model", lambda *args, **kwargs: pytest.fail("loaded a model"))
    before = sorted(translator.rglob("*"))
    assert "is not empty. Give another folder, or --overwrite" in fails(
        capsys, [*fit_command, "--out", str(translator)]
    )
    assert "must be a folder, but" in fails(capsys, [*fit_command, "--out", str(folder / "train.txt")])
    assert sorted(translator.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--method", "reduced_rnk"], "`--method` is 'reduced_rnk'. Did you mean reduced_rank?"),
        (["--method", "mot"], "`--method` is 'mot'. Choose from reduced_rank"),
        (["--text", "no_such_file.txt"], "no_such_file.txt, which does not exist"),
        (["--json", "no_such_folder/fit.json"], "`--json` names a file in a folder that does not exist"),
    ],
)
def test_fit_refuses_bad_arguments_before_any_work(fit_command, tmp_path, monkeypatch, capsys, change, message):
    monkeypatch.setattr("hf_mot.hub.resolve.load_model", lambda *args, **kwargs: pytest.fail("loaded a model"))
    assert message in fails(capsys, [*fit_command, "--out", str(tmp_path / "out"), *change])
    assert list(tmp_path.iterdir()) == []


def test_fit_passes_its_options_on(fitted, fit_command, tmp_path):
    options = ["--embedding-window", "3", "--seed", "7", "--out", str(tmp_path)]
    assert main([*fit_command, *options]) == 0
    assert (fitted["rank"], fitted["num_source_layers"], fitted["max_tokens"]) == (24, 2, 2000)
    assert (fitted["embedding_window"], fitted["seed"], len(fitted["documents"])) == (3, 7, 50)
    assert main([*fit_command, *options, "--overwrite", "--rank", "full"]) == 0
    assert fitted["rank"] is None


def test_fit_leaves_its_defaults_to_the_library(fitted, fit_command, tmp_path):
    assert main([*fit_command[: fit_command.index("--lines")], "--out", str(tmp_path)]) == 0
    assert fitted.keys().isdisjoint({"rank", "num_source_layers", "embedding_window", "max_tokens"})


def test_fit_overwrites_nothing_but_a_translator(fitted, fit_command, tmp_path, capsys):
    (tmp_path / "old.txt").write_text("old", encoding="utf-8")
    message = fails(capsys, [*fit_command, "--out", str(tmp_path), "--overwrite"])
    assert "holds something else than a translator" in message
    assert (tmp_path / "old.txt").exists()


def test_fit_overwrites_when_told_to(fitted, fit_command, tmp_path):
    (tmp_path / "old.txt").write_text("old", encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "mot"}', encoding="utf-8")
    assert main([*fit_command, "--out", str(tmp_path), "--overwrite"]) == 0
    assert (tmp_path / "model.safetensors").is_file()
    assert not (tmp_path / "old.txt").exists()


def test_interrupted_fit_leaves_no_translator(fitted, fit_command, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(MoTModel, "save_pretrained", interrupt)
    assert main([*fit_command, "--out", str(tmp_path / "out")]) == 130
    assert list(tmp_path.iterdir()) == []


def test_failed_evaluation_does_not_cost_the_fit(fitted, folder, fit_command, tmp_path, capsys):
    argv = [*fit_command, "--out", str(tmp_path / "out"), "--eval-text", str(folder / "valid.txt")]
    assert main([*argv, "--eval-context", "1500"]) == 1
    assert "`context_length` must leave" in capsys.readouterr().err
    assert "evaluation" not in MoTModel.from_pretrained(tmp_path / "out").fit_report


@pytest.fixture
def generate(folder, translator, tmp_path, capsys):
    """Runs `hf-mot generate`; returns what it prints."""

    def run(context: str, prompt: str, *options: str) -> str:
        file = tmp_path / "context.txt"
        file.write_text(context, encoding="utf-8")
        capsys.readouterr()
        models = ["--source", str(folder / "source"), "--target", str(folder / "target")]
        argv = ["generate", str(translator), "--context", str(file), "--prompt", prompt, *models]
        assert main([*argv, "--max-new-tokens", "8", *options]) == 0
        return capsys.readouterr().out

    return run


def sections(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\[(.+?)\]\n(.*?)(?=\n\n\[|\n*\Z)", text, flags=re.DOTALL | re.MULTILINE))


def test_generate_answers_as_the_library_does(folder, translator, generate):
    prompt = " the river"
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    source = AutoModelForCausalLM.from_pretrained(folder / "source")
    source_tokenizer = AutoTokenizer.from_pretrained(folder / "source")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    translated = MoTModel.from_pretrained(translator).handoff(
        CONTEXT, source=source, target=target, source_tokenizer=source_tokenizer, target_tokenizer=tokenizer
    )

    def answer(ids: list[int], **inputs) -> str:
        ids = torch.tensor([ids])
        output = target.generate(ids, **inputs, max_new_tokens=8, do_sample=False)
        return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()

    prompt_ids = tokenizer(prompt)["input_ids"]
    both_ids = [*tokenizer(CONTEXT)["input_ids"], *prompt_ids[1:]]  # without the second BOS
    printed = sections(generate(CONTEXT, prompt, "--compare"))
    assert printed == {
        "translated": answer(prompt_ids, past_key_values=translated),
        "native": answer(both_ids),
        "no context": answer(prompt_ids),
    }
    assert len(set(printed.values())) == 3
    assert generate(CONTEXT, prompt) == printed["translated"] + "\n"


def test_generate_samples_by_its_seed(generate):
    drawn = [generate(CONTEXT, " the", "--do-sample", "--temperature", "2", "--seed", str(seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--temperature", "0.5"], "`--temperature` has no effect"),
        (["--do-sample", "--temperature", "0"], "`--temperature` must be above 0"),
        (["--max-new-tokens", "0"], "`--max-new-tokens` must be at least 1, got 0"),
        (["--prompt", ""], "`--prompt` is empty"),
        (["--context", "no_such_file"], "no_such_file"),
        (["--context", os.devnull], "is empty: there is nothing for the source to read"),
        (["--context", sys.executable], "is not UTF-8 text"),
    ],
)
def test_generate_refuses_bad_arguments(translator, folder, change, message, capsys):
    context = ["--context", str(folder / "valid.txt"), "--prompt", "x"]
    assert message in fails(capsys, ["generate", str(translator), *context, *change])


def test_generate_asks_for_models_whose_place_is_not_recorded(translator, folder, capsys):
    context = ["--context", str(folder / "valid.txt"), "--prompt", "x"]
    error = fails(capsys, ["generate", str(translator), *context])
    assert "`--source` is needed: the translator was made with a local source model" in error


def test_inspect_shows_what_a_translator_is_without_the_models(translator, folder, monkeypatch, capsys):
    monkeypatch.setattr("hf_mot.hub.resolve.load_model", lambda *args, **kwargs: pytest.fail("loaded a model"))
    capsys.readouterr()
    assert main(["inspect", str(translator)]) == 0
    shown = capsys.readouterr().out
    model = MoTModel.from_pretrained(translator)
    for text in (
        "a local llama model → a local gemma3_text model",
        "reduced_rank, rank 24",
        "2 of 3 source layers",
        "3 layers of 2 kv heads × 8, positions: rope",
        "3 layers of 1 kv heads × 16, positions: rope",
        f"{model.num_parameters():,}",
        f"{model.fit_report['tokens']:,} tokens",
        f"{model.fit_report['evaluation']['n']} other documents",
    ):
        assert text in shown, shown


def test_inspect_shows_the_figures_of_the_fit(translator):
    description = inspect.describe(MoTModel.from_pretrained(translator))
    description["fit_report"]["evaluation"] |= {"source_value": {"value": 0.5149, "low": 0.4333, "high": 0.6}}
    assert "source_value      0.515  [0.433, 0.600]" in inspect.format_description(description)


def test_inspect_writes_json(translator, tmp_path):
    assert main(["inspect", str(translator), "--json", str(tmp_path / "out.json")]) == 0
    description = json.loads((tmp_path / "out.json").read_text())
    model = MoTModel.from_pretrained(translator)
    assert description["parameters"] == model.num_parameters()
    assert description["source_layers"] == model.config.source_layers
    assert description["target"]["layers"][0]["kv_heads"] == 1
    assert 0 < description["flops_share"]["value"]
    assert description["fit_report"] == model.fit_report


def test_inspect_names_the_window_and_the_plan_of_a_trained_translator(translator):
    config = MoTModel.from_pretrained(translator).config.to_dict()
    form = {"method": "mot", "target_layers": [1, 2], "replay": "full", "hidden_size": 8}
    form |= {"predicts_error": False, "source_window": 1}  # what a linear path alone has
    mot = MoTModel(MoTConfig(**config | form))
    mot.fit_report = {"training": {"steps": 7, "tokens": 123, "replay": "full:1-2", "corpus": [{"name": "a.txt"}]}}
    shown = inspect.format_description(inspect.describe(mot))
    assert "2 of 3 target layers (1-2)" in shown and "by the plan full:1-2" in shown and "rank" not in shown
    assert "trained on        a.txt" in shown and "7 steps, 123 tokens, plan full:1-2" in shown


@pytest.mark.parametrize(("name", "message"), [("nowhere/at/all", "Check the path"), ("{source}", "type llama")])
def test_inspect_refuses_what_is_no_translator(folder, name, message, capsys):
    assert message in fails(capsys, ["inspect", name.format(source=folder / "source")])


def test_quickstart_shows_three_answers(folder, monkeypatch, capsys):
    """On tiny models; the demo's own test runs the real ones."""
    tiny = {"demo/smollm2-135m-instruct": folder / "source", "demo/gemma-3-270m": folder / "target"}
    monkeypatch.setattr(
        "hf_mot.hub.resolve.load_model", lambda name: AutoModelForCausalLM.from_pretrained(tiny[name]).eval()
    )
    monkeypatch.setattr("hf_mot.hub.resolve.load_tokenizer", lambda name: AutoTokenizer.from_pretrained(tiny[name]))
    monkeypatch.setattr("hf_mot.hub.packaged.packaged_corpus", lambda: make_documents(50))
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--tokens", "500"])
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"), run_name="__main__")
    printed = capsys.readouterr().out
    answers = [line.split(":", 1)[1] for line in printed.splitlines() if re.match("on the|reading|without", line)]
    assert len(set(answers)) == 3


@pytest.mark.parametrize(
    "argv",
    [
        ["evaluate", "mot", "--text", "text.txt", "--report"],
        ["capture", "--source", "a", "--target", "b", "--text", "text.txt", "--source-layers", "0", "--out"],
    ],
)
def test_folder_that_would_lie_in_a_file_is_refused_before_any_work(argv, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    for folder in ("text.txt", "text.txt/a/b"):
        assert main([*argv, folder]) == 1
        assert f"`{argv[-1]}` must name a folder, got {folder}, and" in capsys.readouterr().err
