"""Publishing, finding and loading translators over HTTP: huggingface_hub's and transformers' own code in processes of
their own, against the small Hub of `hub_server`."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import make_documents, make_pair, make_translator, save_pair
from hub_server import Hub, Repo, front_matter
from huggingface_hub import parse_eval_result_entries

from hf_mot import MoTConfig
from hf_mot.hub.card import render_card
from hf_mot.hub.handwriting import BEGIN, END

ROOT = Path(__file__).parent.parent
WRITER, READER, STRANGER = "hf_sentinelWRITERsentinel00", "hf_sentinelREADERsentinel00", "hf_sentinelSTRANGERsentinel"
TOKENS = {WRITER: {"org": "write"}, READER: {"org": "read"}, STRANGER: {"elsewhere": "write"}}
SENTINEL_PROMPT = "the sentinel prompt"
CONTEXT = make_documents(1, 8)[0]

DRIVER = """
import json, os, sys
{before}
answers = os.fdopen(int(sys.argv[1]), "w")
names = {{}}
for line in sys.stdin:
    names["value"] = error = None
    try:
        exec(json.loads(line), names)
    except Exception as caught:
        error = f"{{type(caught).__name__}}: {{caught}}"
    sys.stdout.flush(), sys.stderr.flush()
    print(json.dumps([names["value"], error]), file=answers, flush=True)
"""

# The model's module, its report, and the keys of a translated context in each layer.
USE = """
from pathlib import Path
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

def load(side):
    folder = Path(FOLDER) / side
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return {side: model, f"{side}_tokenizer": tokenizer}

pair = {**load("source"), **load("target")}

def use(repo_id, **kwargs):
    mot = AutoModel.from_pretrained(repo_id, **kwargs).eval()
    keys = torch.cat([layer.keys.flatten() for layer in mot.handoff(CONTEXT, **pair).layers])
    return [type(mot).__module__, mot.fit_report, keys.tolist()]
"""

COMMAND = """
import os
from hf_mot.cli.main import main

def command(*argv, token=None):
    os.environ.pop("HF_TOKEN", None)
    if token is not None:
        os.environ["HF_TOKEN"] = token
    try:
        return main(list(argv))
    except SystemExit as stop:
        return stop.code
