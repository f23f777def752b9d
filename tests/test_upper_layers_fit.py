"""The closed form onto what goes into a target layer, and onto the layers below it, for plan `resume`."""

from types import SimpleNamespace

import pytest
import torch
from conftest import make_documents, make_pair, save_pair
from small_fit import DOCUMENTS, OPTIONS, OTHERS, TEXT, error_to_itself
from training_pair import make_args, make_trainer

from hf_mot import MoTModel
from hf_mot.capture_mot import prefill
from hf_mot.cli.inspect import describe, format_description
from hf_mot.cli.main import main
from hf_mot.cli.rivals import all_arms, can_refit
from hf_mot.evaluation.settings import check_settings
from hf_mot.fit import fit, save_fit
from hf_mot.fit.pair import Pair
from hf_mot.hub.card import render_card
from hf_mot.replay_cost_mot import native_flops, resume_flops


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def result(pair):
    return fit(DOCUMENTS, **pair, **OPTIONS, resume_layer=2)


def test_fit_and_its_twin_are_of_the_layers_below_and_their_plan(pair, result):
    for mot in (result.translator, result.no_source):
        config = mot.config
        assert (config.resume_layer, config.target_layers, str(mot.plan())) == (2, [0, 1], "resume:1")
        assert set(config.key_norms) == {0, 1} and can_refit(mot)
        assert mot.handoff(TEXT, **pair).get_seq_length() > 30
    assert result.report["resume_layer"] == result.no_source.fit_report["resume_layer"] == 2


def test_outputs_end_with_what_goes_into_the_layer(pair, result):
    ids = pair["target_tokenizer"](TEXT, return_tensors="pt")["input_ids"]
    own = Pair(**pair, resume_layer=2)
    x, y = own.rows(result.translator, [TEXT])
    plain_x, plain_y = Pair(**pair).rows(
        MoTModel(Pair(**pair).config(source_layers=[0, 2], embedding_window=2)), [TEXT]
    )
    native = prefill(pair["target"], ids, hidden_layer=2).hidden_states
    torch.testing.assert_close(y[:, -32:], native[0, 1:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(y[:, :-32], plain_y[:, : y.shape[1] - 32], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x, plain_x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_full_rank_fit_of_a_model_to_itself_is_native(family):
    """The embeddings tell keys and values of layer 0 and, with these, some of what goes into layer 1."""
    assert error_to_itself(family, resume_layer=1) < 0.3


def test_budget_counts_the_layers_that_run(pair):
    geometry = Pair(**pair).target_geometry
    own = resume_flops(geometry, 1024, 2) / native_flops(geometry, 1024)
    share = own + 0.03
    mot = fit(DOCUMENTS, **pair, **OPTIONS, resume_layer=2, flops_share=share).translator
    assert 0.7 * share < mot.plan().flops_share(mot.config, 1024) <= share
    assert [len(ranks) for ranks in mot.config.piece_ranks] == [2, 2, 1]
    with pytest.raises(ValueError, match=r"`flops_share` is 0\.01, but the plan resume:1 alone takes 0\.\d+ of the"):
        fit(DOCUMENTS, **pair, **OPTIONS, resume_layer=2, flops_share=0.01)


def test_other_options_go_with_it(pair, tmp_path):
    options = {**OTHERS, "restored_layers": [0]}
    kept = tmp_path / "moments.safetensors"
    found, again = (fit(DOCUMENTS, **pair, **options, resume_layer=2, statistics=kept) for _ in range(2))
    both = (each.translator.handoff(TEXT, **pair).layers[2].values for each in (found, again))
    torch.testing.assert_close(*both, atol=1e-4, rtol=1e-4)
    save_fit(found, tmp_path / "mot")
    loaded = MoTModel.from_pretrained(tmp_path / "mot" / "no_source").config
    assert (loaded.resume_layer, loaded.restored_layers) == (2, [0])
    with pytest.raises(ValueError, match="which was gathered with another `resume_layer`"):
        fit(DOCUMENTS, **pair, **{**options, "piece_weights": None}, resume_layer=1, statistics=kept)


@pytest.mark.parametrize("layer_idx", [-1, 0, 3])
def test_layers_that_are_not_there_are_refused(pair, layer_idx):
    with pytest.raises(ValueError, match="`resume_layer` must"):
        fit(DOCUMENTS, **pair, **OPTIONS, resume_layer=layer_idx)


def test_layers_read_and_resumed_exclude_each_other(pair):
    with pytest.raises(ValueError, match="`resume_layer` and `target_hidden_layer` exclude each other.*got 2 and 0"):
        fit(DOCUMENTS, **pair, **OPTIONS, target_hidden_layer=0, resume_layer=2)


@pytest.mark.parametrize("losses", ["cc", "pl"])
def test_training_teaches_the_state(pair, tmp_path, losses):
    model = MoTModel.from_pair(**pair, method="reduced_rank", rank=8, embedding_window=2, resume_layer=1)
    trainer = make_trainer(pair, make_args(tmp_path / "run", losses=losses, replay="resume:0"), model)
    trainer.compute_loss(trainer.model, trainer.data_collator(trainer.train_dataset.head(2))).backward()
    start = model.target_geometry.layers[0].width
    assert model.translator.bias.grad[start:].abs().max() > 0


def test_command_line_fits_and_shows_it(pair, tmp_path, capsys):
    save_pair(pair, tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(make_documents(12, 40)))
    given = [f"--{side}={tmp_path / side}" for side in ("source", "target")]
    given += ["--text", str(tmp_path / "text.txt"), "--lines", "--rank", "8", "--layers", "2", "--tokens", "600"]
    assert main(["fit", *given, "--out", str(tmp_path / "mot"), "--resume-layer", "2", "--restore", "all"]) == 0
    assert "gives layers 0 to 1 and what goes into layer 2, for the plan resume:1" in capsys.readouterr().out
    loaded = MoTModel.from_pretrained(tmp_path / "mot")
    assert (loaded.config.resume_layer, loaded.config.restored_layers) == (2, [0, 1])
    shown = format_description(describe(loaded))
    assert "2 of 3 target layers (0-1)" in shown and "what goes into layer 2, from which the target runs" in shown
    assert "translated is what goes into target layer 2 too" in render_card(loaded.config, loaded.fit_report)


def test_all_arms_are_those_that_the_target_can_resume_from(result, tmp_path):
    save_fit(result, tmp_path / "mot")
    arms = all_arms(SimpleNamespace(translator=str(tmp_path / "mot"), fit_text=None), result.translator)
    assert {"translated", "no_source", "identity"} <= set(arms) and "zero_cache" not in arms
    assert check_settings(result.translator, arms=arms, replay="resume:1+uncertain:4")[: len(arms)] == arms


@pytest.mark.parametrize("plans", [{}, {"replay": "full", "curve": ["full", "resume:1"]}])
def test_arms_of_keys_and_values_alone_are_refused_before_a_model_is_loaded(result, plans):
    with pytest.raises(ValueError, match="`arms` holds raw_copy, which give keys and values alone, .* resume:1 runs"):
        check_settings(result.translator, arms=["translated", "raw_copy"], **plans)
    check_settings(result.translator, arms=["translated", "raw_copy"], replay="full")
