import shutil
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from test_packaged import write_tiny_gguf

from hf_mot import MoTConfig, MoTModel
from hf_mot.hub import resolve
from hf_mot.hub.resolve import load_model, load_tokenizer, load_translator


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A GGUF file and the directory of the same model; with the embedding table it was written with."""
    folder = tmp_path_factory.mktemp("tiny")
    gguf = folder / "tiny.gguf"
    embeddings = write_tiny_gguf(gguf)
    load_model(gguf).save_pretrained(folder / "model")
    load_tokenizer(gguf).save_pretrained(folder / "model")
    return SimpleNamespace(folder=folder, gguf=gguf, model=folder / "model", embeddings=embeddings)


@pytest.fixture(scope="module")
def translator(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("translator")
    contract = MoTModel.identity(load_model(tiny.model), load_tokenizer(tiny.model)).config.target
    model = MoTModel(MoTConfig(source=contract, target=contract, source_layers=[0], rank=4))
    model.save_pretrained(folder)
    model.save_pretrained(folder / "no_source")
    return folder


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("form", ["gguf", "model"])
def test_file_and_directory_give_the_model_ready_to_read(tiny, form):
    name = str(getattr(tiny, form))
    model, tokenizer = load_model(name), load_tokenizer(name)

    assert torch.equal(model.get_input_embeddings().weight, tiny.embeddings)
    assert not model.training
    assert tokenizer.decode(tokenizer(" a  b")["input_ids"]) == " a  b"


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.bfloat16])
def test_dtype_goes_by_each_of_its_names(tiny, dtype):
    assert load_model(tiny.model, dtype=dtype).dtype == torch.bfloat16


def test_folder_is_not_taken_for_a_hub_id(tiny, monkeypatch):
    monkeypatch.chdir(tiny.folder.parent)
    name = f"{tiny.folder.name}/model"  # would do as one

    model = load_model(name)
    assert MoTModel.identity(model, load_tokenizer(name)).config.target["id"] is None


def test_packaged_model_goes_by_its_demo_name(tiny, monkeypatch):
    monkeypatch.setattr(resolve, "PACKAGED_MODELS", {"demo/tiny": None})
    monkeypatch.setattr(resolve, "packaged_model", lambda name: tiny.model)
    model, tokenizer = load_model("demo/tiny"), load_tokenizer("demo/tiny")

    assert model.name_or_path == model.config.name_or_path == tokenizer.name_or_path == "demo/tiny"
    assert MoTModel.identity(model, tokenizer).config.target["id"] == "demo/tiny"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("demo/gemma-270m", ValueError, "no model of the demo. Did you mean demo/gemma-3-270m"),
        ("demo/xyz", ValueError, "no model of the demo. There are demo/smollm2-135m-instruct and demo/gemma-3-270m"),
        ("./nowhere", FileNotFoundError, "does not exist. Check the path"),
        ("~/no/where.gguf", FileNotFoundError, "does not exist. Check the path"),
        ("{folder}", ValueError, r"no config.json. Give its GGUF file, .*tiny\.gguf"),
        ("{folder}/empty", ValueError, "no config.json. Give a directory that save_pretrained wrote"),
        ("{folder}/model/config.json", ValueError, "is a file, but no GGUF file"),
        ("no spaces/allowed", OSError, "cannot be loaded: Repo id must use alphanumeric chars.* Check the id"),
        ("nobody/nothing", OSError, "nobody/nothing cannot be loaded: .*Check the id .*, the network"),
    ],
)
def test_what_is_no_model_is_one_clear_error(tiny, offline, name, error, message):
    (tiny.folder / "empty").mkdir(exist_ok=True)
    for load in (load_model, load_tokenizer):
        with pytest.raises(error, match=message) as raised:
            load(name.format(folder=tiny.folder))
        assert "\n" not in str(raised.value)


def test_damaged_weights_are_named(tiny, tmp_path):
    model = load_model(tiny.model)
    model.save_pretrained(tmp_path)
    truncate(tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match=f"weights of {tmp_path} are truncated or damaged"):
        load_model(tmp_path)


def test_slow_tokenizer_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(resolve.AutoTokenizer, "from_pretrained", lambda *args: SimpleNamespace(is_fast=False))

    with pytest.raises(ValueError, match="tokenizer of .* is slow .*character offsets that only a fast one gives"):
        load_tokenizer(tiny.model)


def test_dtype_that_is_none_is_refused(tiny):
    for dtype in ("int8", "precise", 32):
        with pytest.raises(ValueError, match="`dtype` must be float32, bfloat16 or float16"):
            load_model(tiny.model, dtype=dtype)


def test_translator_and_its_twin_are_loaded(translator, monkeypatch):
    monkeypatch.chdir(translator.parent)
    for loaded in (load_translator(translator.name), load_translator(translator, subfolder="no_source")):
        assert loaded.config.model_type == "mot"
        assert not loaded.training


def test_what_is_no_translator_is_one_clear_error(translator, tiny, offline, tmp_path):
    with pytest.raises(ValueError, match=r"holds a model of type llama, not a translator \(mot\)"):
        load_translator(tiny.model)
    with pytest.raises(ValueError, match="holds no translator: it has no config.json"):
        load_translator(tmp_path)
    with pytest.raises(FileNotFoundError, match="twin does not exist.*fit a translator"):
        load_translator(translator, subfolder="twin")
    with pytest.raises(OSError, match="nobody/mot cannot be loaded"):
        load_translator("nobody/mot")


def test_truncated_translator_is_named(translator, tmp_path):
    shutil.copytree(translator, tmp_path, dirs_exist_ok=True)
    truncate(tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match="truncated or damaged"):
        load_translator(tmp_path)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])
