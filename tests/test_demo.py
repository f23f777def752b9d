import json

import pytest
from conftest import make_documents, make_model, make_tokenizer

from hf_mot.cli import demo
from hf_mot.cli.main import main
from hf_mot.hub import packaged, resolve


@pytest.fixture
def tiny_demo(tmp_path, monkeypatch):
    """The demo with tiny random models and a made-up corpus in place of the packaged ones."""
    tokenizer = make_tokenizer(adds_bos=False)
    for name, family in ((demo.SOURCE, "llama"), (demo.TARGET, "gemma3")):
        model = make_model(family, tokenizer)
        model.config.max_position_embeddings = 4096  # to this tokenizer each byte of the passage is a token
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    corpus = make_documents(20)
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
