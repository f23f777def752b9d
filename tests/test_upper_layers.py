"""Plan `resume`: lower layers are translated, and what goes into the one above them, from which the target runs."""

import threading
from dataclasses import replace

import pytest
import torch
from conftest import (
    FAMILIES,
    make_documents,
    make_own,
    make_pair,
    make_random_translator,
    make_tokenizer,
    make_translator,
)
from families import FAMILIES as ALL_FAMILIES
from test_identity import logits_after, prompt_ids
from test_replay_parts import assert_equal_states, patches, tokens_run
from test_target_hidden import MODULES, fields_of, inputs_of
from torch.utils.flop_counter import FlopCounterMode

from hf_mot import MoTConfig, MoTModel, ReplayPlan
from hf_mot.capture_mot import prefill, source_states, split_layers
from hf_mot.geometry_mot import probe
from hf_mot.replay_cost_mot import native_flops, projection_flops, resume_flops
from hf_mot.restore_mot import attention_inputs
from hf_mot.resume_mot import check_resumable, resume
from hf_mot.rows_mot import positions_from_mask
from hf_mot.translators_output_mot import MoTOutput
from hf_mot.translators_widths_mot import Widths

TOLERANCE = 1e-4
TEXTS = make_documents(1, 4, 1) + make_documents(1, 12, 2)  # the second goes beyond the windows
# One of each way in which layers are called and return, masks are made and positions are told.
SOME = (
    *("GPT-2", "GPT-Neo (global and local)", "OPT (350m: projections, post-norm)", "CTRL", "Bloom", "MPT", "GPT-J"),
    *("Falcon (alibi)", "Llama", "Qwen2 (sliding)", "Gemma-2", "Gemma-3", "Gemma-4", "Cohere2", "DeepSeek-V3"),
    *("ModernBERT (decoder)", "DBRX", "JetMoE", "GPT-OSS", "Llama-4 (text, chunked)"),
)


def random_translator(pair, layer=2, **fields):
    """A translator with random weights whose target resumes at a layer."""
    return make_random_translator(pair, resume_layer=layer, **fields)


@pytest.fixture(params=FAMILIES, scope="module")
def own(request):
    return make_own(request.param)


@pytest.fixture(scope="module")
def pair():
    return make_pair()


def oracle(own, plan):
    """The target's own states below, and its own hidden state: what a perfect translator gives, its inputs, and what
    the target makes of it by a plan; the same of another hidden state."""
    mot = MoTModel.identity(own["target"], own["target_tokenizer"])
    plan = mot.plan(plan)
    with torch.no_grad():
        inputs = mot.read_target(inputs_of(mot, own, TEXTS), own["target"], plan)
        output = mot.run(inputs, plan)
        other = replace(output, hidden_states=-output.hidden_states)
        return inputs, *(mot.assemble(each, inputs, own["target"], plan) for each in (output, other))


# What runs


