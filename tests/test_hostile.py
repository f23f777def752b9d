"""Files from strangers execute nothing, and what is private stays where it is."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import changed, make_documents, make_pair, make_translator, save_pair

ROOT = Path(__file__).parent.parent
MARK = "PWNED"
HOSTILE = (
    f"__import__('pathlib').Path('{MARK}').touch()",
    f'x"); __import__("os").system("touch {MARK}"); ("',
    f"!!python/object/apply:os.system ['touch {MARK}']",
    f"x\n---\n{MARK}: true\n---\n",
    f"{{{{ cycler.__init__.__globals__.os.popen('touch {MARK}').read() }}}}{{0.__class__}}$(touch {MARK})",
    f"../../{MARK}",
    f"{MARK}/{MARK}",
)
CODE = f"modeling_{MARK}"  # a module that lies in the folder
AUTO_MAPS = (
    {"AutoConfig": f"{CODE}.MoTConfig", "AutoModel": f"{CODE}.MoTModel"},
    {"AutoConfig": f"nobody/{MARK}--{CODE}.MoTConfig", "AutoModel": f"nobody/{MARK}--{CODE}.MoTModel"},
    {"AutoConfig": f"../{CODE}.MoTConfig", "AutoModel": f"os.system.{MARK}"},
)
CONFIG_FIELDS = (
    *("method", "architectures", "dtype", "torch_dtype", "transformers_version", "name_or_path", "model_type"),
    *("attn_implementation", "problem_type", "quantization_config", "custom_generate", "unknown", "auto_map"),
)
CONTRACT_FIELDS = (
    *("id", "revision", "adapter", "quantization", "dtype", "model_type", "fingerprint", "tokenizer_fingerprint"),
    *("prefix_ids", "geometry"),
)
REPORT = {
    "method": "reduced_rank",
    "tokens": 7,
    "seed": 0,
    "corpus": [{"name": "text.txt", "sha256": "9f", "documents": 3}],
    "versions": {"torch": "2.13.0"},
    "command": "hf-mot fit",
    "evaluation": {
        "replay": "none",
        "n": 3,
        "seed": 0,
        "dtype": "float32",
        "corpus": [{"name": "valid.txt"}],
        "notes": ["note"],
        "arms": {"native": {"nll": 3.0}, "translated": {"nll": 3.1}},
        "recovery": {"value": 0.5, "low": 0.4, "high": 0.6},
    },
}

# Loads each translator under `sys.argv[1]` and renders its card, while all that could run or write is listed.
WATCH = """
import json
import os
import sys
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModel

import hf_mot
from hf_mot.hub.card import render_card

root, mark = Path(sys.argv[1]), sys.argv[2]
harmless = AutoModel.from_pretrained(root / "harmless")  # from here on, all that has to be imported is
render_card(harmless.config, harmless.fit_report)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
RUNS = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess", "pty", "ctypes", "pickle")
CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.chmod", "os.truncate", "socket")
seen = []


def watch(event, args):
    if event == "exec":
        args = (args[0].co_filename, args[0].co_names, args[0].co_consts)
    marked = event in ("exec", "compile", "import", "open") and mark in repr(args)
    written = event == "open" and args[2] & WRITES
    if marked or written or event.startswith(RUNS + CHANGES):
        seen.append([event, repr(args)[:300]])


sys.addaudithook(watch)
outcomes, cards = {}, {}
for folder in sorted(root.glob("hostile-*")):
    try:
        mot = AutoModel.from_pretrained(folder)
    except (ValueError, TypeError, OSError, StrictDataclassError) as error:
        outcomes[folder.name] = "refused"
        continue
    except (AttributeError, KeyError, IndexError, RuntimeError, ImportError) as error:
        outcomes[folder.name] = f"{type(error).__name__}: {error}"
        continue
    outcomes[folder.name] = "loaded"
    try:
        cards[folder.name] = render_card(mot.config, mot.fit_report, "org/mot")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        cards[folder.name] = None
before = list(seen)
eval(repr(mark))  # the watch does see what is run
print()  # after the questions of transformers, whether to run what it found
print(json.dumps({"seen": before, "control": len(seen) - len(before), "outcomes": outcomes, "cards": cards}))
"""


def leaves_of(value, path=()):
    """The paths to all values within nested dicts and lists that hold no others."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for key, part in items for leaf in leaves_of(part, (*path, key))]
    return [path]


def variants(config):
    """(what is hostile, config, fit report) with one hostile value each."""
    for auto_map in AUTO_MAPS:
        yield f"auto_map = {auto_map}", {**config, "auto_map": auto_map}, REPORT
    for text in HOSTILE:
        for field in CONFIG_FIELDS:
            yield f"{field} = {text!r}", {**config, field: text}, REPORT
        for side in ("source", "target"):
            for path in [(field,) for field in CONTRACT_FIELDS] + [("geometry", "layers", 0, "position")]:
                yield f"{side} {path} = {text!r}", changed(config, (side, *path), text), REPORT
        for path in leaves_of(REPORT):
            yield f"{path} of the report = {text!r}", config, changed(REPORT, path, text)
        arms = changed(REPORT, ("evaluation", "arms", text), {"nll": 1.0})
        dataset = changed(REPORT, ("evaluation", "dataset"), {"id": text, "task_id": text, "name": text})
        for report in ({**REPORT, text: text, "versions": {text: text}, "license": text}, arms, dataset):
            yield f"names in the report = {text!r}", config, report


