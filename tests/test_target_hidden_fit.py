"""The closed form with the target's own hidden state among its features, and its control, which has that alone."""

import pytest
import torch
from conftest import make_pair
from small_fit import DOCUMENTS, OPTIONS, OTHERS, TEXT, error_to_itself

from hf_mot import MoTModel, ReplayPlan
from hf_mot.fit import fit, save_fit
from hf_mot.fit.pair import Pair
from hf_mot.replay_cost_mot import bottom_flops, native_flops


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def result(pair):
    return fit(DOCUMENTS, **pair, **OPTIONS, target_hidden_layer=0)


def values_above(mot, pair, plan):
    return [layer.values[:, :, 1:] for layer in mot.handoff(TEXT, replay=plan, **pair).layers[1:]]


def test_fit_is_of_the_layers_above_and_its_twin_reads_the_target_alone(result):
    for mot in (result.translator, result.no_source):
        config = mot.config
        assert (config.target_hidden_layer, config.target_layers, str(mot.plan())) == (0, [1, 2], "bottom:1")
        assert set(config.key_norms) <= {1, 2} and config.key_norms == result.report["key_norms"]
    assert result.translator.config.source_layers == [0, 2] and result.no_source.config.source_layers == []
    assert result.no_source.translator.source_in is None and result.no_source.translator.hidden_in is not None
    assert result.report["target_hidden_layer"] == result.no_source.fit_report["target_hidden_layer"] == 0


def test_hidden_state_tells_what_the_source_does_not(pair):
    """On held-out text, of the context: what goes into layer 0 is the embedding, which both read."""
    found = [fit(DOCUMENTS, **pair, **OPTIONS, target_hidden_layer=layer_idx) for layer_idx in (1, None)]
    native = MoTModel.identity(pair["target"], pair["target_tokenizer"]).handoff(
        TEXT, **{**pair, "source": pair["target"], "source_tokenizer": pair["target_tokenizer"]}
    )
    right = native.layers[2].values[:, :, 1:]
    both, source = (
        (values_above(each.translator, pair, "bottom:2")[-1] - right).square().mean().item() for each in found
    )
    assert both < 0.9 * source


def test_twin_is_the_fit_without_a_source(pair, result):
    alone = fit(DOCUMENTS, **pair, **{**OPTIONS, "source_layers": []}, target_hidden_layer=0).translator
    pairs = zip(values_above(result.no_source, pair, None), values_above(alone, pair, None), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_translator_gives_what_was_solved(pair, result):
    """The features of the fit through the translator's weights are its translation."""
    mot = result.translator
    own = Pair(**pair, target_hidden_layer=0)
    x, y = own.rows(mot, [TEXT])
    module = mot.translator
    parts = (module.source_in, module.embedding_in, module.hidden_in)
    widths = [part.in_features for part in parts]
    assert x.shape[1] == sum(widths) and y.shape[1] == sum(mot.target_geometry.layers[idx].width for idx in (1, 2))
    with torch.no_grad():
        states = module(
            *(part[None] for part in x.split(widths, 1)[:2]), target_hidden_states=x[None, :, -widths[2] :]
        )
    width, heads = mot.target_geometry.layers[1].value_dim, mot.target_geometry.layers[1].kv_heads
    start = mot.target_geometry.layers[1].key_dim * heads
    ours = values_above(mot, pair, None)[0].transpose(1, 2).flatten(2)
    torch.testing.assert_close(states[:, :, start : start + width * heads], ours, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_full_rank_fit_of_a_model_to_itself_is_native(family):
    assert error_to_itself(family, target_hidden_layer=0) < 0.05


def test_budget_counts_what_the_plan_runs_of_the_target(pair):
    geometry = Pair(**pair).target_geometry
    bottom = bottom_flops(geometry, 1024, 1) / native_flops(geometry, 1024)
    share = bottom + 0.03
    mot = fit(DOCUMENTS, **pair, **OPTIONS, target_hidden_layer=0, flops_share=share).translator
    assert 0.7 * share < ReplayPlan(bottom=1).flops_share(mot.config, 1024) <= share
    assert len(mot.config.piece_ranks) == 2
    with pytest.raises(ValueError, match=r"`flops_share` is 0\.01, but the plan bottom:1 alone takes 0\.\d+ of"):
        fit(DOCUMENTS, **pair, **OPTIONS, target_hidden_layer=0, flops_share=0.01)


def test_other_options_are_of_the_layers_above_too(pair, tmp_path):
    kept = tmp_path / "moments.safetensors"
    found = fit(DOCUMENTS, **pair, **OTHERS, target_hidden_layer=0, statistics=kept)
    again = fit(DOCUMENTS, **pair, **OTHERS, target_hidden_layer=0, statistics=kept)
    for ours, theirs in zip(
        values_above(found.translator, pair, None), values_above(again.translator, pair, None), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    save_fit(found, tmp_path / "mot")
    for folder in ("mot", "mot/no_source"):
        loaded = MoTModel.from_pretrained(tmp_path / folder)
        assert loaded.config.target_hidden_layer == 0 and loaded.fit_report["target_hidden_layer"] == 0
    with pytest.raises(ValueError, match="which was gathered with another `target_hidden_layer`"):
        fit(DOCUMENTS, **pair, **OTHERS, target_hidden_layer=1, statistics=kept)


@pytest.mark.parametrize("layer_idx", [-1, 2, 5])
def test_layers_that_cannot_be_read_are_refused(pair, layer_idx):
    with pytest.raises(ValueError, match="`target_hidden_layer` must"):
        fit(DOCUMENTS, **pair, **OPTIONS, target_hidden_layer=layer_idx)
