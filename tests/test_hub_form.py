"""What `save_pretrained` writes, and that it loads with the package, and without it as remote code."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import make_documents, make_pair, make_translator, save_pair
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from hf_mot import MoTModel

REMOTE = """
import sys
sys.modules["hf_mot"] = None  # the package cannot be imported
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

folder, text = sys.argv[1:]
mot = AutoModel.from_pretrained(f"{folder}/mot", trust_remote_code=True)
source, target = (AutoModelForCausalLM.from_pretrained(f"{folder}/{name}") for name in ("source", "target"))
tokenizers = {f"{name}_tokenizer": AutoTokenizer.from_pretrained(f"{folder}/{name}") for name in ("source", "target")}
translated = mot.handoff(text, source=source, target=target, **tokenizers)
prompt = tokenizers["target_tokenizer"](" the captain", return_tensors="pt", return_token_type_ids=False)
ids = target.generate(**prompt, past_key_values=translated, max_new_tokens=6, do_sample=False)
keys = translated.layers[1].keys
sparse = mot.handoff(text, source=source, target=target, **tokenizers, replay="full:0-0+sparse:3/0").layers[2].keys
found = {"ids": ids, "keys": keys, "sparse": sparse, "module": type(mot).__module__, "report": mot.fit_report}
torch.save(found, f"{folder}/remote.pt")
mot.save_pretrained(f"{folder}/again")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved tiny pair, its tokenizers and a translator with random weights."""
    folder, pair = tmp_path_factory.mktemp("pair"), make_pair()
    save_pair(pair, folder)
    mot = make_translator(pair, embedding_window=3)
    mot.fit_report = {"method": "reduced_rank", "tokens": 7}
    mot.save_pretrained(folder / "mot")
    return folder, mot, pair


def keys_of(mot, arguments, text="river stone"):
    return torch.cat([layer.keys.flatten() for layer in mot.handoff(text, **arguments).layers])


def test_save_and_load_gives_the_same_output(folder):
    path, mot, arguments = folder
    loaded = AutoModel.from_pretrained(path / "mot")
    assert type(loaded) is MoTModel
    assert loaded.fit_report == mot.fit_report
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(path / "mot").to_dict()
    assert torch.equal(keys_of(loaded, arguments), keys_of(mot, arguments))


def test_saved_form_holds_the_translators_weights_alone(folder):
    path, mot, _ = folder
    assert load_file(path / "mot" / "model.safetensors").keys() == mot.state_dict().keys()
    assert all(name.startswith("translator.") for name in mot.state_dict())
    text = (path / "mot" / "config.json").read_text()
    assert str(path) not in text and json.loads(text)["auto_map"]["AutoModel"] == "modeling_mot.MoTModel"


def test_remote_code_in_a_process_without_the_package(folder, tmp_path):
    path, mot, arguments = folder
    text = make_documents(1, 8)[0]
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REMOTE, str(path), text], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    remote = torch.load(path / "remote.pt", weights_only=False)
    assert remote["module"].startswith("transformers_modules.")
    assert remote["report"] == mot.fit_report
    cache = mot.handoff(text, **arguments)
    torch.testing.assert_close(remote["keys"], cache.layers[1].keys, atol=1e-5, rtol=1e-5)
    sparse = mot.handoff(text, replay="full:0-0+sparse:3/0", **arguments)
    torch.testing.assert_close(remote["sparse"], sparse.layers[2].keys, atol=1e-5, rtol=1e-5)
    prompt = arguments["target_tokenizer"](" the captain", return_tensors="pt", return_token_type_ids=False)
    ids = arguments["target"].generate(**prompt, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(remote["ids"], ids)
    # What was loaded as remote code and saved again still works, with the package.
    assert torch.equal(keys_of(AutoModel.from_pretrained(path / "again"), arguments), keys_of(mot, arguments))


def test_truncated_weights_are_refused(folder, tmp_path):
    _, mot, _ = folder
    mot.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-200])
    with pytest.raises(ValueError, match="cannot be read .*truncated or damaged"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("change", ["missing", "surplus", "shape"])
def test_weights_that_do_not_fit_are_refused(folder, tmp_path, change):
    _, mot, _ = folder
    mot.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del weights["translator.bias"]
    elif change == "surplus":
        weights["translator.gate"] = torch.zeros(3)
    else:
        weights["translator.bias"] = weights["translator.bias"][:-1].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match="translator.(bias|gate)"):
        AutoModel.from_pretrained(tmp_path)


def test_half_precision_translator_serves_a_full_precision_pair(folder, tmp_path):
    _, mot, arguments = folder
    mot.save_pretrained(tmp_path)
    half = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours, theirs = keys_of(half, arguments), keys_of(mot, arguments)
    assert ours.dtype == torch.float32
    assert 0 < (ours - theirs).norm() / theirs.norm() < 0.03
