"""The prediction of a translator's error: fitted on rows that the translator was not, and kept with it."""

from types import SimpleNamespace

import pytest
import torch
from conftest import make_documents, make_pair, make_translator
from test_uncertain import predicting

from hf_mot import MoTModel
from hf_mot.cli.inspect import describe, format_description
from hf_mot.fit import fit, save_fit
from hf_mot.fit.error import _as_sequences, fit_error
from hf_mot.fit.pair import Pair
from hf_mot.training.start import continue_from
from hf_mot.translators_widths_mot import Widths

OPTIONS = {"rank": 12, "num_source_layers": 2, "embedding_window": 2, "max_tokens": 3000, "progress": False}


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def fitted(pair):
    return fit(make_documents(40, 40), **pair, **OPTIONS)


def rank_correlation(one, other):
    return torch.corrcoef(torch.stack([values.argsort().argsort().double() for values in (one, other)]))[0, 1].item()


def plain():
    """Stand-ins for the models of a fit and its moments, by which states are what they are."""
    return SimpleNamespace(in_metric=lambda states: states), SimpleNamespace(y_scale=1)


@torch.no_grad()
def translated(mot, rows):
    output = mot(**_as_sequences(mot, rows))
    pairs = zip(output.key_states, output.value_states, strict=True)
    return torch.cat([part.transpose(1, 2).flatten(2)[:, -1] for both in pairs for part in both], 1), output.log_error


@torch.no_grad()
def test_planted_noise_is_found_in_rows_that_were_not_fitted_on(pair):
    torch.manual_seed(0)
    mot = predicting(make_translator(pair))
    x = torch.randn(4000, Widths.of(mot.config).read_dim) / 10
    inner = mot.translator.inner(**_as_sequences(mot, x))[:, -1]
    # Large where a channel is high, and where another is far from its mean.
    size = (inner[:, 1] / inner[:, 1].std() + (inner[:, 2] / inner[:, 2].std()).square()).exp()
    states, _ = translated(mot, x)
    noise = torch.randn_like(states) * size[:, None]
    report = fit_error(mot, *plain(), x[:2000], (states + noise)[:2000])
    predicted = translated(mot, x[2000:])[1][:, -1]
    error = noise[2000:].square().mean(1).log()
    assert report["rank_correlation"] > 0.9 and rank_correlation(predicted, error) > 0.9
    torch.testing.assert_close(predicted.mean(), error.mean(), atol=0.3, rtol=0)
    shuffled = fit_error(mot, *plain(), x[:2000], (states + noise[torch.randperm(len(noise))])[:2000])
    assert abs(shuffled["rank_correlation"]) < 0.15


def test_fitted_translator_predicts_errors_of_other_text(pair, fitted):
    for mot, report in ((fitted.translator, fitted.report), (fitted.no_source, fitted.report["no_source"])):
        assert mot.config.predicts_error and report["error_prediction"]["rank_correlation"] > 0.4
        x, y = Pair(**pair).rows(mot, make_documents(1, 40, seed=77))
        states, log_error = translated(mot, x)
        error = ((states - y) / y.std(0)).square().mean(1).log()
        assert rank_correlation(log_error[:, -1], error) > 0.4


@pytest.mark.parametrize("options", [{"source_window": 3}, {"target_hidden_layer": 0}, {"embedding_window": 0}])
@torch.no_grad()
def test_rows_of_a_fit_are_read_as_sequences_are(pair, options):
    if "target_hidden_layer" in options:
        options = {**options, "target_layers": [1, 2]}
    mot = make_translator(pair)
    fields = {**mot.config.to_dict(), **options, "predicts_error": True, "replay": "bottom:1"}
    mot = MoTModel(type(mot.config)(**fields)).eval()
    for name, weight in mot.state_dict().items():
        weight.normal_(1.0 if name.endswith("gain") else 0.0, 0.3, generator=torch.Generator().manual_seed(5))
    text = make_documents(1, 8)[0]
    cache, ids, mask = mot.read_source([text], pair["source"], pair["source_tokenizer"])
    models = {name: pair[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
    inputs = mot.read_target(
        mot.prepare(cache, ids, source_attention_mask=mask, text=text, **models),
        **{"target": pair["target"], "plan": mot.plan()},
    )
    output = mot.run(inputs, mot.plan())
    fitted_pair = Pair(**pair, target_hidden_layer=options.get("target_hidden_layer"))
    states, log_error = translated(mot, fitted_pair.rows(mot, [text])[0])
    prefix = len(mot.config.target["prefix_ids"])
    torch.testing.assert_close(log_error[:, -1], output.log_error[0, prefix:], atol=1e-3, rtol=1e-3)
    keys = output.key_states[-1][0, :, prefix:].transpose(0, 1).flatten(1)
    width = output.value_states[-1].shape[1] * output.value_states[-1].shape[3]
    torch.testing.assert_close(states[:, -keys.shape[1] - width : -width], keys, atol=1e-3, rtol=1e-3)


def test_prediction_is_saved_trained_on_and_shown(pair, fitted, tmp_path):
    save_fit(fitted, tmp_path / "mot")
    loaded = MoTModel.from_pretrained(tmp_path / "mot")
    text = make_documents(1, 12, seed=3)[0]
    native = loaded.handoff(text, replay="uncertain:4", **pair)
    for ours, theirs in zip(
        fitted.translator.handoff(text, replay="uncertain:4", **pair).layers, native.layers, strict=True
    ):
        assert torch.equal(ours.keys, theirs.keys)
    error = loaded.translator.error
    assert error.weight.abs().max() > 0 and not any("error" in name for name, _ in loaded.named_parameters())
    trained = continue_from(loaded, method="mot", linear_path=True, hidden_size=8)
    assert torch.equal(trained.translator.linear.error.weight, error.weight)
    trained.handoff(text, replay="uncertain:4", **pair)
    assert "how wrong each token is likely to be (plan uncertain)" in format_description(describe(loaded))
    assert "how wrong" not in format_description(describe(make_translator(pair)))


def test_map_of_full_rank_predicts_nothing(pair):
    result = fit(make_documents(10, 30), **pair, **{**OPTIONS, "rank": None, "max_tokens": 500})
    assert not result.translator.config.predicts_error and "error_prediction" not in result.report
    with pytest.raises(ValueError, match="Fit it again with hf-mot fit and a rank, or pass replay='tokens:4'"):
        result.translator.plan("uncertain:4")