@pytest.mark.parametrize("family", SOME)
def test_native_states_give_the_native_cache(family):
    """Of padded rows, beyond the windows."""
    tokenizer = make_tokenizer(merges=40)
    torch.manual_seed(0)
    model = ALL_FAMILIES[family](len(tokenizer))
    own = {"source": model, "target": model, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    before = patches(model)
    inputs, ours, other = oracle(own, "resume:0")
    native = prefill(model, inputs.target_ids, inputs.target_mask)
    for layer_idx, layer in enumerate(ours.layers):
        for name in ("keys", "values"):
            states, right, wrong = (
                getattr(each, name).transpose(1, 2)[inputs.target_mask.bool()]
                for each in (layer, native.layers[layer_idx], other.layers[layer_idx])
            )
            assert (states - right).abs().max() <= TOLERANCE * right.abs().max()
            if layer_idx > 0 and name == "values":
                assert (wrong - right).abs().max() > 0.01 * right.abs().max()
    assert [part for part in patches(model) if "_mot" not in part[0]] == before


@pytest.mark.parametrize("plan", ["resume:0", "resume:1", "resume:0+tokens:3", "resume:1+tokens:3"])
def test_native_states_give_native_logits(own, plan):
    model, prompt = own["target"], prompt_ids(own)
    inputs, ours, other = oracle(own, plan)
    native, ids = prefill(model, inputs.target_ids, inputs.target_mask), inputs.target_ids[1:]  # the row without pads
    for layer_idx, layer in enumerate(ours.layers):
        assert_equal_states(layer, native.layers[layer_idx], inputs.target_mask, atol=TOLERANCE, rtol=1e-4)
        assert not layer.keys.transpose(1, 2)[inputs.target_mask == 0].any()
    whole = logits_after(model, torch.cat([ids, prompt], 1))[:, ids.shape[1] :]
    without = logits_after(model, torch.cat([ids[:, :1], prompt], 1))[:, 1:]
    row = torch.tensor([1])
    torch.testing.assert_close(logits_after(model, prompt, ours.rows(row).fork()), whole, atol=TOLERANCE, rtol=1e-4)
    assert (logits_after(model, prompt, other.rows(row).fork()) - whole).abs().max() > 0.1
    assert (without - whole).abs().max() > 0.5


@pytest.mark.parametrize("plan", ["resume:1", "resume:1+tokens:3", "full"])
def test_restored_layers_go_with_it(own, plan):
    """Of native states: layer 0 as keys and values, layer 1 restored, layer 2 run; `full` leaves the state unread."""
    mot, target = random_translator(own, restored_layers=[1]), own["target"]
    inputs, geometry = inputs_of(mot, own, TEXTS), mot.target_geometry
    with torch.no_grad(), attention_inputs(target, [1]) as shown:
        native = prefill(target, inputs.target_ids, inputs.target_mask, hidden_layer=2)
        states = source_states(native, geometry, [0], positions_from_mask(inputs.target_mask))
        output = MoTOutput(*split_layers(states, geometry, [0]), (shown[1][0],), native.hidden_states)
        ours = mot.assemble(output, inputs, target, mot.plan(plan))
    for layer, right in zip(ours.layers, native.layers, strict=True):
        assert_equal_states(layer, right, inputs.target_mask, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("plan", ["resume:0", "resume:0+tokens:3"])
def test_padded_rows_are_as_alone(own, plan):
    mot = random_translator(own, layer=1)
    cache = mot.handoff(TEXTS, replay=plan, **own)
    for row, text in enumerate(TEXTS):
        alone, kept = mot.handoff(text, replay=plan, **own), cache.prefix_mask[row].bool()
        for ours, theirs in zip(cache.layers, alone.layers, strict=True):
            torch.testing.assert_close(ours.keys[row][:, kept], theirs.keys[0], atol=TOLERANCE, rtol=1e-4)


def test_model_is_left_as_it_was_when_it_crashes(own):
    before, ids = patches(own["target"]), torch.tensor([[10**6]])
    with pytest.raises(IndexError):
        resume(own["target"], 1, torch.zeros(1, 1, 32), ids)
    assert patches(own["target"]) == before


def test_other_threads_and_calls_run_the_whole_model(own):
    """A hook that is called between two layers runs the model in another thread."""
    model, ids, found = own["target"], torch.randint(40, (1, 5)), []
    native = prefill(model, ids).layers[2].keys

    def elsewhere(*_):
        thread = threading.Thread(target=lambda: found.append(prefill(model, ids).layers[2].keys))
        hook.remove()
        thread.start()
        thread.join()

    hook = model.get_decoder().register_forward_pre_hook(elsewhere)
    with torch.no_grad():
        resume(model, 1, torch.zeros(1, 5, 32), ids)
    torch.testing.assert_close(found[0], native, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", MODULES)
@pytest.mark.parametrize("restored", [[], [0, 1]], ids=["keys and values", "restored"])
def test_every_module_gives_the_hidden_state(pair, form, restored):
    mot = random_translator(pair, restored_layers=restored, **MODULES[form])
    inputs = inputs_of(mot, pair, TEXTS)
    with torch.no_grad():
        output = mot(**mot.forward_arguments(inputs, mot.plan()))
    assert output.hidden_states.shape == (*inputs.target_ids.shape, mot.target_geometry.hidden_dim)
    assert len(output.key_states) == 2 - len(restored)
    assert mot.handoff(TEXTS, **pair).get_seq_length() == inputs.target_ids.shape[1]
    if form == "reduced_rank":
        pieces = [[8]] * 3 if restored else [[8, 4], [4, 4], [2]]
        fewer = random_translator(pair, restored_layers=restored, piece_ranks=pieces, **MODULES[form])
        assert fewer.translator.up.widths == [*sum(Widths.of(fewer.config).target, ())]


def test_gradients_flow_through_the_layers_that_run(pair):
    mot = random_translator(pair, layer=1)
    inputs = inputs_of(mot, pair, TEXTS)
    output = mot(**mot.forward_arguments(inputs, mot.plan()))
    mot.assemble(output, inputs, pair["target"], mot.plan()).layers[2].values.square().sum().backward()
    width = mot.target_geometry.layers[0].width
    gradient = mot.translator.bias.grad
    assert gradient[width:].abs().min() > 0 and not gradient[:width].any()


# How it is kept, and what it costs


def test_it_is_saved_and_loaded_and_takes_its_plan(pair, tmp_path):
    mot = random_translator(pair, key_norms=[0])
    mot.save_pretrained(tmp_path)
    loaded = MoTModel.from_pretrained(tmp_path).eval()
    config = loaded.config
    assert (config.resume_layer, config.target_layers, str(loaded.plan())) == (2, [0, 1], "resume:1")
    assert str(loaded.plan("resume:1+tokens:4")) == "resume:1+tokens:4"
    for ours, theirs in zip(loaded.handoff(TEXTS, **pair).layers, mot.handoff(TEXTS, **pair).layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=0, rtol=0)
    values = make_translator(pair).config.to_dict()
    del values["resume_layer"]  # of earlier days
    assert MoTModel(MoTConfig(**values)).config.resume_layer is None


def test_flops_are_those_of_the_layers_that_run(pair):
    mot, length = random_translator(pair, layer=1), 20
    geometry = mot.target_geometry
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        resume(pair["target"], 1, torch.zeros(1, length, geometry.hidden_dim), torch.zeros(1, length).long())
    # The counter takes attention for that of all pairs.
    assert resume_flops(geometry, length, 1) == pytest.approx(counter.get_total_flops(), rel=0.15)
    own = native_flops(geometry, length) // 3 + projection_flops(geometry, length, 2)
    assert resume_flops(geometry, length, 1) == pytest.approx(own, abs=3)
    plan = mot.plan()
    assert plan.target_flops(mot.config, length) == resume_flops(geometry, length, 1)
    last = ReplayPlan.parse("resume:0+tokens:5")
    expected = native_flops(geometry, length) - native_flops(geometry, 15) + resume_flops(geometry, 15, 1)
    assert last.target_flops(mot.config, length) == expected


# What is refused


@pytest.mark.parametrize("plan", ["none", "tokens:3", "bottom:1", "bottom:3"])
def test_plan_that_leaves_the_upper_layers_to_nobody_is_refused_before_anything_runs(pair, plan):
    mot = random_translator(pair)
    message = r"gives the input of layer 2 of the target .*Pass replay='resume:1'"
    with tokens_run(pair["target"]) as (given, _), pytest.raises(ValueError, match=message):
        mot.handoff(TEXTS[0], replay=plan, **pair)
    assert given == [0, 0, 0]


def test_translator_without_that_state_is_refused(pair):
    with pytest.raises(
        ValueError, match="gives that of layer 2. Pass replay='resume:1', or fit one with `resume_layer` 1"
    ):
        random_translator(pair).plan("resume:0")
    with pytest.raises(ValueError, match="gives no input of a layer. Fit one with `resume_layer` 2"):
        make_translator(pair).plan("resume:1")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("resume:-1", r"`replay` must be one of none.*resume:5 .*got 'resume:-1'"),
        ("resume", "`replay` must be one of none"),
        ("bottom:1+resume:1", "full, sparse and bottom do not go with it, got resume:1\\+bottom:1"),
        ("full+resume:1", "full, sparse and bottom do not go with it"),
        ("resume:1+sparse:4", "full, sparse and bottom do not go with it"),
        ("none+resume:1", "`replay` none runs nothing natively"),
        ("resume:2", r"runs the layers above 2 of the target, but it has 3, from 0. Choose from resume:0 to resume:1"),
    ],
)
def test_impossible_plans_are_refused(own, plan, message):
    mot = MoTModel.identity(own["target"], own["target_tokenizer"])
    with pytest.raises(ValueError, match=message):
        mot.plan(plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resume_layer": 0}, "`resume_layer` must be a layer of the target, from 1, or None, got 0"),
        ({"resume_layer": 3, "target_layers": [0, 1, 2]}, r"`resume_layer` must lie in 1\.\.2, so that one of"),
        ({"target_layers": None}, "`target_layers` must be all layers below `resume_layer` 2, 0 to 1, got None"),
        ({"target_layers": [1]}, "`target_layers` must be all layers below `resume_layer` 2, 0 to 1"),
        (
            {"target_hidden_layer": 0, "target_layers": [1]},
            "`resume_layer` and `target_hidden_layer` exclude each other",
        ),
        ({"method": "identity"}, "`resume_layer` is for translators"),
        ({"restored_layers": [2]}, r"`restored_layers` must be among `target_layers` \[0, 1\]"),
        ({"piece_ranks": [[8, 8]] * 2}, r"are translated, and \[state\] for a `resume_layer`, got 2"),
        ({"piece_ranks": [[8, 8]] * 3}, r"\[state\] for one of `restored_layers` and for a `resume_layer`"),
        ({"replay": "none"}, "gives the input of layer 2 of the target"),
    ],
)
def test_impossible_configurations_are_refused(pair, change, message):
    fields = {**fields_of(random_translator(pair).config), **change}
    with pytest.raises(ValueError, match=message):
        MoTModel(MoTConfig(**fields))


