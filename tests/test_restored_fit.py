"""The closed form onto what goes into the attention of layers (MoT-h), its twin, budget, and what is said of it."""

import pytest
import torch
from conftest import make_documents, make_pair, save_pair
from small_fit import DOCUMENTS, OPTIONS, OTHERS, TEXT, error_to_itself
from training_pair import make_args, make_trainer

from hf_mot import MoTModel
from hf_mot.capture_mot import prefill
from hf_mot.cli.fit import format_fit
from hf_mot.cli.inspect import describe, format_description
from hf_mot.cli.main import main
from hf_mot.fit import fit, save_fit
from hf_mot.fit.pair import Pair
from hf_mot.hub.card import render_card
from hf_mot.replay_cost_mot import native_flops, projection_flops
from hf_mot.restore_mot import attention_inputs


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def result(pair):
    return fit(DOCUMENTS, **pair, **OPTIONS, restored_layers=[1])


def test_fit_and_its_twin_give_the_state_of_these_layers(pair, result):
    for mot in (result.translator, result.no_source):
        assert mot.config.restored_layers == [1] and set(mot.config.key_norms) == {0, 2}
        assert mot.handoff(TEXT, **pair).get_seq_length() > 30
    assert result.report["restored_layers"] == result.no_source.fit_report["restored_layers"] == [1]


def test_outputs_are_native_states_and_what_goes_into_the_attention(pair, result):
    own = Pair(**pair, restored_layers=[1])
    _, y = own.rows(result.translator, [TEXT])
    plain = Pair(**pair).rows(MoTModel(Pair(**pair).config(source_layers=[0, 2], rank=1)), [TEXT])[1]
    ids = pair["target_tokenizer"](TEXT, return_tensors="pt")["input_ids"]
    with attention_inputs(pair["target"], [1]) as shown:
        prefill(pair["target"], ids)
    below, state, above = y.split([own.target_geometry.layers[0].width, 32, own.target_geometry.layers[2].width], 1)
    torch.testing.assert_close(state, shown[1][0][0, 1:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(below, plain[:, : below.shape[1]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(above, plain[:, -above.shape[1] :], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_full_rank_fit_of_a_model_to_itself_is_native(family):
    """The input of the attention of layer 1 is no linear map of keys and values, but the target's embeddings tell what
    goes into that of layer 0, which its keys and values come of."""
    assert error_to_itself(family) < 0.05 and error_to_itself(family, restored_layers=[0]) < 0.3


def test_budget_counts_what_the_target_restores(pair):
    geometry = Pair(**pair).target_geometry
    own = projection_flops(geometry, 1024, 1) / native_flops(geometry, 1024)
    share = own + 0.03
    mot = fit(DOCUMENTS, **pair, **OPTIONS, restored_layers=[1], flops_share=share).translator
    assert 0.7 * share < mot.plan().flops_share(mot.config, 1024) <= share
    assert [len(ranks) for ranks in mot.config.piece_ranks] == [2, 1, 2]
    with pytest.raises(ValueError, match=r"`flops_share` is 0\.01, but restoring layers alone takes 0\.\d+ of the"):
        fit(DOCUMENTS, **pair, **OPTIONS, restored_layers=[1], flops_share=0.01)


def test_other_options_go_with_it(pair, tmp_path):
    options = {**OTHERS, "target_hidden_layer": 0}
    kept = tmp_path / "moments.safetensors"
    found, again = (fit(DOCUMENTS, **pair, **options, restored_layers=[2], statistics=kept) for _ in range(2))
    assert (found.translator.config.target_layers, found.translator.config.restored_layers) == ([1, 2], [2])
    both = (each.translator.handoff(TEXT, **pair).layers[2].values for each in (found, again))
    torch.testing.assert_close(*both, atol=1e-4, rtol=1e-4)
    save_fit(found, tmp_path / "mot")
    assert MoTModel.from_pretrained(tmp_path / "mot" / "no_source").config.restored_layers == [2]
    with pytest.raises(ValueError, match="which was gathered with another `restored_layers`"):
        fit(DOCUMENTS, **pair, **options, restored_layers=[1, 2], statistics=kept)


@pytest.mark.parametrize("layers", [[-1], [3]])
def test_layers_that_are_not_there_are_refused(pair, layers):
    with pytest.raises(ValueError, match=r"`restored_layers` must lie in 0\.\.2"):
        fit(DOCUMENTS, **pair, **OPTIONS, restored_layers=layers)


def test_training_teaches_the_state_and_needs_the_target(pair, tmp_path):
    model = MoTModel.from_pair(**pair, method="reduced_rank", rank=8, embedding_window=2, restored_layers=[1])
    trainer = make_trainer(pair, make_args(tmp_path / "run", losses="cc"), model)
    trainer.compute_loss(trainer.model, trainer.data_collator(trainer.train_dataset.head(2))).backward()
    start = model.target_geometry.layers[0].width
    assert model.translator.bias.grad[start : start + model.target_geometry.hidden_dim].abs().max() > 0


# What is said of it


def test_what_it_saves_is_said_plainly(pair, result):
    """Here 32 channels a token are no fewer than the 32 of one kv head of 16 and 16; in the other model 32 of 32."""
    said = "which saves nothing: 32 channels a token, where keys and values together have 32"
    config, report = result.translator.config, result.report
    assert said in render_card(config, report)
    assert said in format_description(describe(result.translator))
    assert "attention" not in format_fit(report, "out")
    two = MoTModel.from_pair(**make_pair("gemma3", "gpt2"), restored_layers=[0, 2]).config
    assert "narrower than these: 32 channels a token, where keys and values together have 64" in render_card(two, {})


def test_command_line_restores_layers(pair, tmp_path, capsys):
    save_pair(pair, tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(make_documents(12, 40)))
    given = [f"--{side}={tmp_path / side}" for side in ("source", "target")]
    given += ["--text", str(tmp_path / "text.txt"), "--lines", "--rank", "8", "--layers", "2", "--tokens", "600"]
    assert main(["fit", *given, "--out", str(tmp_path / "all"), "--restore", "all"]) == 0
    assert "which saves nothing: 32 channels" in capsys.readouterr().out
    assert MoTModel.from_pretrained(tmp_path / "all").config.restored_layers == [0, 1, 2]
    with pytest.raises(SystemExit):
        main(["fit", *given, "--out", str(tmp_path / "none"), "--restore", "some"])
    assert "must be layers like 5,11 or all, got 'some'" in capsys.readouterr().err