"""


class Worker:
    """A Python process that runs what it is given, with an environment of its own; what it prints is kept."""

    def __init__(self, folder: Path, before: str = "", **environment: str):
        self.folder = folder
        folder.mkdir()
        read, write = os.pipe()
        self.out, self.err = open(folder / "out", "a+b"), open(folder / "err", "a+b")
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        settings = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **environment,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER.format(before=before), str(write)],
            stdin=subprocess.PIPE,
            stdout=self.out,
            stderr=self.err,
            text=True,
            cwd=folder,
            env=settings,
            pass_fds=[write],
        )
        os.close(write)
        self.answers = os.fdopen(read)

    def run(self, code: str) -> SimpleNamespace:
        """Its `value`, `error`, `out` and `err`."""
        starts = [os.fstat(stream.fileno()).st_size for stream in (self.out, self.err)]
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        line = self.answers.readline()
        printed = []
        for stream, start in zip((self.out, self.err), starts, strict=True):
            stream.seek(start)
            printed.append(stream.read().decode())
        assert line, f"the process has ended: {printed[1][-3000:]}"
        value, error = json.loads(line)
        return SimpleNamespace(value=value, error=error, out=printed[0], err=printed[1])

    def ok(self, code: str):
        done = self.run(code)
        assert done.error is None, f"{done.error}\n{done.err[-3000:]}"
        return done.value

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)
        for stream in (self.out, self.err, self.answers):
            stream.close()


def figure(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.05, "high": value + 0.05}


def make_report() -> dict:
    return {
        "method": "reduced_rank",
        "tokens": 4321,
        "seed": 5,
        "corpus": [{"name": "train.txt"}],
        "evaluation": {
            "replay": "none",
            "context_length": 64,
            "n": 37,
            "seed": 6,
            "corpus": [{"name": "valid.txt"}],
            "arms": {"native": {"nll": 3.1}, "translated": {"nll": 3.2, "recovery": figure(0.8113)}},
            "recovery": figure(0.8113),
            "source_value": figure(0.5171),
            "tasks": {
                "quiz": {
                    "metric": "f1",
                    "n": 29,
                    "native": 0.61,
                    "translated": 0.4321,
                    "dataset": {"id": "org/quiz", "task_id": "short_answers", "revision": "5" * 40},
                }
            },
        },
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("sentinel-home")


@pytest.fixture(scope="module")
def made(home):
    """A tiny pair and its translator with a twin, saved in `home`; with what the translator and the twin give."""
    folder, pair, keys = home / "work", make_pair(), {}
    save_pair(pair, folder)
    for name, layers in (("mot", [0, 2]), ("mot/no_source", [])):
        mot = make_translator(pair, source_layers=layers)
        mot.config.source["id"], mot.config.target["id"] = "org/source-model", "org/target-model"
        mot.fit_report = make_report() if layers else {"method": "reduced_rank", "tokens": 4321}
        mot.save_pretrained(folder / name)
        keys[name] = torch.cat([layer.keys.flatten() for layer in mot.handoff(CONTEXT, **pair).layers])
    card = render_card(MoTConfig.from_pretrained(folder / "mot"), make_report())
    (folder / "mot" / "README.md").write_text(card, encoding="utf-8")
    (folder / "mot" / "notes.txt").write_text("for myself", encoding="utf-8")
    return SimpleNamespace(folder=folder, mot=folder / "mot", keys=keys["mot"], twin_keys=keys["mot/no_source"])


@pytest.fixture(scope="module")
def hub():
    with Hub(TOKENS) as hub:
        yield hub


@pytest.fixture(autouse=True)
def quiet_hub(hub):
    hub.refuses_card, hub.before_commit, hub.broken_upload = (lambda metadata: False), (lambda: None), (0, None)


NO_PACKAGE = 'sys.modules["hf_mot"] = None  # cannot be imported'


@contextmanager
def process(name, home, hub, made, code, before="", cache="cache", **environment):
    worker = Worker(home / name, before, HF_ENDPOINT=hub.url, HOME=str(home), HF_HOME=str(home / cache), **environment)
    try:
        worker.ok(f"FOLDER, CONTEXT = {str(made.folder)!r}, {CONTEXT!r}\n{code}")
        yield worker
    finally:
        worker.close()


@pytest.fixture(scope="module")
def here(home, hub, made):
    """A process with the package."""
    with process("here", home, hub, made, "import hf_mot\n" + USE + COMMAND) as worker:
        yield worker


@pytest.fixture(scope="module")
def elsewhere(home, hub, made):
    """A process without the package, and with a cache of its own."""
    with process("elsewhere", home, hub, made, USE, NO_PACKAGE, "cache-2") as worker:
        yield worker


@pytest.fixture
def run(here):
    """Runs `hf-mot`; returns its exit code (`value`) and what it printed."""

    def run(*argv: str, token: str | None = WRITER) -> SimpleNamespace:
        done = here.run(f"value = command(*{list(map(str, argv))!r}, token={token!r})")
        assert done.error is None, done.error
        return done

    return run


@pytest.fixture
def published(run, made, hub, request):
    """A repository of its own, that holds the translator."""
    repo_id = "org/" + re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:80].strip("-")
    done = run("push", made.mot, repo_id)
    assert (done.value, done.err) == (0, "")
    return repo_id


@pytest.fixture
def fails(run):
    """The one line of a command that fails."""

    def fails(*argv: str, **kwargs) -> str:
        done = run(*argv, **kwargs)
        assert (done.value, done.out) == (1, "")
        assert re.fullmatch(rf"hf-mot {argv[0]}: error: .+\n", done.err), done.err
        return done.err

    return fails


def same(used, keys) -> bool:
    return torch.allclose(torch.tensor(used[2]), keys, atol=1e-5)


def changed_copy(made, tmp_path, **texts: str) -> Path:
    """A copy of the translator with other files."""
    folder = tmp_path / "changed"
    shutil.copytree(made.mot, folder, dirs_exist_ok=True)
    for path, text in texts.items():
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def with_report(made, tmp_path, report) -> Path:
    return changed_copy(made, tmp_path, **{"fit_report.json": json.dumps(report)})


# Publishing


def test_push_publishes_all_that_a_translator_is_in_one_commit(run, made, hub, tmp_path):
    done = run("push", made.mot, "org/whole", "--json", tmp_path / "push.json")
    assert (done.value, done.err) == (0, "")
    repo = hub.repos["org/whole"]
    assert len(repo.commits) == 2  # the Hub's own first one, and this
    files = repo.files()
    code = {path.name for path in made.mot.glob("*_mot.py")}
    generate = {f"custom_generate/{path.name}" for path in made.mot.glob("custom_generate/*.py")}
    saved = {"config.json", "model.safetensors", "fit_report.json"}
    twin = {f"no_source/{name}" for name in saved}
    assert "modeling_mot.py" in code
    assert files.keys() - {".gitattributes"} == {
        *code,
        *generate,
        *saved,
        *twin,
        "README.md",
        ".eval_results/hf_mot_quiz.yaml",
    }
    for path in {*code, *generate, *saved, *twin}:
        assert files[path] == (made.mot / path).read_bytes(), path
    assert f"published  {hub.url}/org/whole\n" in done.out
    assert "notes.txt (no part of a translator)" in done.out
    assert "no_source/*.py (loaded as a subfolder, the twin takes the code above it)" in done.out
    report = json.loads((tmp_path / "push.json").read_text())
    assert (report["repo_id"], report["commit"], report["card"]) == ("org/whole", repo.sha("main"), "rendered")
    assert set(report["files"]) == files.keys() - {".gitattributes"}


def test_card_tells_the_hub_models_tags_and_figures(published, hub):
    files = hub.repos[published].files()
    card = files["README.md"].decode()
    metadata = front_matter(card)
    assert metadata["library_name"] == "hf_mot"
    assert metadata["base_model"] == ["org/source-model", "org/target-model"]
    assert {"hf_mot", "reduced_rank", "source:org/source-model", "target:org/target-model"} <= set(metadata["tags"])
    (model,) = metadata["model-index"]
    assert model["name"] == published.split("/")[1]
    values = {metric["type"]: metric["value"] for result in model["results"] for metric in result["metrics"]}
    assert values == {"recovery": 0.8113, "source_value": 0.5171, "f1": 0.4321}
    assert f'AutoModel.from_pretrained("{published}")' in card
    (entry,) = parse_eval_result_entries(yaml.safe_load(files[".eval_results/hf_mot_quiz.yaml"]))
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == ("org/quiz", "short_answers", "5" * 40)
    assert entry.value == 0.4321


def test_pushed_again_unchanged_makes_no_commit(published, run, made, hub):
    before = hub.repos[published].sha("main")
    done = run("push", made.mot, published)
    assert (done.value, done.out) == (0, f"{hub.url}/{published} holds this translator already: nothing to do\n")
    assert hub.repos[published].sha("main") == before


def test_push_removes_what_an_earlier_one_left_behind_and_nothing_else(published, run, made, hub, tmp_path):
    stale = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "router_mot.py"]
    stale += [".eval_results/hf_mot_gone.yaml"]
    kept = ["variant/model.safetensors", ".eval_results/by_hand.yaml", "figure.svg", "custom_generate/notes.md"]
    for path in (*stale, *kept):
        hub.write(published, path, "text")
    done = run("push", with_report(made, tmp_path, {"tokens": 1}), published)
    assert (done.value, done.err) == (0, "")
    files = hub.repos[published].files()
    assert not files.keys() & {*stale, ".eval_results/hf_mot_quiz.yaml"}
    assert set(kept) <= files.keys()


def test_broken_upload_leaves_the_repository_alone_and_can_be_repeated(run, fails, made, hub):
    for number in (1, 2, 3):  # both large files, the commit
        hub.break_upload(number, status=507)
        error = fails("push", made.mot, "org/broken")
        assert "org/broken: the Hub answered 507 (The upload was cut off). Try again later." in error
        assert hub.repos["org/broken"].files().keys() == {".gitattributes"}
        hub.large_files.clear()
    hub.break_upload(0)
    assert run("push", made.mot, "org/broken").value == 0
    assert hub.repos["org/broken"].files()["model.safetensors"] == (made.mot / "model.safetensors").read_bytes()


def test_connection_that_breaks_is_taken_up_again(run, made, hub):
    hub.large_files.clear()
    hub.break_upload(1)
    assert run("push", made.mot, "org/dropped").value == 0
    assert hub.uploads == 4
    assert "model.safetensors" in hub.repos["org/dropped"].files()


def test_what_somebody_changes_meanwhile_is_not_overwritten(published, fails, made, hub, tmp_path):
    hub.before_commit = lambda: hub.write(published, "README.md", "by somebody else")
    error = fails("push", with_report(made, tmp_path, {"tokens": 1}), published)
    assert "answered 412 (A commit has happened since" in error
    assert hub.repos[published].files()["README.md"] == b"by somebody else"


def test_pull_request_leaves_the_branch_alone(published, run, made, hub, here, tmp_path):
    before = hub.repos[published].sha("main")
    # Who may only read can propose.
    done = run("push", with_report(made, tmp_path, {"tokens": 77}), published, "--create-pr", token=READER)
    assert (done.value, done.err) == (0, "")
    assert f"{hub.url}/{published}/discussions/1" in done.out and 'revision="refs/pr/1"' in done.out
    assert hub.repos[published].sha("main") == before
    used = here.ok(f"value = use({published!r}, revision='refs/pr/1')")
    assert used[1] == {"tokens": 77} and same(used, made.keys)
    # A second push can add to it.
    again = with_report(made, tmp_path, {"tokens": 78})
    assert run("push", again, published, "--revision", "refs/pr/1").value == 0
    assert json.loads(hub.repos[published].files("refs/pr/1")["fit_report.json"]) == {"tokens": 78}
    assert hub.repos[published].sha("main") == before


def test_revision_is_a_branch(published, run, made, hub, here, tmp_path):
    first = hub.repos[published].sha("main")
    done = run("push", with_report(made, tmp_path, {"tokens": 79}), published, "--revision", "v2")
    assert (done.value, done.err) == (0, "")
    reports = {
        revision: here.ok(f"value = use({published!r}, revision={revision!r})")[1] for revision in (first, "v2", None)
    }
    assert reports == {first: make_report(), "v2": {"tokens": 79}, None: make_report()}


def test_transformers_own_push_is_loadable_and_its_empty_card_is_replaced(run, made, hub, here):
    here.ok(f"os.environ['HF_TOKEN'] = {WRITER!r}\nmot = AutoModel.from_pretrained({str(made.mot)!r})")
    here.ok("mot.push_to_hub('org/own', private=True, tags=['mine'])")
    repo = hub.repos["org/own"]
    assert repo.private
    assert {"config.json", "model.safetensors", "fit_report.json", "modeling_mot.py"} <= repo.files().keys()
    used = here.ok("value = use('org/own')")
    assert used[1] == make_report() and same(used, made.keys)
    assert "More Information Needed" in repo.files()["README.md"].decode()

    done = run("push", made.mot, "org/own")
    assert (done.value, done.err) == (0, "")
    card = repo.files()["README.md"].decode()
    assert "More Information Needed" not in card and "**recovery 0.81 [0.76, 0.86]**" in card
    assert {"mine", "hf_mot"} <= set(front_matter(card)["tags"])


def test_loaded_translator_is_published_as_its_folder_is(made, hub, here):
    here.ok(f"os.environ['HF_TOKEN'] = {WRITER!r}\nfrom hf_mot.hub.publish import push")
    here.ok(f"mot = AutoModel.from_pretrained({str(made.mot)!r})\npush(mot, 'org/loaded')")
    assert same(here.ok("value = use('org/loaded')"), made.keys)
    # One that came from the Hub carries its own code, and does not refer to where it came from.
    here.ok("push(AutoModel.from_pretrained('org/loaded'), 'org/loaded-again')")
    assert "org/loaded" not in hub.repos["org/loaded-again"].files()["config.json"].decode()
    assert same(here.ok("value = use('org/loaded-again')"), made.keys)


# Loading


def test_load_translator_tells_what_is_wrong_in_one_line(published, here, run, made):
    run("push", made.mot, "org/closed", "--private")
    here.ok("from hf_mot.hub.resolve import load_translator\nos.environ.pop('HF_TOKEN', None)")
    assert here.ok(f"value = load_translator({published!r}).training") is False
    for arguments, message in (
        (f"{published!r}, revision='v9'", "v9 is not a valid git identifier .*Check the id .*, the revision if one"),
        ("'org/closed'", "org/closed cannot be loaded: .* `hf auth login`"),
        ("'org/nothing'", "org/nothing cannot be loaded: .*Check the id"),
    ):
        done = here.run(f"load_translator({arguments})")
        assert re.match(f"OSError: .*{message}", done.error), done.error
        assert "\n" not in done.error
    assert here.ok(f"value = load_translator('org/closed', token={READER!r}).fit_report") == make_report()


def test_loaded_with_the_package_it_translates_the_same(published, here, made):
    used, twin = here.ok(f"value = [use({published!r}), use({published!r}, subfolder='no_source')]")
    assert used[:2] == ["hf_mot.modeling_mot", make_report()]
    assert same(used, made.keys)
    assert same(twin, made.twin_keys) and not same(twin, made.keys)


def test_loaded_without_the_package_and_offline_it_translates_the_same(published, elsewhere, home, hub, made):
    twin = "{'subfolder': 'no_source'}"
    load = f"value = [use({published!r}, trust_remote_code=True, **more) for more in ({{}}, {twin})]"
    used, twin = elsewhere.ok(load)
    assert used[0].startswith("transformers_modules.") and used[1] == make_report()
    assert same(used, made.keys) and same(twin, made.twin_keys)

    asked = len(hub.requests)
    with process("offline", home, hub, made, USE, NO_PACKAGE, "cache-2", HF_HUB_OFFLINE="1") as offline:
        assert offline.ok(load) == [used, twin]
        done = offline.run("use('org/never-loaded', trust_remote_code=True)")
        assert re.match("OSError: We couldn't connect to", done.error), done.error
    assert len(hub.requests) == asked


def test_recipe_of_a_published_translator_generates_without_the_package(published, run, elsewhere, made):
    assert run("push", made.mot, "org/copy").value == 0
    generated = elsewhere.ok(f"""
