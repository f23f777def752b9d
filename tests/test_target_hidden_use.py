"""Translators that read the target's hidden state, in evaluation and in training."""

from dataclasses import replace

import pytest
import torch
from conftest import make_documents, make_pair, make_translator
from test_arms import models_of, states, windows_of
from test_replay_parts import tokens_run
from test_target_hidden import random_translator
from training_pair import make_args, make_trainer

from hf_mot.data.capture import capture_states
from hf_mot.data.states import StatesDataset
from hf_mot.evaluation import evaluate
from hf_mot.evaluation.arms import ARMS
from hf_mot.evaluation.batch import Batch
from hf_mot.evaluation.curve import default_plans
from hf_mot.evaluation.settings import check_settings
from hf_mot.training import TextDataset


@pytest.fixture(scope="module")
def models():
    return make_pair()


@pytest.fixture(scope="module")
def pair(models):
    """Arguments of `evaluate`."""
    own = {"context_length": 24, "cost": False, "progress": False, **models}
    translator = random_translator(models, source_layers=[0, 2])
    return {**own, "translator": translator, "no_source": random_translator(models, source_layers=[])}


# The arms


@pytest.mark.parametrize("plan", ["bottom:1", "bottom:1+tokens:4"])
def test_target_layers_only_is_the_twin_made_once(pair, plan):
    models = replace(models_of(pair), replay=plan)
    first, second = windows_of(pair, make_documents(2))
    batch = Batch(models, [first], [second])
    caches = {arm: ARMS[arm].cache(batch) for arm in ("translated", "no_source", "wrong_source", "identity")}
    with tokens_run(pair["target"]) as (given, _):
        alone = ARMS["target_layers_only"].cache(batch)
    assert given == [0, 0, 0] and alone is caches["no_source"]
    for arm in ("translated", "wrong_source"):
        assert (states(caches[arm]) - states(alone))[:, :, :, 1:].abs().max() > 1e-2
    wrong = states(caches["wrong_source"]) - states(caches["translated"])
    assert wrong.abs().max() > 1e-2
    torch.testing.assert_close(states(caches["identity"]), states(batch.native_cache), atol=1e-4, rtol=1e-4)
    assert 0 < ARMS["target_layers_only"].flops(models, 24) < ARMS["translated"].flops(models, 24)


def test_wrong_source_of_the_same_document_is_the_translation(pair):
    (window,) = windows_of(pair, make_documents(1))
    batch = Batch(replace(models_of(pair), replay="bottom:1"), [window], [window])
    torch.testing.assert_close(states(ARMS["wrong_source"].cache(batch)), states(ARMS["translated"].cache(batch)))


def test_report_and_curve_have_the_arm(pair):
    arms = ["native", "no_context", "translated", "target_layers_only"]
    report = evaluate(documents=make_documents(4), arms=arms, curve=["bottom:2"], **pair)
    assert [point["replay"] for point in report["curve"]] == ["bottom:1", "bottom:2"]
    for point in report["curve"]:
        assert {"translated", "target_layers_only"} <= point["arms"].keys()
        assert point["arms"]["target_layers_only"]["nll"] != point["arms"]["translated"]["nll"]
    assert report["arms"]["target_layers_only"]["nll"] == report["curve"][0]["arms"]["target_layers_only"]["nll"]
    assert "target_layers_only" in report["better_by"]
    ratios = report["flops_ratios"]
    assert 0 < ratios["target_layers_only"] < ratios["translated"]


def test_plans_of_a_curve_run_the_layer(pair):
    plans = default_plans(pair["translator"], 24)
    assert plans[0] == "bottom:1" and all(plan.startswith("bottom:") for plan in plans)
    assert any("tokens" in plan for plan in plans)


def test_other_translators_have_no_such_arm(pair, models):
    with pytest.raises(ValueError, match="target_layers_only, but .* Fit one that does, with `target_hidden_layer`"):
        check_settings(make_translator(models), arms=["native", "target_layers_only"])
    with pytest.raises(ValueError, match="`no_source` is None, but the arm target_layers_only needs"):
        evaluate(documents=make_documents(2), **{**pair, "no_source": None, "arms": ["target_layers_only"]})


# Training


@pytest.fixture
def trainer(models, tmp_path):
    def make(plan="bottom:1", losses="cc,pl", **changes):
        model = random_translator(models, source_layers=[0, 2])
        return make_trainer(models, make_args(tmp_path / "run", losses=losses, replay=plan), model, **changes)

    return make


@pytest.mark.parametrize("plan", ["bottom:1", "bottom:2", "bottom:1+tokens:2"])
def test_training_reads_what_a_handoff_reads(models, trainer, plan):
    own = trainer(plan)
    examples = own.train_dataset.head(2)
    batch = own.data_collator(examples)
    read = own.comparison.inputs(own.translator, batch)
    with torch.no_grad():
        output = own.translator(**own.translator.forward_arguments(read, own.comparison.plan))
        ours = own.translator.assemble(output, read, models["target"], own.comparison.plan)
    theirs = own.translator.handoff([example.text for example in examples], replay=plan, **models)
    torch.testing.assert_close(states(ours), states(theirs), atol=1e-4, rtol=1e-4)


def test_every_loss_teaches_how_to_read_it(trainer):
    for losses in ("cc", "pl", "distill"):
        own = trainer(losses=losses)
        own.compute_loss(own.model, own.data_collator(own.train_dataset.head(2))).backward()
        assert own.model.translator.hidden_in.weight.grad.abs().max() > 0, losses


def test_a_run_ends_in_such_a_translator(trainer):
    own = trainer()
    before = own.translator.translator.hidden_in.weight.detach().clone()
    own.train()
    assert (own.translator.translator.hidden_in.weight - before).abs().max() > 0
    assert own.translator.config.replay == "bottom:1" and own.translator.config.target_hidden_layer == 0


def test_captured_states_stand_for_the_source_and_the_target_runs_its_bottom(models, trainer, tmp_path):
    args = make_args(tmp_path)
    examples = TextDataset.from_args(make_documents(6), models["target_tokenizer"], args).head(2)
    own = trainer(losses="cc", train_dataset=examples)
    capture_states(
        examples, own.translator, **models, folder=tmp_path / "s", top_logits=0, dtype="float32", progress=False
    )
    captured = trainer(losses="cc", train_dataset=StatesDataset(tmp_path / "s", own.translator.config), source=None)
    batch = captured.data_collator([captured.train_dataset[0], captured.train_dataset[1]])
    both = ((own, own.data_collator(examples)), (captured, batch))
    live, found = (each.compute_loss(each.model, rows).item() for each, rows in both)
    assert found == pytest.approx(live, rel=1e-3)
    live, found = (each.comparison.inputs(each.translator, rows).target_hidden_states for each, rows in both)
    torch.testing.assert_close(found, live, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="`target` is required: the plan bottom:1 cannot be trained on"):
        trainer(losses="cc", train_dataset=captured.train_dataset, source=None, target=None)
