"""What holds for every plan; and `full`: the target runs all its layers, and translated states take the place of its
own in a window of them."""

import pytest
import torch
from conftest import FAMILIES, make_documents, make_own

from hf_mot import MoTModel, ReplayPlan
from hf_mot.compat_mot import cache_argument
from hf_mot.replay_cost_mot import native_flops
from hf_mot.replay_run_mot import replay

TOLERANCE = 1e-4
PARTS = ("bottom:1", "bottom:2", "bottom:3", "tokens:3", "bottom:1+tokens:3", "bottom:3+tokens:3")


@pytest.fixture(params=FAMILIES, scope="module")
def own(request):
    return make_own(request.param)


def inputs_of(own, texts):
    mot = MoTModel.identity(own["target"], own["target_tokenizer"])
    cache, ids, mask = mot.read_source(texts, own["source"], own["source_tokenizer"])
    arguments = {name: own[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
    return mot, mot.prepare(cache, ids, source_attention_mask=mask, text=texts, **arguments)


def prompt_logits(own, cache):
    prompt = own["target_tokenizer"](" the captain wrote", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return own["target"](prompt, **{cache_argument(own["target"]): cache.fork()}).logits


@pytest.mark.parametrize("plan", ["full", "full:1-1", "full:0-1", *PARTS])
@pytest.mark.parametrize("words", [4, 40], ids=["short", "beyond the window"])
def test_replay_of_the_targets_own_states_is_native(own, plan, words):
    mot = MoTModel.identity(own["target"], own["target_tokenizer"])
    text = make_documents(1, words)[0]
    ours = prompt_logits(own, mot.handoff(text, replay=plan, **own))
    native = prompt_logits(own, mot.handoff(text, **own))
    other = prompt_logits(own, mot.handoff(make_documents(1, words, seed=9)[0], replay=plan, **own))
    torch.testing.assert_close(ours, native, atol=TOLERANCE, rtol=0)
    assert (other - native).abs().max() > 0.1
    assert MoTModel.plan(mot, plan) == ReplayPlan.parse(plan) and str(mot.plan(plan)) == plan


@pytest.mark.parametrize("plan", ["full:0-1", "bottom:2", "tokens:3", "bottom:1+tokens:3"])
def test_padded_rows_are_replayed_as_alone(own, plan):
    texts = make_documents(1, 5, 1) + make_documents(1, 20, 2)
    mot = MoTModel.identity(own["target"], own["target_tokenizer"])
    batch = mot.handoff(texts, replay=plan, **own)
    for row, text in enumerate(texts):
        alone = mot.handoff(text, **own)
        kept = batch.prefix_mask[row].bool()
        for ours, theirs in zip(batch.layers, alone.layers, strict=True):
            torch.testing.assert_close(ours.keys[row][:, kept], theirs.keys[0], atol=TOLERANCE, rtol=1e-4)
            torch.testing.assert_close(ours.values[row][:, kept], theirs.values[0], atol=TOLERANCE, rtol=1e-4)


def test_window_alone_is_injected_and_changes_the_layers_above(own):
    mot, inputs = inputs_of(own, make_documents(1, 12))
    output = mot(inputs.source_states, inputs.embeddings)
    zeros = mot(torch.zeros_like(inputs.source_states), None)
    native, changed = (
        mot.assemble(states, inputs, own["target"], ReplayPlan.parse("full:1-1")) for states in (output, zeros)
    )
    prefix = len(mot.config.target["prefix_ids"])
    assert torch.equal(native.layers[0].keys, changed.layers[0].keys)
    assert not changed.layers[1].values[:, :, prefix:].any()
    torch.testing.assert_close(changed.layers[1].values[:, :, :prefix], native.layers[1].values[:, :, :prefix])
    assert (native.layers[2].keys - changed.layers[2].keys).abs().max() > 0.01
    assert (prompt_logits(own, native) - prompt_logits(own, changed)).abs().max() > 0.01


@pytest.mark.parametrize("plan", ["none", "full", "full:1-1", "bottom:1", "bottom:3", "tokens:3", "bottom:1+tokens:3"])
def test_gradient_reaches_every_translated_state(own, plan):
    mot, inputs = inputs_of(own, make_documents(1, 8))
    output = mot(inputs.source_states, inputs.embeddings)
    leaves = [part.detach().clone().requires_grad_() for part in (*output.key_states, *output.value_states)]
    depth = len(output.key_states)
    cache = replay(
        ReplayPlan.parse(plan),
        dict(enumerate(leaves[:depth])),
        dict(enumerate(leaves[depth:])),
        target=own["target"],
        contract=mot.config.target,
        target_ids=inputs.target_ids,
        target_mask=inputs.target_mask,
    )
    prompt = torch.tensor([[30, 31, 32]])
    own["target"](prompt, **{cache_argument(own["target"]): cache.fork()}).logits.logsumexp(-1).sum().backward()
    plan = ReplayPlan.parse(plan)
    layers = plan.layers(mot.target_layers, len(mot.target_geometry.layers))
    split = inputs.target_ids.shape[1] - plan.tokens
    for index, leaf in enumerate(leaves):
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        reached = bool(gradient[:, :, 1:split].any())
        assert reached == (index % depth in layers)
        assert not gradient[:, :, split:].any()  # of these, nobody reads the translation


def test_gradient_checkpointing_that_takes_the_cache_away_is_noticed():
    own = make_own("llama")
    mot, inputs = inputs_of(own, make_documents(1, 8))
    output = mot(inputs.source_states, inputs.embeddings)
    own["target"].activation_checkpointing_enable()
    own["target"].train()
    with pytest.raises(RuntimeError, match=r"ran past the cache in its layers \[1\]"):
        mot.assemble(output, inputs, own["target"], ReplayPlan.parse("full:1-1"))


@pytest.mark.parametrize("plan", ["most", "full:2", "full:a-b", "none:0-1", "", None])
def test_unknown_plan_is_refused(plan):
    with pytest.raises(ValueError, match="`replay` must be one of none, full, full:6-11 .* bottom:6.tokens:32, got"):
        ReplayPlan.parse(plan)


@pytest.mark.parametrize("plan", ["full:1-3", "full:2-1"])
def test_window_out_of_range_is_refused_before_anything_runs(plan):
    own = make_own("llama")
    mot = MoTModel.identity(own["target"], own["target_tokenizer"])
    with pytest.raises(
        ValueError, match=r"`replay` injects layers \d-\d, but the translator gives layers 0-2 of the target"
    ):
        mot.handoff("a letter", replay=plan, **own)


def test_cost_is_native_and_the_translator():
    own = make_own("llama")
    mot = MoTModel.identity(own["target"], own["target_tokenizer"])
    assert ReplayPlan.parse("full").flops(mot.config, 64) == native_flops(mot.target_geometry, 64)
    assert ReplayPlan.parse("full").flops_share(mot.config, 64) == 1.0
    assert str(ReplayPlan.parse("full:1-2")) == "full:1-2" and str(ReplayPlan()) == "none"
