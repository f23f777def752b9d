"""Translated keys get the length that the target's own have, where all of these have one."""

import shutil

import pytest
import torch
from conftest import make_documents, make_pair, make_translator

from hf_mot.capture_mot import prefill, source_states, split_layers
from hf_mot.cli.fit import format_fit
from hf_mot.cli.inspect import describe, format_description
from hf_mot.cli.rivals import refit_twin
from hf_mot.configuration_mot import MoTConfig
from hf_mot.fit import fit, save_fit
from hf_mot.fit.norms import KeyLengths, _non_negative
from hf_mot.fit.solve import solve
from hf_mot.fit.statistics import Statistics
from hf_mot.geometry_mot import ModelGeometry
from hf_mot.hub.card import render_card
from hf_mot.modeling_mot import MoTModel
from hf_mot.training.start import continue_from
from hf_mot.translators_norm_mot import KeyNorm

OPTIONS = {"num_source_layers": 2, "embedding_window": 2, "max_tokens": 1500, "held_out_documents": 3, "rank": 6}


def native_rows(pair, documents):
    """The target's own position-free states `[tokens, channels]`, BOS left out."""
    geometry = ModelGeometry.from_dict(make_translator(pair).config.target["geometry"])
    rows = []
    for document in documents:
        ids = pair["target_tokenizer"](document, return_tensors="pt")["input_ids"]
        layers = range(len(geometry.layers))
        rows.append(
            source_states(prefill(pair["target"], ids), geometry, layers, torch.arange(ids.shape[1])[None])[0, 1:]
        )
    return geometry, torch.cat(rows)


@pytest.fixture(scope="module")
def normed():
    pair = make_pair("llama", "gemma3")
    with torch.no_grad():  # weights of the norm that differ from channel to channel
        for layer in pair["target"].model.layers:
            layer.self_attn.k_norm.weight.copy_(torch.linspace(-0.5, 1.0, len(layer.self_attn.k_norm.weight)))
    return pair


def test_native_keys_of_a_target_with_qk_norm_pass_unchanged(normed):
    """The oracle: what has the right length already must keep it."""
    geometry, rows = native_rows(normed, make_documents(30))
    lengths = KeyLengths(geometry)
    lengths.add(rows)
    weights = lengths.weights()
    other = native_rows(normed, make_documents(5, seed=1))[1]
    assert lengths.constant_layers(weights, other) == list(range(len(geometry.layers)))
    keys, _ = split_layers(other[None], geometry, range(len(geometry.layers)))
    for states, own, layer in zip(keys, weights, geometry.layers, strict=True):
        norm = KeyNorm(layer.kv_heads, layer.key_dim)
        norm.scale.copy_(own.sqrt())
        torch.testing.assert_close(norm(states), states, rtol=0.05, atol=0.0)
        torch.testing.assert_close(norm(states * 0.3), norm(states))


def test_weights_are_those_of_the_norm():
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.5, 2, 8, dtype=torch.float64)
    states = torch.randn(5000, 8, generator=generator, dtype=torch.float64)
    keys = states / states.square().mean(-1, keepdim=True).sqrt() * scale
    keys[:, 3] = 0  # a channel that the norm's weight has switched off
    squares = keys.square()[:, None]
    weights = _non_negative(squares.mean(0), torch.einsum("rhc,rhd->hcd", squares, squares) / len(squares))
    assert weights.shape == (1, 8) and weights[0, 3] == 0 and bool((weights >= 0).all())
    keys = states / states.square().mean(-1, keepdim=True).sqrt() * scale
    squares = keys.square()[:, None]
    weights = _non_negative(squares.mean(0), torch.einsum("rhc,rhd->hcd", squares, squares) / len(squares))
    torch.testing.assert_close(weights[0], 1 / (8 * scale.square()), rtol=1e-3, atol=0)


