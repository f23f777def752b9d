"""Plans and forms that go together: single tokens that run again, above what is resumed from or restored."""

from dataclasses import replace

import pytest
import torch
from conftest import make_documents, make_own, make_tokenizer
from families import FAMILIES as ALL_FAMILIES
from test_restored import native_output
from test_restored import random_translator as restoring
from test_target_hidden import inputs_of
from test_uncertain import prompt_logits
from test_upper_layers import random_translator as resuming

from hf_mot import MoTModel
from hf_mot.capture_mot import prefill

TEXTS = make_documents(1, 4, 1) + make_documents(1, 12, 2)  # the second goes beyond the windows
TOLERANCE, STATES = 1e-4, ("keys", "values")
# Learned positions, sliding windows, biases by distance, sinks.
SOME = ("GPT-2", "Gemma-3", "Falcon (alibi)", "GPT-OSS")


@pytest.fixture(params=SOME, scope="module")
def own(request):
    tokenizer = make_tokenizer(merges=40)
    torch.manual_seed(0)
    model = ALL_FAMILIES[request.param](len(tokenizer))
    return {"source": model, "target": model, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}


def spoiled(output, wrong):
    """The same translation, but of other states in slots where `wrong` is 1, `[batch, seq]`; which it knows."""

    def turned(states):
        at = wrong[:, None, :, None] if states.dim() == 4 else wrong[..., None]
        return states - 2 * at * states + at

    parts = {
        name: tuple(map(turned, output[name]))
        for name in ("key_states", "value_states", "attention_inputs")
        if name in output
    }
    hidden = None if output.hidden_states is None else turned(output.hidden_states)
    return replace(output, **parts, hidden_states=hidden, log_error=wrong)


def off(cache, native, mask):
    """The largest error of a cache's tokens, layer by layer, relative to the largest state."""
    errors = []
    for ours, theirs in zip(cache.layers, native.layers, strict=True):
        pairs = ((getattr(each, name).transpose(1, 2)[mask.bool()] for each in (ours, theirs)) for name in STATES)
        errors.append(max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs))
    return errors


@pytest.mark.parametrize("plan", ["resume:0+uncertain:4", "resume:0+tokens:1+uncertain:3"])
def test_wrong_tokens_at_the_end_become_native_where_the_target_resumes(own, plan):
    """What stands before them is right, and the target's own: the layers above run over all of it."""
    target, mot = own["target"], MoTModel.identity(own["target"], own["target_tokenizer"])
    plan = mot.plan(plan)
    with torch.no_grad():
        inputs = mot.read_target(inputs_of(mot, own, TEXTS), target, plan)
        right = mot.run(inputs, plan)
        wrong = torch.zeros(inputs.target_mask.shape)
        wrong[:, -4:] = 1
        output = spoiled(right, wrong[:, : right.log_error.shape[1]])
        ours, others = (
            mot.assemble(each, inputs, target, plan) for each in (output, replace(output, log_error=-output.log_error))
        )
    native = prefill(target, inputs.target_ids, inputs.target_mask)
    assert max(off(ours, native, inputs.target_mask)) < TOLERANCE
    assert min(off(others, native, inputs.target_mask)) > 0.1


def test_all_tokens_are_native_whatever_the_target_resumes_from(own):
    mot, tokenizer = resuming(own, layer=1, predicts_error=True), own["target_tokenizer"]
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    prefix = len(mot.config.target["prefix_ids"])
    native = prefill(own["target"], ids)
    cache = mot.handoff(TEXTS[0], replay=f"resume:0+uncertain:{ids.shape[1] - prefix}", **own)
    fewer = mot.handoff(TEXTS[0], replay="resume:0+uncertain:3", **own)
    assert max(off(cache, native, cache.prefix_mask)) < TOLERANCE
    assert min(off(fewer, native, cache.prefix_mask)) > 0.1


@pytest.mark.parametrize("plan", ["uncertain:4", "bottom:1+uncertain:4", "tokens:1+uncertain:4"])
def test_wrong_tokens_become_native_above_restored_layers(own, plan):
    target, mot = own["target"], restoring(own, [1], predicts_error=True)
    inputs, plan = inputs_of(mot, own, TEXTS), mot.plan(plan)
    right, native = native_output(mot, inputs, target)
    length = inputs.target_mask.shape[1]
    slots = torch.tensor([[length - 9, length - 8, length - 4, length - 2], [3, 4, length - 20, length - 2]])
    output = spoiled(right, torch.zeros(inputs.target_mask.shape).scatter(1, slots, 1.0))
    with torch.no_grad():
        ours = mot.assemble(output, inputs, target, plan)
        others = mot.assemble(replace(output, log_error=-output.log_error), inputs, target, plan)
    assert max(off(ours, native, inputs.target_mask)) < TOLERANCE
    assert off(others, native, inputs.target_mask)[1] > 0.1


@pytest.mark.parametrize("form", ["resumed", "restored"])
def test_padded_rows_are_as_alone(own, form):
    if form == "resumed":
        mot = resuming(own, layer=1, predicts_error=True)
    else:
        mot = restoring(own, [1], predicts_error=True)
    torch.nn.init.normal_(mot.translator.error.weight, generator=torch.Generator().manual_seed(3))
    plan = "resume:0+tokens:1+uncertain:3" if form == "resumed" else "tokens:1+uncertain:3"
    batch = mot.handoff(TEXTS, replay=plan, **own)
    for row, text in enumerate(TEXTS):
        alone = mot.handoff(text, replay=plan, **own)
        ours, mask = batch.rows(torch.tensor([row])), batch.prefix_mask[row][None]
        assert max(off(ours, _padded(alone, batch), mask)) < 10 * TOLERANCE


def _padded(alone, batch):
    """A row's own cache, at the places that it has in a batch."""
    lacking = batch.prefix_mask.shape[1] - alone.prefix_mask.shape[1]
    padded = alone.fork()
    for layer in padded.layers:
        layer.keys, layer.values = (
            torch.nn.functional.pad(part, (0, 0, lacking, 0)) for part in (layer.keys, layer.values)
        )
    return padded


@pytest.mark.parametrize("plan", ["resume:1+uncertain:4", "resume:0+tokens:2+uncertain:3"])
def test_own_states_give_native_logits(plan):
    pair = make_own("gemma3")
    mot = MoTModel.identity(pair["target"], pair["target_tokenizer"])
    ours, native, other = (
        prompt_logits(pair, mot.handoff(text, replay=by, **pair))
        for text, by in ((TEXTS[1], plan), (TEXTS[1], "none"), (TEXTS[0], plan))
    )
    torch.testing.assert_close(ours, native, atol=TOLERANCE, rtol=0)
    assert (other - native).abs().max() > 0.1
