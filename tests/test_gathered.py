"""What a fit gathers can be kept: a killed pass goes on, more tokens are added, other fits need no pass."""

import pytest
import torch
from conftest import make_documents, make_pair

from hf_mot.fit import fit, gathered
from hf_mot.fit.pair import Pair

OPTIONS = {"rank": 6, "num_source_layers": 2, "embedding_window": 2, "held_out_documents": 4, "batch_tokens": 256}


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture
def rows(monkeypatch):
    """Numbers of texts of every forward pass; the pass is killed after `rows["kill_after"]` of them."""
    calls = {"done": [], "kill_after": None}
    original = Pair.rows

    def counted(self, shell, texts):
        if len(calls["done"]) == calls["kill_after"]:
            raise Killed
        calls["done"].append(len(texts))
        return original(self, shell, texts)

    monkeypatch.setattr(Pair, "rows", counted)
    return calls


def run(pair, file=None, documents=60, **options):
    texts = make_documents(documents, words=150)
    return fit(texts, **pair, statistics=file, progress=False, **{"max_tokens": 6000, **OPTIONS, **options})


def map_of(result):
    weights = result.translator.state_dict()
    module = result.translator.translator
    down = torch.cat([module.source_in.weight, module.embedding_in.weight], 1)
    return module.up.weight @ down, weights["translator.bias"]


def assert_same(result, other):
    for own, expected in zip(map_of(result), map_of(other), strict=True):
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
    assert result.report["ridge"] == other.report["ridge"]


def test_a_pass_that_was_killed_goes_on_where_it_stopped(pair, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(gathered, "SAVE_SECONDS", 0)
    file = tmp_path / "statistics.safetensors"
    whole = run(pair)
    texts, passes = sum(rows["done"]), len(rows["done"])
    rows["done"].clear()
    rows["kill_after"] = passes // 2
    with pytest.raises(Killed):
        run(pair, file)
    before = sum(rows["done"])
    rows["kill_after"] = None
    rows["done"].clear()
    resumed = run(pair, file)
    assert_same(resumed, whole)
    assert resumed.report["windows"] == whole.report["windows"] and resumed.report["tokens"] == whole.report["tokens"]
    assert before + sum(rows["done"]) == texts  # nothing twice


def test_fits_of_another_rank_or_weights_need_no_pass(pair, rows, tmp_path):
    file = tmp_path / "statistics.safetensors"
    run(pair, file)
    rows["done"].clear()
    weights = [[4.0, 1.0]] * len(Pair(**pair).target_geometry.layers)
    layers = run(pair, file).report["source_layers"]
    assert rows["done"] == [1] * OPTIONS["held_out_documents"]
    other = {"rank": 9, "piece_weights": weights}
    assert_same(run(pair, file, **other), run(pair, source_layers=layers, **other))


def test_more_tokens_are_added_to_those_that_are_there(pair, rows, tmp_path):
    file = tmp_path / "statistics.safetensors"
    layers = run(pair, file, max_tokens=3000).report["source_layers"]
    rows["done"].clear()
    more = run(pair, file)
    added = sum(rows["done"])
    rows["done"].clear()
    anew = run(pair, source_layers=layers)
    assert_same(more, anew)
    assert more.report["tokens"] == anew.report["tokens"] and 0 < added < sum(rows["done"])


def test_a_file_of_something_else_is_refused_and_left_alone(pair, rows, tmp_path):
    file = tmp_path / "statistics.safetensors"
    run(pair, file)
    before, rows["kill_after"] = file.read_bytes(), len(rows["done"])  # refused before any forward pass
    for options, message in (
        ({"seed": 1}, "was gathered with another `documents`"),
        ({"documents": 59}, "was gathered with other `documents`"),
        ({"embedding_window": 3}, "was gathered with another `embedding_window`"),
        ({"source_layers": [0]}, r"of the source layers \[.*\], but `source_layers` is \[0\]"),
        ({"num_source_layers": 1}, r"of 2 source layers, but `num_source_layers` is 1"),
        ({"max_tokens": 2000}, r"holds \d+ windows that are not within `max_tokens`"),
    ):
        with pytest.raises(ValueError, match=message):
            run(pair, file, **options)
    other = {**pair, "source": pair["target"], "source_tokenizer": pair["target_tokenizer"]}
    with pytest.raises(ValueError, match="was gathered with another `pair`"):
        run(other, file)
    assert file.read_bytes() == before
    file.write_text("notes")
    with pytest.raises(ValueError, match="`statistics` must name a file that a fit gathered"):
        run(pair, file)
