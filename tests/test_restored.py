"""MoT-h: keys and values that the target makes of what goes into a layer's attention, which is translated."""

from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES, changed, make_documents, make_own, make_pair, make_random_translator, make_tokenizer
from families import FAMILIES as ALL_FAMILIES
from test_identity import logits_after, prompt_ids
from test_replay_parts import assert_equal_states, patches
from test_target_hidden import MODULES, fields_of, inputs_of
from torch.utils.flop_counter import FlopCounterMode

from hf_mot import MoTConfig, MoTModel, ReplayPlan
from hf_mot.capture_mot import prefill, source_states, split_layers
from hf_mot.contract_mot import describe_model
from hf_mot.geometry_mot import probe
from hf_mot.replay_cost_mot import bottom_flops, native_flops, projection_flops
from hf_mot.restore_mot import attention_inputs, restore
from hf_mot.rows_mot import positions_from_mask
from hf_mot.translators_mot import translator_flops
from hf_mot.translators_output_mot import MoTOutput
from hf_mot.translators_widths_mot import Widths

TOLERANCE = 1e-4
TEXTS = make_documents(1, 4, 1) + make_documents(1, 12, 2)  # the second goes beyond the windows
# One of each way in which layers, attention and cache are called.
SOME = (
    *("GPT-2", "GPT-Neo (global and local)", "OPT (350m: projections, post-norm)", "CTRL", "Bloom", "MPT", "GPT-J"),
    *("Falcon (new decoder)", "Llama", "Phi-3", "OLMo-2", "Gemma-3", "Gemma-4 (shared KV layers)", "DeepSeek-V3"),
    *("ModernBERT (decoder)", "DBRX", "JetMoE", "GPT-OSS", "DiffLlama"),
)


def random_translator(pair, restored=(1,), **fields):
    """A translator with random weights that gives some layers as what goes into their attention."""
    return make_random_translator(pair, restored_layers=list(restored), **fields)


@pytest.fixture(params=FAMILIES, scope="module")
def own(request):
    return make_own(request.param)


@pytest.fixture(scope="module")
def pair():
    return make_pair()


def native_output(mot, inputs, target):
    """What a perfect translator would give: the target's own states, by its own forward pass."""
    restored, geometry = mot.config.restored_layers, mot.target_geometry
    with torch.no_grad(), attention_inputs(target, restored) as shown:
        cache = prefill(target, inputs.target_ids, inputs.target_mask)
    layers = [layer_idx for layer_idx in mot.target_layers if layer_idx not in restored]
    states = source_states(cache, geometry, layers, positions_from_mask(inputs.target_mask)) if layers else None
    keys, values = split_layers(states, geometry, layers) if layers else ((), ())
    return MoTOutput(keys, values, tuple(shown[layer_idx][0] for layer_idx in restored)), cache


# What restores


@pytest.mark.parametrize("family", SOME)
def test_attention_makes_native_keys_and_values_of_native_inputs(family):
    """Of padded rows, with other text beneath: only the states and their positions matter."""
    torch.manual_seed(0)
    model = ALL_FAMILIES[family](90)
    ids, layers = torch.randint(90, (2, 20)), range(len(probe(model).layers))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    before = patches(model)
    with torch.no_grad(), attention_inputs(model, layers) as shown:
        native = prefill(model, ids, mask)
    activations = {layer_idx: own for layer_idx, (own,) in shown.items()}
    padding = (mask, positions_from_mask(mask))
    with torch.no_grad():
        found = restore(model, activations, ids.flip(1), *padding)
        other = restore(model, {layer_idx: -own for layer_idx, own in activations.items()}, ids, *padding)
        some = restore(model, {1: activations[1]}, ids, *padding)
    for layer_idx, layer in enumerate(native.layers[: len(layers)]):
        for ours, theirs in zip(found[layer_idx], (layer.keys, layer.values), strict=True):
            pair = (part.transpose(1, 2)[mask.bool()] for part in (ours, theirs))
            torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-4)
        assert (other[layer_idx][1] - found[layer_idx][1]).abs().max() > 0.1
    assert list(some) == [1] and torch.equal(some[1][0], found[1][0])
    assert patches(model) == before


def test_model_is_left_as_it_was_when_restoring_crashes(own):
    before, dim = patches(own["target"]), probe(own["target"]).hidden_dim
    with pytest.raises(RuntimeError):
        restore(own["target"], {0: torch.zeros(1, 3, dim + 1)}, torch.zeros(1, 3, dtype=torch.long))
    assert patches(own["target"]) == before


