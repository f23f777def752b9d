"""Translators that read, beside the source, the target's own hidden state at the bottom: plan `bottom` computes it."""

import subprocess
import sys

import pytest
import torch
from conftest import (
    FAMILIES,
    changed,
    make_documents,
    make_own,
    make_pair,
    make_random_translator,
    make_tokenizer,
    save_pair,
)
from families import FAMILIES as ALL_FAMILIES
from test_replay_parts import assert_equal_states, patches, tokens_run

from hf_mot import MoTConfig, MoTModel, ReplayPlan
from hf_mot.capture_mot import prefill
from hf_mot.compat_mot import decoder_of
from hf_mot.contract_mot import describe_model
from hf_mot.geometry_mot import ModelGeometry, probe
from hf_mot.layers_mot import layer_inputs
from hf_mot.replay_cost_mot import bottom_flops
from hf_mot.translators_mot import translator_flops

TOLERANCE = 1e-4
TEXTS = make_documents(1, 4, 1) + make_documents(1, 12, 2)  # the second goes beyond the windows
SOME = ("GPT-2", "OPT (350m: projections, post-norm)", "Llama", "Gemma-3", "Falcon (alibi)", "GPT-OSS")
MODULES = {
    "reduced_rank": {"method": "reduced_rank", "rank": 8},
    "full rank": {"method": "reduced_rank", "rank": None},
    "mot": {"method": "mot", "hidden_size": 16, "num_translators": 2},
    "mot + linear path": {"method": "mot", "hidden_size": 16, "linear_path": True, "rank": 8},
    "trunk": {"method": "mot", "hidden_size": 16, "trunk": True, "rank": 8},
    "mlp": {"method": "mlp", "hidden_size": 16},
}


def random_translator(pair, layer=0, **fields):
    """A translator with random weights that reads the input of a target layer."""
    return make_random_translator(pair, target_hidden_layer=layer, **fields)


@pytest.fixture(params=FAMILIES, scope="module")
def own(request):
    return make_own(request.param)


@pytest.fixture(scope="module")
def pair():
    return make_pair()


