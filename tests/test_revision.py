"""The commit of a model from the Hub is in the contract, and is its identity where both sides have one. In a process
of its own, against the small Hub of `hub_server`."""

from types import SimpleNamespace

import pytest
from conftest import make_pair, save_pair
from hub_server import Hub, Repo
from test_hub import Worker

READER = "org/reader"
CODE = """
import huggingface_hub.constants
from transformers import AutoModelForCausalLM
from hf_mot import MoTConfig, MoTModel
from hf_mot.contract_mot import check_model, describe_model
from hf_mot.hub.resolve import load_model, load_tokenizer

def contract(name, **kwargs):
    return describe_model(load_model(name, **kwargs), load_tokenizer(name, **kwargs))

def identity(name, **kwargs):
    found = contract(name, **kwargs)
    return [found["id"], found["revision"]]
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("revision")
    save_pair(make_pair(), folder)
    files = {path.name: path.read_bytes() for path in (folder / "source").iterdir()}
    with Hub({}) as hub:
        repo = hub.repos[READER] = Repo(private=False)
        first = repo.commit(files, "main")
        repo.refs["v1"] = first
        environment = {"HF_ENDPOINT": hub.url, "HOME": str(folder), "HF_HOME": str(folder / "cache")}
        worker = Worker(folder / "worker", **environment)
        try:
            worker.ok(CODE)
            yield SimpleNamespace(
                worker=worker, hub=hub, first=first, local=folder / "source", other=folder / "target"
            )
        finally:
            worker.close()


def test_contract_names_the_commit_that_was_loaded_online_and_offline(here):
    loads = [f"identity({READER!r})", f"identity({READER!r}, revision='v1')"]
    assert here.worker.ok(f"value = [{', '.join(loads)}]") == [[READER, here.first]] * 2
    assert here.worker.ok(f"value = identity({str(here.local)!r})") == [None, None]

    latest = here.hub.write(READER, "README.md", "now with a card")
    by_hash = f"identity({READER!r}, revision={here.first!r})"
    found = [[READER, latest], [READER, here.first], [READER, here.first]]
    assert here.worker.ok(f"value = [{', '.join([*loads, by_hash])}]") == found

    asked = len(here.hub.requests)
    here.worker.ok("huggingface_hub.constants.HF_HUB_OFFLINE = True")
    assert here.worker.ok(f"value = [{', '.join([*loads, by_hash])}]") == found
    here.worker.ok("huggingface_hub.constants.HF_HUB_OFFLINE = False")
    assert len(here.hub.requests) == asked


def test_commits_are_compared_where_both_sides_have_one_and_weights_where_not(here):
    latest = here.hub.write(READER, "README.md", "another card")
    here.worker.ok(f"fitted = contract({READER!r}, revision='v1')")
    refused = here.worker.run(f"check_model(fitted, load_model({READER!r}), 'source')").error
    assert f"`revision` is {latest!r}, expected {here.first!r}" in refused
    assert f"Load it with revision={here.first!r}" in refused
    here.worker.ok(f"check_model(fitted, load_model({READER!r}, revision={here.first!r}), 'source')")
    # Neither of these has a commit: their weights tell.
    here.worker.ok(f"check_model(fitted, AutoModelForCausalLM.from_pretrained({READER!r}), 'source')")
    here.worker.ok(f"check_model(fitted, load_model({str(here.local)!r}), 'source')")
    changed = "model = AutoModelForCausalLM.from_pretrained({!r})\nfor w in model.parameters(): w.data += 1\n{}"
    refused = here.worker.run(changed.format(READER, "check_model(fitted, model, 'source')")).error
    assert "has other weights" in refused


def test_command_loads_the_commit_that_its_translator_was_made_for(here):
    here.worker.ok(f"""
fitted = contract({READER!r}, revision='v1')
config = MoTConfig(source=fitted, target=fitted, source_layers=[0], rank=4)
MoTModel(config).save_pretrained("mot")
from hf_mot.cli.main import main
open("context.txt", "w").write("river stone lantern")
""")
    here.hub.write(READER, "README.md", "a card once more")
    command = ["generate", "mot", "--context", "context.txt", "--prompt", "a", "--max-new-tokens", "2"]
    assert here.worker.ok(f"value = main({command!r})") == 0
    text = "river stone lantern winter garden silver " * 30
    here.worker.ok(f"open('valid.txt', 'w').write({text!r})")
    analyze = ["analyze", "mot", "--sensitivity", "--text", "valid.txt", "--context", "16"]
    assert here.worker.ok(f"value = main({analyze!r})") == 0
    done = here.worker.run(f"value = main({[*command, '--source', READER]!r})")  # what is named is taken as it is
    assert done.value == 1 and "`source` does not match the translator's contract: `revision` is" in done.err
