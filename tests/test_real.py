"""The demo's path on the two packaged real models, with a small budget."""

import pytest

from hf_mot.evaluation import evaluate
from hf_mot.fit import fit, save_fit
from hf_mot.fit.save import NO_SOURCE
from hf_mot.hub.packaged import packaged_corpus
from hf_mot.hub.resolve import load_model, load_tokenizer, load_translator

pytestmark = pytest.mark.real

SOURCE, TARGET = "demo/smollm2-135m-instruct", "demo/gemma-3-270m"
OPTIONS = {"source_layers": [1, 10, 20, 23], "rank": 256, "max_tokens": 2500, "held_out_documents": 4}


def test_fit_save_load_measure_and_generate(tmp_path):
    pair = {
        "source": load_model(SOURCE),
        "target": load_model(TARGET),
        "source_tokenizer": load_tokenizer(SOURCE),
        "target_tokenizer": load_tokenizer(TARGET),
    }
    corpus = packaged_corpus()
    result = fit(corpus[:60], **pair, **OPTIONS, progress=False)
    folder = save_fit(result, tmp_path / "translator")
    translator, no_source = load_translator(folder), load_translator(folder / NO_SOURCE)
    assert translator.config.source["id"] == SOURCE and translator.config.target["id"] == TARGET

    arms = ["native", "no_context", "translated", "wrong_document", "identity", "no_source"]
    options = {"arms": arms, "context_length": 128, "limit": 8, "batch_size": 8, "progress": False}
    report = evaluate(translator, corpus[60:], **pair, no_source=no_source, **options)
    nll = {arm: figures["nll"] for arm, figures in report["arms"].items()}
    assert abs(nll["identity"] - nll["native"]) < 1e-3
    assert nll["native"] < nll["translated"] < nll["no_context"]
    assert nll["translated"] < nll["wrong_document"]
    assert report["recovery"]["value"] > 0.3
    assert report["cost"]["time_ratio"] < 1
    assert report["cost"]["kv_bytes"] == 128 * 18 * 2 * 256 * 4

    target, tokenizer = pair["target"], pair["target_tokenizer"]
    prompt = tokenizer("\nIn short, this is news about", return_tensors="pt")
    translated = translator.handoff(corpus[70], **pair)
    options = {"min_new_tokens": 8, "max_new_tokens": 8, "do_sample": False}
    out = target.generate(**prompt, past_key_values=translated, **options)
    blank = target.generate(**prompt, **options)
    length = prompt["input_ids"].shape[1]
    assert out.shape == (1, length + 8) and out[0, :length].tolist() == prompt["input_ids"][0].tolist()
    assert out[0, length:].tolist() != blank[0, length:].tolist()
