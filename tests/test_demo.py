import json
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_mot.cli import demo
from hf_mot.cli.main import main
from hf_mot.hub import packaged, resolve


@pytest.fixture
def tiny_demo(tmp_path, monkeypatch):
    """The demo with tiny random models and a made-up corpus in place of the packaged ones."""
    vocab = {char: index for index, char in enumerate([*bytes_to_unicode().values(), "<s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    sizes = {
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "bos_token_id": 256,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    pair = {
        demo.SOURCE: LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **sizes)),
        demo.TARGET: Gemma3ForCausalLM(Gemma3TextConfig(num_hidden_layers=2, sliding_window=64, **sizes)),
    }
    for name, model in pair.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    words = ["river", "bridge", "storm", "market", "ferry", "town", "a", "of", "the"]
    corpus = [" ".join(random.Random(seed).choices(words, k=60)) for seed in range(20)]
    monkeypatch.setenv("HF_MOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(resolve, "packaged_model", lambda name: tmp_path / name)
    monkeypatch.setattr(packaged, "packaged_corpus", lambda: corpus)
    monkeypatch.setattr(demo, "DOCUMENTS", 4)
    monkeypatch.setattr(demo, "FIT", {**demo.FIT, "source_layers": [0, 2], "held_out_documents": 2})


def test_demo_fits_once_and_says_where_its_figures_come_from(tiny_demo, tmp_path, capsys):
    out = tmp_path / "demo.json"
    assert main(["demo", "--tokens", "2000", "--json", str(out)]) == 0
    first, fresh = capsys.readouterr().out, json.loads(out.read_text())
    assert main(["demo", "--tokens", "2000", "--json", str(out)]) == 0
    second, cached = capsys.readouterr().out, json.loads(out.read_text())

    assert "Fitting a translator" in first
    assert "(measured now):" in first
    assert "Fitting a translator" not in second
    assert "from the cached translator's fit report" in second
    assert max(map(len, first.splitlines() + second.splitlines())) <= demo.WIDTH + len(str(tmp_path))
    assert (fresh["figures_are_fresh"], cached["figures_are_fresh"]) == (True, False)
    for key in ("arms", "n", "answers", "pair"):
        assert fresh[key] == cached[key]
    assert fresh["pair"] == {"source": demo.SOURCE, "target": demo.TARGET}
    assert fresh["n"] == 4
    assert set(fresh["answers"][0]) == {"question", "right", *demo.ARMS}
    assert fresh["cost"]["time_ratio"] > 0


def test_documents_of_the_figures_are_never_fitted_on(tiny_demo):
    tokenizer = resolve.load_tokenizer(demo.TARGET)
    corpus = [*packaged.packaged_corpus(), "short", "too short"]
    fitted_on, held_out = demo.split(corpus, tokenizer)

    assert len(held_out) == 4
    assert not set(fitted_on) & set(held_out)
    assert set(fitted_on) | set(held_out) == set(corpus)
    assert all(len(tokenizer(document)["input_ids"]) >= 193 for document in held_out)
    assert demo.split(corpus, tokenizer) == (fitted_on, held_out)


def test_cached_translator_is_of_the_same_settings(tiny_demo, capsys):
    main(["demo", "--tokens", "2000"])
    main(["demo", "--tokens", "1500"])
    assert "Fitting a translator" in capsys.readouterr().out.partition("The translator: ")[2]


def test_passage_holds_the_right_answers():
    assert all(right in demo.PASSAGE for right in demo.QUESTIONS.values())
    assert max(map(len, demo.PASSAGE.split())) < 20


def test_bad_arguments_are_refused_before_anything_is_loaded(capsys):
    assert main(["demo", "--tokens", "0"]) == 1
    assert "`--tokens` must be at least 1, got 0" in capsys.readouterr().err
    assert main(["demo", "--json", "/nowhere/x.json"]) == 1
    assert "`--json`" in capsys.readouterr().err