# Through the whole path


@pytest.mark.parametrize("restored", [[0, 1, 2], [1]], ids=["all", "mixed"])
@pytest.mark.parametrize("plan", ["none", "bottom:1", "tokens:3", "bottom:1+tokens:3", "full", "full:1-2"])
def test_native_states_give_the_native_cache_and_logits(own, plan, restored):
    mot, plan = random_translator(own, restored), ReplayPlan.parse(plan)
    model, inputs = own["target"], inputs_of(mot, own, TEXTS)
    output, native = native_output(mot, inputs, model)
    with torch.no_grad():
        ours = mot.assemble(output, inputs, model, plan)
        off = replace(output, attention_inputs=tuple(-part for part in output.attention_inputs))
        other = mot.assemble(off, inputs, model, plan)
    for layer_idx, layer in enumerate(ours.layers):
        assert_equal_states(layer, native.layers[layer_idx], inputs.target_mask, atol=TOLERANCE, rtol=1e-4)
        assert not layer.keys.transpose(1, 2)[inputs.target_mask == 0].any()
    layer_idx = max(restored)
    assert (other.layers[layer_idx].values - ours.layers[layer_idx].values).abs().max() > 0.1
    prompt, ids = prompt_ids(own), inputs.target_ids[1:]  # the row without pads
    whole = logits_after(model, torch.cat([ids, prompt], 1))[:, ids.shape[1] :]
    without = logits_after(model, torch.cat([ids[:, :1], prompt], 1))[:, 1:]
    torch.testing.assert_close(
        logits_after(model, prompt, ours.rows(torch.tensor([1])).fork()), whole, atol=TOLERANCE, rtol=1e-4
    )
    assert (without - whole).abs().max() > 0.5