@pytest.mark.parametrize("rank", [4, None])
def test_keys_get_the_mean_length_of_native_ones(rank):
    """Where no length is shared: a regression's keys are shorter than what it was fitted on."""
    pair = make_pair("gemma3", "llama")
    geometry, outputs = native_rows(pair, make_documents(30))
    lengths = KeyLengths(geometry)
    lengths.add(outputs)
    weights = lengths.weights()
    generator = torch.Generator().manual_seed(0)
    x = outputs[:, :12] + torch.randn(len(outputs), 12, generator=generator)  # knows a part of it
    statistics = Statistics(lengths.blocks)
    statistics.add(x, outputs)
    solution = solve(statistics.moments(), 1e-2, rank, seed=0)

    def predict(found):
        inner = x.double() @ found.down
        return (inner if found.up is None else inner @ found.up) + found.bias

    def length(rows):
        squares = zip(lengths._squares(rows), weights, strict=True)
        return [torch.einsum("rhc,hc->h", own.double(), w) for own, w in squares]

    before, after = predict(solution), predict(lengths.lengthened(solution, weights, x, outputs))
    for native, short, right in zip(length(outputs), length(before), length(after), strict=True):
        assert bool((short < native).all())
        torch.testing.assert_close(right, native)
    for index in range(1, len(lengths.blocks), 2):  # values are as they were
        own = [part.split(lengths.blocks, dim=1)[index] for part in (before, after)]
        torch.testing.assert_close(*own)


def test_keys_of_any_length_are_not_made_equal():
    """Llama's keys are not normalised: nothing tells their length."""
    pair = make_pair("gemma3", "llama")
    result = fit(make_documents(40), **pair, **OPTIONS, progress=False)
    assert result.translator.config.key_norms == [] and not len(result.translator.key_norms)
    assert result.report["key_norms"] == []


def test_a_lost_twin_gets_the_mean_length_again(tmp_path):
    pair = make_pair("gemma3", "llama")
    result = fit(make_documents(40), **pair, **OPTIONS, progress=False)
    save_fit(result, tmp_path / "mot")
    shutil.rmtree(tmp_path / "mot" / "no_source")
    twin = refit_twin(str(tmp_path / "mot"), MoTModel.from_pretrained(tmp_path / "mot"), make_documents(40), pair)
    for name, weight in result.no_source.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[name], weight, atol=1e-3, rtol=1e-3)
    short = fit(make_documents(40), **pair, **OPTIONS, key_norms=False, progress=False)
    assert "key_norms" not in short.report
    assert not torch.allclose(short.no_source.translator.bias, result.no_source.translator.bias, atol=1e-2)


