"""Each field of a translator's contract alone, and each pair of fields: another value is refused, and named."""

import copy
import itertools
import re

import pytest
from conftest import changed, make_documents, make_pair, make_translator
from huggingface_hub.errors import StrictDataclassError

from hf_mot import MoTConfig, MoTModel
from hf_mot.generation_mot import is_attached

TEXT = make_documents(1, 4)[0]
HASH = "0" * 16
LAYER, ROTARY = ("geometry", "layers", 1), ("geometry", "rotary", 0)
# What changes: the field that the error names, its place in a model's contract, another value.
CHANGES = {
    "format_version": ("format_version", None, 99),
    "id": ("id", ("id",), "org/other"),
    "revision": ("revision", ("revision",), "b" * 40),
    "adapter": ("adapter", ("adapter",), {"float32": HASH}),
    "quantization": ("quantization", ("quantization",), "bitsandbytes"),
    "model_type": ("model_type", ("model_type",), "mistral"),
    "fingerprint": ("fingerprint", ("fingerprint", "float32"), HASH),
    "tokenizer_fingerprint": ("tokenizer_fingerprint", ("tokenizer_fingerprint",), HASH),
    "prefix_ids": ("prefix_ids", ("prefix_ids",), [1]),
    "adds_prefix": ("adds_prefix", ("adds_prefix",), False),
    "kv_heads": ("layers", (*LAYER, "kv_heads"), 4),
    "key_dim": ("layers", (*LAYER, "key_dim"), 4),
    "value_dim": ("layers", (*LAYER, "value_dim"), 4),
    "position": ("layers", (*LAYER, "position"), "free"),
    "rotated": ("layers", (*LAYER, "rotated"), "values"),
    "frequency": ("rotary", (*ROTARY, "inv_freq", 0), 0.99),
    "scaling": ("rotary", (*ROTARY, "scaling"), 1.5),
    "interleaved": ("rotary", (*ROTARY, "interleaved"), True),
    "embedding_dim": ("embedding_dim", ("geometry", "embedding_dim"), 33),
}
ONE_OR_TWO = [*itertools.combinations(CHANGES, 1), *itertools.combinations(CHANGES, 2)]
sides = pytest.mark.parametrize("side", ["source", "target"])


def make_own(commits):
    """A pair whose models come from the Hub, with or without a known commit, and the config made for it."""
    pair = make_pair()
    for side in ("source", "target"):
        pair[side].name_or_path = f"org/{side}"
        pair[side].config._commit_hash = "a" * 40 if commits else None
    return pair, make_translator(pair).config.to_dict()


@pytest.fixture(scope="module")
def with_commits():
    return make_own(commits=True)


@pytest.fixture(scope="module")
def without_commits():
    return make_own(commits=False)


def handoff(config, pair):
    return MoTModel(MoTConfig(**config)).handoff(TEXT, **pair)


@sides
@pytest.mark.parametrize("names", ONE_OR_TWO, ids="+".join)
def test_another_value_is_refused_and_named(with_commits, without_commits, tmp_path, monkeypatch, side, names):
    monkeypatch.chdir(tmp_path)
    # With a commit on both sides, that and the id say which model it is; else its fingerprint does.
    pair, config = with_commits if {"id", "revision"} & set(names) else without_commits
    for name in names:
        _, path, value = CHANGES[name]
        config = changed(config, (name,) if path is None else (side, *path), value)
    with pytest.raises(ValueError) as raised:
        handoff(config, pair)
    named = re.findall(r"`(\w+)`", str(raised.value))
    assert {CHANGES[name][0] for name in names} & set(named)
    assert "format_version" in names or {side, f"{side}_tokenizer"} & set(named)
    assert not is_attached(pair["target"])
    assert not list(tmp_path.iterdir())


def test_pair_itself_is_taken_with_commits_and_without(with_commits, without_commits):
    """Else the refusals above would say nothing."""
    for pair, config in (with_commits, without_commits):
        assert handoff(config, copy.deepcopy(pair)).get_seq_length() > 4


@sides
@pytest.mark.parametrize("change", [{"id": "org/other"}, {"revision": "b" * 40}, {"id": None, "revision": None}])
def test_without_a_commit_on_both_sides_names_and_revisions_are_not_compared(without_commits, side, change):
    pair, config = copy.deepcopy(without_commits)
    config[side].update(change)
    handoff(config, pair)


@sides
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_the_dtype_is_recorded_and_not_compared(without_commits, side, dtype):
    pair, config = copy.deepcopy(without_commits)
    assert config[side]["dtype"] == "float32"
    handoff(changed(config, (side, "dtype"), dtype), pair)


@sides
@pytest.mark.parametrize(
    "path",
    [
        *((field,) for field in ("id", "revision", "adapter", "model_type", "fingerprint", "tokenizer_fingerprint")),
        *((field,) for field in ("prefix_ids", "adds_prefix", "geometry")),
        *(("geometry", field) for field in ("layers", "rotary", "embedding_dim")),
        *((*LAYER, field) for field in ("kv_heads", "key_dim", "value_dim", "position")),
        *((*ROTARY, field) for field in ("inv_freq", "scaling", "interleaved")),
    ],
    ids=lambda path: path[-1],
)
def test_a_contract_that_lacks_a_field_is_refused(without_commits, side, path):
    pair, config = without_commits
    with pytest.raises((ValueError, StrictDataclassError), match=f"`{path[-1]}`"):
        handoff(changed(config, (side, *path), ...), pair)