def run_python(code, *argv, cwd, **environment):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"PATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **environment}
    argv, streams = [sys.executable, "-c", code, *argv], {"stdin": subprocess.DEVNULL, "capture_output": True}
    return subprocess.run(argv, **streams, text=True, env=environment, cwd=cwd, timeout=300)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """What loading hostile translators and rendering their cards ran, gave, and left on the disk."""
    root, cwd = tmp_path_factory.mktemp("translators"), tmp_path_factory.mktemp("cwd")
    mot = make_translator(make_pair())
    mot.fit_report = REPORT
    mot.save_pretrained(root / "harmless")
    config = json.loads((root / "harmless" / "config.json").read_text())
    labels = {}
    for label, hostile, report in variants(config):
        folder = root / f"hostile-{len(labels):04}"
        labels[folder.name] = label
        folder.mkdir()
        os.link(root / "harmless" / "model.safetensors", folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(hostile))
        (folder / "fit_report.json").write_text(json.dumps(report))
        (folder / f"{CODE}.py").write_text(f"open({MARK!r}, 'w')")
    before = set(root.rglob("*"))
    done = run_python(WATCH, str(root), MARK, cwd=cwd, HOME=str(cwd), HF_HOME=str(cwd / "hf"))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    result["outcomes"] = {f"{name}: {labels[name]}": outcome for name, outcome in result["outcomes"].items()}
    return {**result, "files": [str(path) for path in [*(set(root.rglob("*")) - before), *cwd.rglob("*")]]}


def test_hostile_values_execute_and_write_nothing(watched):
    assert watched["control"] > 0
    assert watched["seen"] == []
    assert watched["files"] == []


def test_hostile_values_are_refused_clearly_or_are_no_more_than_text(watched):
    outcomes = watched["outcomes"]
    assert {label: outcome for label, outcome in outcomes.items() if outcome not in ("loaded", "refused")} == {}
    assert list(outcomes.values()).count("loaded") > len(outcomes) / 3


def test_hostile_values_are_no_more_than_text_in_a_card(watched):
    cards = [card for card in watched["cards"].values() if card is not None]
    assert sum(MARK in card for card in cards) > 50
    for card in cards:
        front_matter = re.match(r"---\n(.*?\n)---\n", card, flags=re.DOTALL)[1]
        assert MARK not in yaml.safe_load(front_matter)  # a key of its own
        for snippet in re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL):
            called = {node.id for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Name)}
            assert "__import__" not in called, snippet


COMMANDS = """
import json
import sys

from hf_mot.cli.main import main

print(json.dumps([main(argv) for argv in json.loads(sys.argv[1])]))
"""


def test_token_home_and_texts_stay_private(tmp_path):
    home = tmp_path / "sentinel-home"
    work = home / "work"
    work.mkdir(parents=True)
    save_pair(make_pair(), work)
    document, context, prompt, token = "sentinel document", "sentinel context", "sentinel prompt", "hf_" + 8 * "sent"
    train = [f"{text} {document}" for text in make_documents(40)]
    (work / "train.txt").write_text("\n".join(train), encoding="utf-8")
    (work / "valid.txt").write_text("\n".join(f"{text} {document}" for text in make_documents(4, seed=1)))
    (work / "context.txt").write_text(f"the river {context}")
    models = ["--source", str(work / "source"), "--target", str(work / "target")]
    evaluation = ["--text", str(work / "valid.txt"), "--lines", "--context", "24", "--no-cost"]
    asked = ["--context", "context.txt", "--prompt", prompt]
    right = [
        [
            *("fit", *models, "--text", str(work / "train.txt"), "--lines", "--layers", "2", "--rank", "8"),
            *("--tokens", "1500", "--eval-text", "valid.txt", "--eval-context", "24", "--out", "mot"),
            *("--json", "fit.json"),
        ],
        ["evaluate", "mot", *models, *evaluation, "--json", "evaluate.json"],
        ["inspect", "mot", "--json", "inspect.json"],
        ["generate", "mot", *models, *asked, "--max-new-tokens", "4", "--compare"],
    ]
    wrong = [
        ["generate", "mot", "--source", "target", "--target", "source", *asked],  # the models swapped
        ["generate", "mot", "--source", "nobody/nothing", "--target", "target", *asked],
        ["generate", "nobody/nothing", *models, *asked],
        ["generate", "absent/folder/mot", *asked],
        ["generate", "mot", "--source", "source", "--target", "absent/folder/model", *asked],
        ["generate", "mot", *models, *asked, "--dtype", "int8"],
        ["generate", "mot", *models, *asked, "--temperature", "2"],
        ["inspect", "source"],
        ["inspect", "absent/folder/mot"],
        ["evaluate", "mot", "--text", "absent.txt"],
        ["evaluate", "mot", "--source", "source", "--target", "target", *evaluation[2:], "--text", "context.txt"],
        ["fit", "--source", "source", "--target", "target", "--text", "context.txt", "--out", "new"],
        ["fit", "--source", "source", "--target", "target", "--text", "context.txt", "--out", "source"],
    ]
    done = run_python(COMMANDS, json.dumps(right + wrong), cwd=work, HOME=str(home), HF_TOKEN=token)
    assert done.stdout.splitlines()[-1:] == [json.dumps([0] * len(right) + [1] * len(wrong))], done.stderr[-3000:]
    written = [path for path in [*work.glob("*.json"), *work.glob("mot/**/*")] if path.is_file()]
    assert len(written) > 8
    for private in (document, context, prompt, token, str(home), home.name):
        assert private not in done.stdout
        assert private not in done.stderr, [line for line in done.stderr.splitlines() if private in line]
        for path in written:
            assert private.encode() not in path.read_bytes(), f"{private} is in {path.name}"