def test_padded_rows_are_as_alone(own):
    mot = random_translator(own, [0, 2])
    batch = mot.handoff(TEXTS, **own)
    for row, text in enumerate(TEXTS):
        alone, kept = mot.handoff(text, **own), batch.prefix_mask[row].bool()
        for ours, theirs in zip(batch.layers, alone.layers, strict=True):
            torch.testing.assert_close(ours.keys[row][:, kept], theirs.keys[0], atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("form", MODULES)
@pytest.mark.parametrize("restored", [[0, 1, 2], [1]], ids=["all", "mixed"])
def test_every_module_gives_such_states(pair, form, restored):
    mot = random_translator(pair, restored, source_layers=[0, 2, 2], **MODULES[form])
    inputs, geometry = inputs_of(mot, pair, TEXTS), mot.target_geometry
    read = mot.forward_arguments(inputs, mot.plan())
    with torch.no_grad():
        output, upper = mot(**read), mot(**read, first_layer=1)
    shape = (*inputs.target_ids.shape, geometry.hidden_dim)
    assert [part.shape for part in output.attention_inputs] == [shape] * len(restored)
    assert len(output.key_states) == len(output.value_states) == 3 - len(restored)
    for ours, theirs in zip(upper.attention_inputs[::-1], output.attention_inputs[::-1], strict=False):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    for ours, theirs in zip(upper.value_states[::-1], output.value_states[::-1], strict=False):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert mot.handoff(TEXTS, **pair).get_seq_length() == shape[1]
    ranks = [8, 4, 4, 4] if restored == [1] else [8, 4, 4]
    if form in ("reduced_rank", "trunk"):
        pieces = [[8, 4], [4], [4, 4]] if restored == [1] else [[rank] for rank in ranks]
        own = random_translator(pair, restored, piece_ranks=pieces, **MODULES[form])
        assert own.translator.up.widths == [*sum(Widths.of(own.config).target, ())]


def test_gradients_flow_through_what_the_target_restores(pair):
    mot = random_translator(pair, [1])
    inputs = inputs_of(mot, pair, TEXTS)
    output = mot(**mot.forward_arguments(inputs, mot.plan()))
    cache = mot.assemble(output, inputs, pair["target"])
    (cache.layers[1].keys.square().sum() + cache.layers[1].values.square().sum()).backward()
    start = mot.target_geometry.layers[0].width
    gradient = mot.translator.bias.grad
    assert gradient[start : start + mot.target_geometry.hidden_dim].abs().min() > 0
    assert not gradient[:start].any()


def test_it_is_saved_and_loaded(pair, tmp_path):
    mot = random_translator(pair, [0, 2])
    mot.save_pretrained(tmp_path)
    loaded = MoTModel.from_pretrained(tmp_path).eval()
    assert loaded.config.restored_layers == [0, 2]
    for ours, theirs in zip(loaded.handoff(TEXTS, **pair).layers, mot.handoff(TEXTS, **pair).layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=0, rtol=0)


def test_config_of_earlier_days_restores_nothing(pair):
    values = random_translator(pair, []).config.to_dict()
    del values["restored_layers"]
    assert MoTModel(MoTConfig(**values)).config.restored_layers == []


# What it costs


def test_flops_are_those_of_the_projections(pair):
    mot = random_translator(pair, [0, 1, 2])
    length = 200
    with torch.no_grad():
        inputs = inputs_of(mot, pair, TEXTS[1:])
    activations = {idx: torch.zeros(1, length, mot.target_geometry.hidden_dim) for idx in range(3)}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        restore(pair["target"], activations, torch.zeros(1, length, dtype=torch.long))
    own = sum(projection_flops(mot.target_geometry, length, layer_idx) for layer_idx in range(3))
    assert own == pytest.approx(counter.get_total_flops(), rel=0.03)  # the tokens that find the attention are more
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        mot.run(inputs, mot.plan())
    assert translator_flops(mot.config, inputs.target_ids.shape[1]) == counter.get_total_flops()


def test_plan_counts_what_it_restores(pair):
    mot = random_translator(pair, [0, 2])
    geometry, plain = mot.target_geometry, MoTConfig(**{**fields_of(mot.config), "restored_layers": []})
    each = {layer_idx: projection_flops(geometry, 50, layer_idx) for layer_idx in (0, 2)}
    for plan, restored in (("none", [0, 2]), ("bottom:1", [2]), ("full", [0, 2]), ("full:1-1", []), ("bottom:3", [])):
        plan = ReplayPlan.parse(plan)
        more = plan.target_flops(mot.config, 50) - plan.target_flops(plain, 50)
        assert more == sum(each[layer_idx] for layer_idx in restored)
    assert ReplayPlan(tokens=10).target_flops(mot.config, 60) == native_flops(geometry, 60) - native_flops(
        geometry, 50
    ) + sum(each.values())
    assert bottom_flops(geometry, 50, 1) == each[0]


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"restored_layers": [3]}, r"`restored_layers` must lie in 0\.\.2, got \[3\]"),
        ({"restored_layers": [2, 0]}, r"`restored_layers` must name each layer once and in order, got \[2, 0\]"),
        ({"restored_layers": [1, 1]}, r"`restored_layers` must name each layer once and in order, got \[1, 1\]"),
        (
            {"target_layers": [1, 2], "restored_layers": [0, 1], "replay": "full"},
            r"`restored_layers` must be among `target_layers` \[1, 2\].*got \[0\]",
        ),
        ({"key_norms": [0, 1]}, r"`key_norms` and `restored_layers` both name \[1\]"),
        ({"method": "identity"}, "`restored_layers` is for translators: method 'identity'"),
        ({"piece_ranks": [[8, 8]] * 3}, r"`piece_ranks` must be \[keys, values\] .* \[state\] for one of"),
    ],
)
def test_impossible_configurations_are_refused(pair, change, message):
    fields = {**fields_of(random_translator(pair).config), **change}
    with pytest.raises(ValueError, match=message):
        MoTModel(MoTConfig(**fields))


def test_target_without_one_hidden_state_a_token_is_refused(pair):
    tokenizer = make_tokenizer(merges=40)
    torch.manual_seed(0)
    model = ALL_FAMILIES["Gemma-3n"](len(tokenizer))
    odd = {"source": model, "target": model, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    with pytest.raises(ValueError, match=r"`restored_layers` is \[1\], but the layers of this target \(gemma3n_text"):
        random_translator(odd)
    contracts = [describe_model(pair[side], pair[f"{side}_tokenizer"]) for side in ("source", "target")]
    older = changed(contracts[1], ("geometry", "hidden_dim"), ...)
    with pytest.raises(ValueError, match="of an earlier release and does not tell"):
        MoTModel.from_contracts(contracts[0], older, restored_layers=[1])
    with pytest.raises(ValueError, match=r"makes no keys and values of one hidden state a token in its layers \[0\]"):
        restore(model, {0: torch.zeros(1, 2, 32)}, torch.zeros(1, 2, dtype=torch.long))