target, tokenizer = pair["target"], pair["target_tokenizer"]
caches = [AutoModel.from_pretrained(repo_id, trust_remote_code=True).eval().handoff(CONTEXT, **pair)
          for repo_id in ({published!r}, "org/copy")]  # each with classes of its own
inputs = tokenizer(" the captain", return_tensors="pt", return_token_type_ids=False)
options = dict(max_new_tokens=6, do_sample=False)
outputs = [target.generate(**inputs, past_key_values=cache, **options) for cache in caches]
del target.generate  # the hook
recipe = dict(custom_generate={published!r}, trust_remote_code=True)
outputs += [target.generate(**inputs, past_key_values=cache, **options, **recipe) for cache in caches]
value = [output.tolist() for output in outputs]
""")
    assert generated[0] == generated[1] == generated[2] == generated[3]
    assert len(generated[0][0]) > 6


def test_private_translator_needs_a_token_that_may_read_it(run, elsewhere, hub, made):
    done = run("push", made.mot, "org/private", "--private")
    assert (done.value, done.err) == (0, "")
    assert hub.repos["org/private"].private
    for token in (None, STRANGER):
        done = elsewhere.run(f"use('org/private', trust_remote_code=True, token={token!r})")
        assert re.match("OSError: org/private is not a local folder and is not a valid model id", done.error)
        assert "pass a token" in done.error
    assert same(elsewhere.ok(f"value = use('org/private', trust_remote_code=True, token={READER!r})"), made.keys)


# The card


def test_second_push_keeps_what_a_person_has_written(published, run, made, hub, tmp_path):
    card = hub.repos[published].files()["README.md"].decode()
    card = card.replace("tags:\n", "license: mit\nthumbnail: https://example.org/a.png\ntags:\n- my-tag\n")
    card = card.replace(BEGIN, f"Written above.\n\n{BEGIN}") + "\n## Contact\n\nWritten below.\n"
    hub.write(published, "README.md", card)
    report = make_report()
    report["evaluation"]["recovery"] = figure(0.9)
    done = run("push", with_report(made, tmp_path, report), published)
    assert (done.value, done.err) == (0, "")
    renewed = hub.repos[published].files()["README.md"].decode()
    metadata = front_matter(renewed)
    assert (metadata["license"], metadata["thumbnail"]) == ("mit", "https://example.org/a.png")
    assert "my-tag" in metadata["tags"] and "hf_mot" in metadata["tags"]
    assert metadata["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.9
    assert renewed.index("Written above.") < renewed.index(BEGIN) < renewed.index("**recovery 0.90 [0.85, 0.95]**")
    assert renewed.endswith(f"{END}\n\n## Contact\n\nWritten below.\n")
    assert "recovery 0.81" not in renewed


def test_card_without_markers_keeps_its_text(published, run, made, hub, tmp_path):
    hub.write(published, "README.md", "---\nlicense: mit\ntags: my-tag\n---\n# All my own words\n\nNone of yours.\n")
    done = run("push", with_report(made, tmp_path, {"tokens": 1}), published)
    assert done.value == 0 and "The card has no hf_mot markers: its text is kept as it is" in done.err
    card = hub.repos[published].files()["README.md"].decode()
    assert card.endswith("---\n# All my own words\n\nNone of yours.\n")
    assert front_matter(card)["library_name"] == "hf_mot" and "my-tag" in front_matter(card)["tags"]


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"evaluation": {"arms": {}}}, "KeyError: 'n'"),
        ({"evaluation": [1, 2]}, "AttributeError: 'list' object"),
        ({"corpus": [{}]}, "KeyError: 'name'"),
        ([], "AttributeError: 'list' object"),
        ({"evaluation": {"recovery": "high"}}, "TypeError"),
        ({"evaluation": {"tasks": {"quiz": {"translated": 0.5}}}}, "KeyError: 'metric'"),
    ],
    ids=repr,
)
def test_report_that_cannot_be_rendered_costs_the_figures_alone(run, made, hub, tmp_path, report, why):
    done = run("push", with_report(made, tmp_path, report), "org/unrendered")
    assert done.value == 0
    assert "The card holds no figures, since the fit report cannot be rendered" in done.err and why in done.err
    files = hub.repos["org/unrendered"].files()
    assert files["model.safetensors"] == (made.mot / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert "org/source-model → org/target-model" in card and "recovery" not in card
    assert "hf_mot" in front_matter(card)["tags"]


def test_damaged_report_is_left_out(run, made, hub, here, tmp_path):
    done = run("push", changed_copy(made, tmp_path, **{"fit_report.json": '{"tokens": 4'}), "org/damaged")
    assert done.value == 0 and "fit_report.json is damaged" in done.err
    assert "fit_report.json (damaged: " in done.out
    assert "fit_report.json" not in hub.repos["org/damaged"].files()
    assert here.ok("value = use('org/damaged')")[1] is None


@pytest.mark.parametrize(("refused", "kind"), [("model-index", "minimal"), ("tags", "none")])
def test_card_that_the_hub_refuses_does_not_cost_the_weights(run, made, hub, refused, kind):
    hub.refuses_card = lambda metadata: refused in metadata
    done = run("push", made.mot, f"org/refused-{kind}")
    assert done.value == 0 and "The Hub refuses the rendered card: The metadata are not valid" in done.err
    files = hub.repos[f"org/refused-{kind}"].files()
    assert "model.safetensors" in files
    if kind == "minimal":
        assert "model-index" not in front_matter(files["README.md"].decode())
    else:
        assert "README.md" not in files


# Finding


@pytest.fixture
def listed(hub, made):
    """A Hub of two translators, a private one, and a model that is none."""
    with_others, hub.repos = hub.repos, {}
    card = (made.mot / "README.md").read_text()
    other = card.replace("org/source-model", "org/other-source").replace("org/target-model", "org/other-target")
    for repo_id, private, downloads, text in (
        ("org/first", False, 7, card),
        ("org/second", False, 12345, other),
        ("org/hidden", True, 0, card),
        ("org/no-translator", False, 99, "---\ntags: [llama]\n---\n"),
    ):
        hub.repos[repo_id] = Repo(private, downloads)
        hub.repos[repo_id].commit({"README.md": text.encode()}, "main")
    yield
    hub.repos = with_others


def test_list_finds_translators_with_pair_and_downloads(listed, run, tmp_path):
    done = run("list", "--json", tmp_path / "list.json", token=None)
    assert (done.value, done.err) == (0, "")
    rows = [re.split(r"\s{2,}", line) for line in done.out.splitlines()]
    assert rows == [
        ["translator", "source → target", "downloads"],
        ["org/second", "org/other-source → org/other-target", "12,345"],
        ["org/first", "org/source-model → org/target-model", "7"],
    ]
    (first, _) = json.loads((tmp_path / "list.json").read_text())["translators"]
    assert (first["repo_id"], first["source"], first["downloads"]) == ("org/second", "org/other-source", 12345)


@pytest.mark.parametrize(
    ("options", "token", "found"),
    [
        (["--source", "org/source-model"], None, ["org/first"]),
        (["--source", "org/source-model"], READER, ["org/first", "org/hidden"]),
        (["--target", "org/target-model"], None, ["org/first"]),
        (["--limit", "1"], None, ["org/second"]),
        (["--source", "org/other-source", "--target", "org/other-target"], None, ["org/second"]),
        (["--source", "org/other-source", "--target", "org/target-model"], None, []),
        (["--source", "org/target-model"], None, []),
    ],
)
def test_list_is_narrowed_by_source_target_and_limit(listed, run, options, token, found):
    done = run("list", *options, token=token)
    assert done.value == 0
    names = [line.split()[0] for line in done.out.splitlines()[1:]]
    assert names == found if found else done.out == "No translator found. Fit one: hf-mot fit --help\n"


# What goes wrong


@pytest.mark.parametrize(
    ("argv", "token", "message"),
    [
        (["push", "{work}/nowhere", "org/bad"], WRITER, "/nowhere does not exist. Check the path"),
        (["push", "{work}", "org/bad"], WRITER, "holds no translator: it has no config.json"),
        (["push", "{work}/source", "org/bad"], WRITER, r"a model of type llama, not a translator \(mot\)"),
        (["push", "{work}/mot", "org/bad/name"], WRITER, "`repo_id` must be owner/name, .* got 'org/bad/name'"),
        (["push", "{work}/mot", "org/bad name"], WRITER, "`repo_id` must be owner/name"),
        (["push", "{work}/mot", "org/bad"], None, "needs a token. Log in with `hf auth login`, or set HF_TOKEN"),
        (["push", "{work}/mot", "org/bad"], "hf_unknownUNKNOWNunknown00", r"not know who is asking \(401\). Log in"),
        (["push", "{work}/mot", "org/bad"], STRANGER, r"may not do this \(403: You don't have the rights"),
        (["push", "{work}/mot", "org/bad", "--json", "no/such/out.json"], WRITER, "`--json` names a file in a folder"),
        (["list", "--limit", "0"], None, "`--limit` must be at least 1, got 0"),
        (["list"], "hf_unknownUNKNOWNunknown00", r"The list of translators: .* who is asking \(401\)"),
    ],
)
def test_bad_input_is_one_clear_error_and_nothing_is_uploaded(fails, hub, made, argv, token, message):
    uploads = hub.uploads
    assert re.search(message, fails(*[arg.format(work=made.folder) for arg in argv], token=token))
    assert "org/bad" not in hub.repos and hub.uploads == uploads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--revision", "refs/pr/9"], "has no such `revision`"),
        (["--revision", "v9", "--create-pr"], "has no such `revision`"),
        (["--private"], "exists and is public. Nothing was published"),
    ],
)
def test_repository_that_is_not_as_said_is_left_alone(published, fails, made, hub, options, message):
    before = dict(hub.repos[published].refs)
    assert message in fails("push", made.mot, published, *options)
    assert hub.repos[published].refs == before


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("model.safetensors", None, "holds no weights"),
        ("modeling_mot.py", None, "holds no code .*Save the translator again"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{}", "model.safetensors in .* is truncated or damaged"),
        ("config.json", '{"model_type": "mot", "format_version": 99}', "`format_version` is 99"),
        ("fit_report.json", json.dumps({"command": f"HF_TOKEN={WRITER}"}), "fit_report.json holds a token"),
        ("README.md", "Made in {home}/work.", "README.md holds the path of your home folder"),
    ],
)
def test_translator_that_is_not_fit_to_be_published_is_refused(
    fails, made, hub, home, tmp_path, path, content, message
):
    folder = changed_copy(made, tmp_path)
    if content is None:
        (folder / path).unlink()
    else:
        content = content.encode() if isinstance(content, str) else content
        (folder / path).write_bytes(content.replace(b"{home}", str(home).encode()))
    assert re.search(message, fails("push", folder, "org/unfit"))
    assert "org/unfit" not in hub.repos


def test_without_network_push_and_list_say_so(here, fails, made):
    here.ok("import huggingface_hub.constants as c\nbefore, c.ENDPOINT = c.ENDPOINT, 'http://127.0.0.1:9'")
    try:
        for argv in (["push", made.mot, "org/far"], ["list"]):
            assert "the Hub (http://127.0.0.1:9) is not reached (ConnectError). Check the network" in fails(*argv)
    finally:
        here.ok("c.ENDPOINT = before")


def test_no_token_home_path_or_prompt_is_printed_or_uploaded(run, here, hub, made, home):
    """After a use of the translator with a prompt; the translator lies in the home folder."""
    here.ok("target, tokenizer = pair['target'], pair['target_tokenizer']")
    here.ok(f"mot = AutoModel.from_pretrained({str(made.mot)!r})\ncache = mot.handoff({SENTINEL_PROMPT!r}, **pair)")
    here.ok(f"prompt = tokenizer({SENTINEL_PROMPT!r}, return_tensors='pt', return_token_type_ids=False)")
    here.ok("target.generate(**prompt, past_key_values=cache, max_new_tokens=2)")
    here.ok("mot.save_pretrained(FOLDER + '/used')")
    first = len(hub.requests)
    used = made.folder / "used"
    printed = [
        run("push", used, "org/secrets"),
        run("push", used, "org/secrets", "--create-pr"),
        run("push", home / "nowhere", "org/secrets"),
        run("push", made.folder, "org/secrets"),
        run("push", used, f"https://user:{WRITER}@127.0.0.1/org/secrets"),
        run("push", used, "org/secrets", "--revision", "refs/pr/7"),
        run("push", used, "elsewhere/secrets"),
        run("list"),
        run("list", "--source", str(home)),
    ]
    assert [done.value for done in printed] == [0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert "~/nowhere does not exist" in printed[2].err
    bodies = b"".join(request.body for request in hub.requests[first:])
    contents = b"".join(content for files in hub.repos["org/secrets"].commits.values() for content in files.values())
    said = "".join(done.out + done.err for done in printed).encode()
    for secret in (WRITER, READER, STRANGER, str(home), SENTINEL_PROMPT):
        for text in (said, bodies, contents):
            assert secret.encode() not in text