def inputs_of(mot, pair, texts):
    cache, ids, mask = mot.read_source(texts, pair["source"], pair["source_tokenizer"])
    arguments = {name: pair[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
    return mot.prepare(cache, ids, source_attention_mask=mask, text=texts, **arguments)


# What is read


@pytest.mark.parametrize("family", SOME)
def test_hidden_state_is_that_of_a_plain_forward(family):
    torch.manual_seed(0)
    model = ALL_FAMILIES[family](90)
    ids = torch.randint(90, (2, 20))
    with torch.no_grad():
        plain = decoder_of(model)(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    before, depth = patches(model), len(probe(model).layers)
    assert probe(model).hidden_dim == plain[0].shape[2]
    for layer_idx in range(depth):
        found = prefill(model, ids, layers=range(layer_idx + 1), hidden_layer=layer_idx).hidden_states
        torch.testing.assert_close(found, plain[layer_idx], atol=1e-5, rtol=1e-5)
        assert (found - plain[1 if layer_idx == 0 else 0]).abs().max() > 0.1
    whole = prefill(model, ids, hidden_layer=1)
    torch.testing.assert_close(whole.hidden_states, plain[1], atol=1e-5, rtol=1e-5)
    assert patches(model) == before


def test_model_is_left_as_it_was_when_it_crashes(own):
    before = patches(own["target"])
    with pytest.raises(IndexError), layer_inputs(own["target"], [0]):
        own["target"](torch.tensor([[10**6]]))
    assert patches(own["target"]) == before


@pytest.mark.parametrize("plan", ["bottom:2", "bottom:2+tokens:3"])
def test_target_reads_its_bottom_once_and_padded_rows_as_alone(own, plan):
    mot = random_translator(own, layer=1)
    plan = ReplayPlan.parse(plan)
    source_cache, ids, source_mask = mot.read_source(TEXTS, own["source"], own["source_tokenizer"])
    arguments = {name: own[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
    arguments |= {"source_attention_mask": source_mask, "text": TEXTS, "replay": plan}
    with tokens_run(own["target"]) as (given, done):
        cache = mot.translate(source_cache, ids, **arguments)
    length = cache.prefix_mask.shape[1]
    prefix, last = len(mot.config.target["prefix_ids"]), plan.tokens
    assert given == [prefix + length, prefix + length, prefix + last]
    assert done == [prefix + length, prefix + last, prefix + last]
    for row, text in enumerate(TEXTS):
        alone = mot.handoff(text, replay=plan, **own)
        kept = cache.prefix_mask[row].bool()
        for ours, theirs in zip(cache.layers, alone.layers, strict=True):
            torch.testing.assert_close(ours.keys[row][:, kept], theirs.keys[0], atol=TOLERANCE, rtol=1e-4)
            torch.testing.assert_close(ours.values[row][:, kept], theirs.values[0], atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("bottom", [1, 2])
def test_translation_is_of_the_hidden_state_below_native_layers(own, bottom):
    """Written out: native below, above the module's output of what a plain forward shows."""
    mot = random_translator(own, layer=0)
    inputs = inputs_of(mot, own, TEXTS[:1])
    with torch.no_grad():
        shown = decoder_of(own["target"])(input_ids=inputs.target_ids, output_hidden_states=True, use_cache=False)
        output = mot(inputs.source_states, inputs.embeddings, target_hidden_states=shown.hidden_states[0])
        other = mot(inputs.source_states, inputs.embeddings, target_hidden_states=shown.hidden_states[1])
    native = prefill(own["target"], inputs.target_ids)
    cache = mot.handoff(TEXTS[0], replay=f"bottom:{bottom}", **own)
    for layer_idx in range(bottom):
        assert_equal_states(cache.layers[layer_idx], native.layers[layer_idx], inputs.target_mask)
    for layer_idx in range(bottom, 3):
        values = cache.layers[layer_idx].values[:, :, 1:]
        torch.testing.assert_close(values, output.value_states[layer_idx - 1][:, :, 1:], atol=TOLERANCE, rtol=1e-4)
        assert (values - other.value_states[layer_idx - 1][:, :, 1:]).abs().max() > 0.1


@pytest.mark.parametrize("form", MODULES)
@pytest.mark.parametrize("source", [True, False], ids=["source", "no source"])
def test_every_module_reads_it_and_pads_play_no_part(pair, form, source):
    fields = MODULES[form] if source else {**MODULES[form], "source_layers": []}
    mot = random_translator(pair, layer=0, **fields)
    inputs = mot.read_target(inputs_of(mot, pair, TEXTS), pair["target"], mot.plan())
    hidden = inputs.target_hidden_states
    assert not hidden[inputs.target_mask == 0].any() and hidden[:, -4:].abs().sum(-1).all()
    read = mot.forward_arguments(inputs, mot.plan())
    with torch.no_grad():
        output = mot(**read)
        other = mot(**{**read, "target_hidden_states": -hidden})
        upper = mot(**read, first_layer=2)
    assert (output.value_states[0] - other.value_states[0])[:, :, -4:].abs().max() > 1e-3
    assert len(output.key_states) == 2 and len(upper.key_states) == 1
    torch.testing.assert_close(upper.value_states[0], output.value_states[1], atol=1e-5, rtol=1e-4)
    alone = mot.read_target(inputs_of(mot, pair, TEXTS[:1]), pair["target"], mot.plan())
    with torch.no_grad():
        single = mot(**mot.forward_arguments(alone, mot.plan()))
    kept = inputs.target_mask[0].bool()
    torch.testing.assert_close(output.value_states[0][0][:, kept], single.value_states[0][0], atol=1e-4, rtol=1e-3)


def test_longer_contexts_change_no_earlier_token(pair):
    mot = random_translator(pair, layer=1)
    text = make_documents(1, 12)[0]
    whole = mot.handoff(text, **pair)
    part = mot.handoff(text[: text.rindex(" ")], **pair)
    length = part.get_seq_length()
    assert length < whole.get_seq_length()
    for ours, theirs in zip(whole.layers, part.layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, : length - 1], theirs.keys[:, :, :-1], atol=TOLERANCE, rtol=1e-4)


# How it is kept, and what it costs


def test_plan_and_layers_are_those_that_it_needs(pair):
    mot = random_translator(pair, layer=1)
    assert (str(mot.plan()), mot.config.target_layers, mot.config.source_layers) == ("bottom:2", [2], [2])
    assert str(mot.plan("bottom:2+tokens:4")) == "bottom:2+tokens:4"
    with tokens_run(pair["target"]) as (given, _):
        cache = mot.handoff(TEXTS[0], replay="bottom:3", **pair)
    assert given[2] == cache.get_seq_length()


def test_it_is_saved_and_loaded(pair, tmp_path):
    mot = random_translator(pair, layer=1, key_norms=[2])
    mot.save_pretrained(tmp_path)
    loaded = MoTModel.from_pretrained(tmp_path).eval()
    assert loaded.config.target_hidden_layer == 1 and str(loaded.plan()) == "bottom:2"
    for ours, theirs in zip(loaded.handoff(TEXTS, **pair).layers, mot.handoff(TEXTS, **pair).layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=0, rtol=0)


def test_it_loads_in_a_process_without_the_package(pair, tmp_path):
    mot = random_translator(pair, layer=1)
    mot.save_pretrained(tmp_path / "mot")
    save_pair(pair, tmp_path)
    torch.save(mot.handoff(TEXTS[1], **pair).layers[2].values, tmp_path / "expected.pt")
    code = f"""
import sys, torch
sys.modules["hf_mot"] = None
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
pair = {{}}
for side in ("source", "target"):
    pair[side] = AutoModelForCausalLM.from_pretrained(side)
    pair[f"{{side}}_tokenizer"] = AutoTokenizer.from_pretrained(side)
mot = AutoModel.from_pretrained("mot", trust_remote_code=True).eval()
cache = mot.handoff({TEXTS[1]!r}, **pair)
torch.testing.assert_close(cache.layers[2].values, torch.load("expected.pt"), atol=1e-5, rtol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", ["reduced_rank", "mot"])
def test_flops_count_what_is_read_and_what_the_target_runs(pair, form):
    mot = random_translator(pair, layer=0, source_layers=[0, 2], **MODULES[form])
    without = MoTConfig(**{**fields_of(mot.config), "target_hidden_layer": None})
    more = translator_flops(mot.config, 50) - translator_flops(without, 50)
    width = probe(pair["target"]).hidden_dim
    assert more == 2 * 50 * width * 8 if form == "reduced_rank" else more > 2 * 2 * 50 * width * 16
    plan = mot.plan()
    own = translator_flops(mot.config, 50) + bottom_flops(mot.target_geometry, 50, 1)
    assert plan.flops(mot.config, 50) == own


def fields_of(config):
    return {name: getattr(config, name) for name in type(config).__annotations__ if name != "model_type"}


# What is refused


@pytest.mark.parametrize("plan", ["none", "bottom:1", "bottom:1+tokens:3", "tokens:3", "full", "full:2-2", "sparse:4"])
def test_plan_without_the_layer_is_refused_before_anything_runs(pair, plan):
    mot = random_translator(pair, layer=1)
    message = r"but this translator reads what goes into layer 1 of the target .*Pass replay='bottom:2'"
    with tokens_run(pair["target"]) as (given, _), pytest.raises(ValueError, match=message):
        mot.handoff(TEXTS[0], replay=plan, **pair)
    assert given == [0, 0, 0]
    with pytest.raises(ValueError, match=message):
        MoTModel(MoTConfig(**{**fields_of(mot.config), "replay": plan}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_hidden_layer": -1}, "`target_hidden_layer` must be a layer of the target, from 0, or None, got -1"),
        (
            {"target_hidden_layer": 2, "target_layers": [3]},
            r"`target_hidden_layer` must lie in 0\.\.1, so that one of",
        ),
        ({"target_layers": None}, r"`target_layers` must lie above `target_hidden_layer` 0.*from 1 .*got None"),
        ({"target_layers": [0, 1, 2]}, r"`target_layers` must lie above `target_hidden_layer` 0"),
        ({"target_layers": [1]}, r"`target_layers` must go up to the target's last layer, 2"),
        ({"method": "identity"}, "`target_hidden_layer` is for translators"),
    ],
)
def test_impossible_configurations_are_refused(pair, change, message):
    fields = {**fields_of(random_translator(pair, layer=0).config), **change}
    with pytest.raises(ValueError, match=message):
        MoTModel(MoTConfig(**fields))


def test_last_layer_and_above_are_refused(pair):
    for layer_idx in (2, 7):
        with pytest.raises(ValueError, match=r"`target_hidden_layer` must lie in 0\.\.1, so that one of"):
            random_translator(pair, layer=layer_idx)


def test_model_whose_layers_get_several_hidden_states_is_refused():
    tokenizer = make_tokenizer(merges=40)
    torch.manual_seed(0)
    model = ALL_FAMILIES["Gemma-3n"](len(tokenizer))
    pair = {"source": model, "target": model, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    assert probe(model).hidden_dim is None
    with pytest.raises(ValueError, match=r"layers of this target \(gemma3n_text\) do not each get one hidden state"):
        MoTModel.from_pair(**pair, target_hidden_layer=0, method="reduced_rank", rank=4)


def test_contract_that_does_not_tell_is_taken_by_others_alone(pair):
    contract = describe_model(pair["target"], pair["target_tokenizer"])
    older = changed(contract, ("geometry", "hidden_dim"), ...)
    assert ModelGeometry.from_dict(older["geometry"]).hidden_dim is None
    source = describe_model(pair["source"], pair["source_tokenizer"])
    MoTModel.from_contracts(source, older)
    with pytest.raises(ValueError, match="of an earlier release and does not tell"):
        MoTModel.from_contracts(source, older, target_hidden_layer=0)
    with pytest.raises(ValueError, match="`hidden_dim` of `geometry` must be a size or null"):
        ModelGeometry.from_dict(changed(contract, ("geometry", "hidden_dim"), "wide")["geometry"])


def test_last_tokens_that_are_read_before_they_are_run_are_refused(pair):
    mot = random_translator(pair, layer=0, method="mot", hidden_size=16, causal=False)
    mot.handoff(TEXTS[0], replay="bottom:1", **pair)
    with pytest.raises(ValueError, match="is not `causal`: .*Pass replay='bottom:1'"):
        mot.handoff(TEXTS[0], replay="bottom:1+tokens:3", **pair)


def test_states_of_another_plan_and_missing_ones_are_refused(pair):
    mot = random_translator(pair, layer=0)
    inputs = inputs_of(mot, pair, TEXTS[:1])
    with pytest.raises(ValueError, match="`target_hidden_states` is required: .*layer 0.*read_target"):
        mot.run(inputs, mot.plan())
    read = mot.read_target(inputs, pair["target"], mot.plan())
    with torch.no_grad():
        output = mot.run(read, mot.plan())
        with pytest.raises(ValueError, match="`bottom_states` must be 2 layers of .* by the plan bottom:2"):
            mot.assemble(output, read, pair["target"], ReplayPlan(bottom=2))