@pytest.mark.parametrize("window", [{"channel_ratio": 0.4}, {"start": 1, "channel_ratio": 0.4}])
def test_window_beside_it_is_refused(pair, window):
    with pytest.raises(ValueError, match="choose a window, but below a `resume_layer`, here 2, all layers are"):
        random_translator(pair, **window)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("Gemma-3n", r"`resume_layer` is 1, but the layers of this target \(gemma3n_text\)"),
        ("Gemma-4 (shared KV layers)", "caches 2 of its 4 layers: the others read keys and values of layers below"),
    ],
)
def test_targets_whose_upper_layers_do_not_run_alone_are_refused(family, message):
    tokenizer = make_tokenizer(merges=40)
    torch.manual_seed(0)
    model = ALL_FAMILIES[family](len(tokenizer))
    own = {"source": model, "target": model, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    with pytest.raises(ValueError, match=message):
        random_translator(own, layer=1).handoff(TEXTS[0], **own)


def test_target_with_several_hidden_states_a_token_is_refused():
    model = ALL_FAMILIES["Gemma-3n"](90)
    with pytest.raises(ValueError, match="Gemma3nForCausalLM caches 2 of its 4 layers"):
        check_resumable(model, probe(model))
    geometry = replace(probe(model), layers=probe(model).layers * 2)
    with pytest.raises(ValueError, match="of Gemma3nForCausalLM do not each get one hidden state a token"):
        check_resumable(model, geometry)


def test_missing_state_is_named(pair):
    mot = random_translator(pair)
    inputs = inputs_of(mot, pair, TEXTS[:1])
    with torch.no_grad():
        output = mot.run(inputs, mot.plan())
        with pytest.raises(ValueError, match="`hidden_states` is required by the plan resume:1: .*layer 2"):
            mot.assemble(replace(output, hidden_states=None), inputs, pair["target"], mot.plan())