def test_a_fit_gives_its_keys_the_native_length(normed, tmp_path):
    plain, result = (
        fit(make_documents(40), **normed, **OPTIONS, key_norms=wanted, progress=False) for wanted in (False, True)
    )
    layers = list(range(len(result.translator.target_geometry.layers)))
    assert plain.translator.config.key_norms == [] and result.translator.config.key_norms == layers
    assert result.no_source.config.key_norms == layers  # the control has what it has
    _, native = native_rows(normed, make_documents(3, seed=1))
    native_keys, _ = split_layers(native[None], result.translator.target_geometry, layers)
    for layer_idx in layers:
        norm = result.translator.key_norms[str(layer_idx)]
        own = native_keys[layer_idx]
        torch.testing.assert_close(norm(own), own, rtol=0.1, atol=0.0)
    result.translator.save_pretrained(tmp_path)
    loaded = MoTModel.from_pretrained(tmp_path)
    for name, weight in result.translator.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    # Values, and whatever is trained on, are as before.
    states = torch.randn(1, 5, result.translator.translator.source_in.in_features)
    embeddings = torch.randn(1, 5, result.translator.translator.embedding_in.in_features)
    before, after = plain.translator(states, embeddings), loaded(states, embeddings)
    for layer_idx in layers:
        assert torch.equal(before.value_states[layer_idx], after.value_states[layer_idx])
        norm = loaded.key_norms[str(layer_idx)]
        torch.testing.assert_close(norm(before.key_states[layer_idx]), after.key_states[layer_idx])
        squares = (after.key_states[layer_idx] * norm.scale[:, None]).square()
        torch.testing.assert_close(squares.sum(-1), torch.ones_like(squares[..., 0]))
    trained = continue_from(loaded, method="mot", trunk=True, hidden_size=8, num_attention_heads=2)
    for ours, theirs in zip(trained(states, embeddings).key_states, after.key_states, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_key_norms_are_shown(normed):
    plain = make_translator(normed)
    mot = MoTModel(MoTConfig(**plain.config.to_dict() | {"key_norms": [0, 2]}))
    assert describe(mot)["key_norms"] == [0, 2]
    assert "keys of the weighted length of the target's own in 2 of them" in format_description(describe(mot))
    assert "- keys get the weighted length of the target's own in 2 of its layers" in render_card(mot.config, {})
    report = {"method": "reduced_rank", "rank": 8, "source_layers": [0], "key_norms": [0, 2], "ridge": 0.1, "seed": 0}
    report |= {"tokens": 1, "windows": 1, "documents": 1, "seconds": {"total": 1.0}}
    assert "keys get the weighted length of the target's own in 2 of its layers" in format_fit(report, "out")
    without = format_description(describe(plain)), render_card(plain.config, {})
    assert not any("weighted length" in shown for shown in (*without, format_fit({**report, "key_norms": []}, "out")))


def test_rows_without_a_key_stay_finite():
    """A key of zeros has no direction to lengthen it in."""
    norm, keys = KeyNorm(2, 8), torch.zeros(1, 2, 3, 8, requires_grad=True)
    out = norm(keys)
    (out * torch.tensor([0.0, 1.0, 1.0])[:, None]).sum().backward()
    assert not out.any() and torch.isfinite(keys.grad).all() and torch.isfinite(norm.gain.grad).all()


def test_half_precision_keeps_the_length(normed, tmp_path):
    mot = fit(make_documents(40), **normed, **OPTIONS, progress=False).translator
    mot.save_pretrained(tmp_path)
    text = make_documents(2, 20, seed=3)
    expected = mot.handoff(text, **normed)
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float16, 0.003)):
        loaded = MoTModel.from_pretrained(tmp_path, dtype=dtype)
        assert loaded.key_norms["0"].gain.dtype == dtype
        for own, other in zip(loaded.handoff(text, **normed).layers, expected.layers, strict=True):
            assert (own.keys - other.keys).norm() < tolerance * other.keys.norm()


def test_a_window_of_the_replay_takes_normed_keys(normed):
    plain = make_translator(normed)
    mot = MoTModel(MoTConfig(**plain.config.to_dict() | {"key_norms": [0, 1]})).eval()
    mot.load_state_dict({**mot.state_dict(), **plain.state_dict()})
    text = make_documents(2, 20, seed=3)
    ours, theirs, native = (
        mot.handoff(text, **normed, replay="full:1-2"),
        plain.handoff(text, **normed, replay="full:1-2"),
        MoTModel.identity(normed["target"], normed["target_tokenizer"]).handoff(
            text,
            source=normed["target"],
            target=normed["target"],
            source_tokenizer=normed["target_tokenizer"],
            target_tokenizer=normed["target_tokenizer"],
        ),
    )
    torch.testing.assert_close(ours.layers[0].keys, native.layers[0].keys)  # below the window
    kept = (ours.prefix_mask.cumsum(-1) > 1)[:, None]  # not pads, not BOS
    lengths = ours.layers[1].keys.square().mean(-1)[kept]
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
    torch.testing.assert_close(ours.layers[2].values, theirs.layers[2].values)
    torch.testing.assert_close(ours.layers[2].keys, theirs.layers[2].keys)  # has no norm


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key_norms": [0], "position_free": False}, "`key_norms` needs keys that are translated without"),
        ({"key_norms": [0], "method": "identity"}, "`key_norms` needs keys that are translated without"),
        ({"key_norms": [0, 0]}, "`key_norms` must name each layer once"),
    ],
)
def test_bad_layers_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MoTConfig(**fields)


def test_layers_that_the_target_lacks_are_refused(normed):
    config = make_translator(normed).config
    config.key_norms = [99]
    with pytest.raises(ValueError, match=r"`key_norms` must lie in 0\.\."):
        MoTModel(config)
