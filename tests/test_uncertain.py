"""Plan `uncertain`: the target runs the tokens of a context again that are likeliest translated wrong."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import FAMILIES, make_documents, make_own, make_random_translator, make_tokenizer, make_translator
from families import FAMILIES as ALL_FAMILIES
from test_replay_parts import assert_equal_states, patches, tokens_run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from hf_mot import MoTConfig, MoTModel, ReplayPlan
from hf_mot.capture_mot import prefill
from hf_mot.compat_mot import cache_argument, decoder_layers
from hf_mot.evaluation.curve import default_plans, runnable_plans
from hf_mot.evaluation.settings import check_models
from hf_mot.modeling_mot import MoTOutput
from hf_mot.replay_cost_mot import bottom_flops, native_flops
from hf_mot.rows_mot import positions_from_mask
from hf_mot.training.comparison import Comparison
from hf_mot.uncertain_mot import check_runs_slots, choose_slots, run_slots

TOLERANCE = 1e-4
TOKENIZER = make_tokenizer(merges=40)
TEXTS = make_documents(1, 6, 1) + make_documents(1, 20, 2)  # the second goes beyond the window of gemma3
SHORTEST = len(TOKENIZER(TEXTS[0], add_special_tokens=False)["input_ids"])
# Families that take no mask for tokens in the midst of others.
REFUSED = {"GPT-Neo (global and local)", "MPT"}
UNTRANSLATED = list(ALL_FAMILIES).index("OpenAI GPT")  # this one and those after it are no targets at all


@pytest.mark.parametrize("family", list(ALL_FAMILIES)[:UNTRANSLATED])
def test_family_makes_of_wrong_tokens_what_it_makes_natively_or_is_refused(family):
    torch.manual_seed(0)
    model = ALL_FAMILIES[family](len(TOKENIZER))
    if family in REFUSED:
        with pytest.raises(ValueError, match=f"{type(model).__name__}, with the attention .* takes no mask for that"):
            check_runs_slots(model)
        return
    before, (ids, mask) = patches(model), (torch.randint(8, len(TOKENIZER), (2, 26)), torch.ones(2, 26).long())
    mask[0, :5] = 0
    positions, slots = positions_from_mask(mask), torch.tensor([[6, 7, 15, 24], [0, 9, 11, 25]])
    native, wrong = prefill(model, ids, mask), DynamicCache()
    spoiled = torch.zeros_like(mask, dtype=torch.bool).scatter(1, slots, True)[:, None, :, None]
    for layer_idx, layer in enumerate(native.layers):
        if layer.keys is None:  # it reads those of another
            break
        noise = (torch.randn_like(part) * part.std() for part in (layer.keys, layer.values))
        states = (torch.where(spoiled, own, part) for own, part in zip(noise, (layer.keys, layer.values), strict=True))
        wrong.update(*states, layer_idx)
    with torch.no_grad():
        run = run_slots(model, wrong, ids, mask, positions, slots)
    for ours, theirs, before_run in zip(run.layers, native.layers, wrong.layers, strict=False):
        for name in ("keys", "values"):
            mine, native_own, spoiled_own = (
                getattr(layer, name).transpose(1, 2)[mask.bool()] for layer in (ours, theirs, before_run)
            )
            largest = native_own.abs().max()
            torch.testing.assert_close(mine, native_own, atol=TOLERANCE * largest, rtol=1e-3)
            assert (spoiled_own - native_own).abs().max() > 0.1 * largest
    assert patches(model) == before


def test_attention_that_takes_no_masks_of_tensors_is_refused(monkeypatch):
    model = make_own("llama")["target"]
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match="LlamaForCausalLM, with the attention flash_attention_2, .*='sdpa', or pass"):
        check_runs_slots(model)


def test_model_is_asked_again_after_training_mode_whose_dropout_hid_it():
    model = make_own("gpt2")["target"].train()
    with pytest.raises(ValueError, match="the attention sdpa and in training mode, .* Put it in eval mode, or pass"):
        check_runs_slots(model)
    check_runs_slots(model.eval())


def test_attention_that_is_changed_later_is_refused_then(monkeypatch):
    model = make_own("llama")["target"]
    check_runs_slots(model)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flex_attention")
    with pytest.raises(ValueError, match="with the attention flex_attention, takes no mask for that"):
        check_runs_slots(model)


def test_eager_attention_runs_tokens_too():
    model = make_own("gemma3")["target"]
    model.set_attn_implementation("eager")
    check_runs_slots(model)


@pytest.fixture(params=FAMILIES, scope="module")
def own(request):
    """A model with a random translator to itself that predicts, what that reads of `TEXTS`, and makes of them."""
    pair = make_own(request.param)
    mot = predicting(make_translator(pair))
    return pair, mot, *read(pair, mot)


def predicting(mot):
    """The same translator, which now predicts its error, by random weights."""
    other = MoTModel(MoTConfig(**mot.config.to_dict() | {"predicts_error": True})).eval()
    other.load_state_dict(mot.state_dict(), strict=False)
    torch.nn.init.normal_(other.translator.error.weight, generator=torch.Generator().manual_seed(3))
    return other


@torch.no_grad()
def read(pair, mot, texts=TEXTS):
    cache, ids, mask = mot.read_source(texts, pair["source"], pair["source_tokenizer"])
    models = {name: pair[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
    inputs = mot.prepare(cache, ids, source_attention_mask=mask, text=texts, **models)
    return inputs, mot(inputs.source_states, inputs.embeddings, inputs.target_mask)


def wrong_at(mask, slots):
    """A prediction that names these slots, `[rows, tokens]`."""
    return torch.zeros(mask.shape).scatter(1, slots, 1.0)


def assembled(own, plan, output=None):
    pair, mot, inputs, translated = own
    with torch.no_grad():
        return mot.assemble(output or translated, inputs, pair["target"], ReplayPlan.parse(plan))


def prompt_logits(pair, cache):
    prompt = pair["target_tokenizer"](" the captain wrote", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return pair["target"](prompt, **{cache_argument(pair["target"]): cache.fork()}).logits


@pytest.mark.parametrize("plan", ["uncertain:3", "bottom:2+uncertain:4", "bottom:1+tokens:2+uncertain:3"])
@pytest.mark.parametrize("text", TEXTS, ids=["short", "beyond the window"])
def test_replay_of_the_targets_own_states_is_native(own, plan, text):
    pair = own[0]
    mot = MoTModel.identity(pair["target"], pair["target_tokenizer"])
    ours = prompt_logits(pair, mot.handoff(text, replay=plan, **pair))
    native = prompt_logits(pair, mot.handoff(text, **pair))
    other = prompt_logits(pair, mot.handoff(make_documents(1, 20, seed=9)[0], replay=plan, **pair))
    torch.testing.assert_close(ours, native, atol=TOLERANCE, rtol=0)
    assert (other - native).abs().max() > 0.1
    assert str(mot.plan(plan)) == plan


def test_tokens_whose_translation_is_wrong_become_native(own):
    pair, _, inputs, _ = own
    mot, mask = MoTModel.identity(pair["target"], pair["target_tokenizer"]), inputs.target_mask
    inputs, right = read(pair, mot)
    length = mask.shape[1]
    slots = torch.tensor([[length - 9, length - 8, length - 4, length - 2], [3, 4, length - 20, length - 1]])
    spoiled = wrong_at(mask, slots)
    states = {
        name: tuple(part + 3 * spoiled[:, None, :, None] for part in right[name])
        for name in ("key_states", "value_states")
    }
    wrong = MoTOutput(**states, log_error=spoiled)
    native = prefill(pair["target"], inputs.target_ids, mask)
    ours, spoilt, less = (
        assembled((pair, mot, inputs, wrong), f"{plan}") for plan in ("uncertain:4", "none", "uncertain:3")
    )
    for one, other, theirs in zip(ours.layers, spoilt.layers, native.layers, strict=True):
        assert_equal_states(one, theirs, mask, atol=TOLERANCE, rtol=1e-3)
        assert (other.keys - theirs.keys).transpose(1, 2)[mask.bool()].abs().max() > 1
    assert (less.layers[-1].keys - native.layers[-1].keys).transpose(1, 2)[mask.bool()].abs().max() > 0.1


@pytest.mark.parametrize("bottom", ["", "bottom:2+"])
def test_all_tokens_are_native_whatever_the_translation_is(own, bottom):
    pair, mot, *_ = own
    cache = mot.handoff(TEXTS[0], replay=f"{bottom}uncertain:{SHORTEST}", **pair)
    ids = pair["target_tokenizer"](TEXTS[0], return_tensors="pt")["input_ids"]
    for ours, theirs in zip(cache.layers, prefill(pair["target"], ids).layers, strict=True):
        assert_equal_states(ours, theirs, cache.prefix_mask, atol=TOLERANCE, rtol=1e-3)


@pytest.mark.parametrize("bottom", ["", "bottom:1+"])
def test_last_tokens_are_those_of_plan_tokens(own, bottom):
    output, mask = own[3], own[2].target_mask
    last = torch.arange(mask.shape[1] - 4, mask.shape[1]).expand(len(mask), -1)
    planted = replace(output, log_error=wrong_at(mask, last))
    plain = assembled(own, f"{bottom}tokens:4")
    for plan in ("uncertain:4", "tokens:1+uncertain:3", "tokens:3+uncertain:1"):
        for ours, theirs in zip(assembled(own, bottom + plan, planted).layers, plain.layers, strict=True):
            assert_equal_states(ours, theirs, mask, atol=TOLERANCE, rtol=1e-3)
    other = assembled(own, f"{bottom}uncertain:4", replace(output, log_error=-planted.log_error))
    assert (other.layers[-1].keys - plain.layers[-1].keys)[:, :, -4:].abs().max() > 0.01


def test_rows_are_as_alone_and_the_others_stay_translated(own):
    pair, mot, inputs, output = own
    plan, mask = "tokens:1+uncertain:3", inputs.target_mask
    with tokens_run(pair["target"]) as (given, done):
        batch = assembled(own, plan)
    prefix = len(mot.config.target["prefix_ids"])
    assert given == done == [prefix + 4] * len(given)
    plain, length = assembled(own, "none"), mask.shape[1] - 1
    chosen = choose_slots(
        output.log_error[:, :length], mask[:, :length], positions_from_mask(mask)[:, :length], prefix, 3
    )
    run = torch.zeros_like(mask).scatter(1, chosen, 1)
    run[:, -1] = 1
    for row, text in enumerate(TEXTS):
        kept = mask[row].bool()
        alone = mot.handoff(text, replay=plan, **pair)
        for ours, theirs, before in zip(batch.layers, alone.layers, plain.layers, strict=True):
            torch.testing.assert_close(ours.keys[row][:, kept], theirs.keys[0], atol=TOLERANCE, rtol=1e-3)
            torch.testing.assert_close(ours.values[row][:, kept], theirs.values[0], atol=TOLERANCE, rtol=1e-3)
            moved = (ours.keys[row] - before.keys[row]).abs().amax((0, 2)) > 0.01
            assert torch.equal(moved.long(), run[row])


def test_likeliest_are_chosen_ties_by_position_and_never_pads_or_the_prefix():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    log_error = torch.tensor([[9.0, 9, 9, 1, 2, 2, 2], [9, 0, 0, 0, 5, 0, 7]])
    choose = lambda count: choose_slots(log_error, mask, positions_from_mask(mask), 1, count).tolist()  # noqa: E731
    assert choose(1) == [[4], [6]]
    assert choose(2) == [[4, 5], [4, 6]]
    assert choose(4) == [[3, 4, 5, 6], [1, 2, 4, 6]]


def test_gradient_reaches_what_is_not_run_again(own):
    pair, mot, inputs, output = own
    plan, leaves = ReplayPlan.parse("uncertain:3"), [part.clone().requires_grad_() for part in output.key_states]
    cache = mot.assemble(replace(output, key_states=tuple(leaves)), inputs, pair["target"], plan)
    sum(layer.keys.sum() for layer in cache.layers).backward()
    mask, prefix = inputs.target_mask, len(mot.config.target["prefix_ids"])
    chosen = choose_slots(output.log_error, mask, positions_from_mask(mask), prefix, 3)
    for leaf in leaves:
        reached = leaf.grad.abs().sum((1, 3)) > 0
        assert not reached.gather(1, chosen).any()
        assert reached[mask.bool()].sum() == mask.sum() - len(mask) * (prefix + 3)


def test_cost_is_that_of_as_many_last_tokens_and_measured(own):
    pair, mot, inputs, output = own
    geometry, length = mot.target_geometry, 40
    native = native_flops(geometry, length)

    def run(plan, length=length):
        return ReplayPlan.parse(plan).target_flops(mot.config, length)

    assert run("uncertain:8") == run("tokens:8") == run("tokens:3+uncertain:5")
    assert run("bottom:2+uncertain:8") == run("tokens:8") + bottom_flops(geometry, length, 2)
    assert run("bottom:2+tokens:3+uncertain:5") == run("tokens:8") + bottom_flops(geometry, length - 3, 2)
    assert run(f"uncertain:{length}") == run("uncertain:50") == native
    plan, length, measured = ReplayPlan.parse("uncertain:8"), inputs.target_mask.shape[1], []
    check_runs_slots(pair["target"])
    for each in (plan, ReplayPlan.parse("tokens:8"), ReplayPlan()):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            mot.assemble(output, inputs, pair["target"], each)
        measured.append(counter.get_total_flops())
    assert measured[0] == measured[1]
    # What the mask throws away is computed.
    masked = 4 * geometry.attention_dim * len(geometry.layers) * 8 * 7 // 2
    expected = len(TEXTS) * (plan.target_flops(mot.config, length) + masked)
    assert measured[0] - measured[2] == pytest.approx(expected, rel=0.03)
    with FlopCounterMode(display=False) as counter:
        mot.run(inputs, plan)
    whole = plan.flops(mot.config, length) - plan.target_flops(mot.config, length)
    assert counter.get_total_flops() == len(TEXTS) * whole


def test_plan_has_one_name():
    for name in ("uncertain:32", "bottom:6+uncertain:32", "tokens:3+uncertain:32", "bottom:6+tokens:3+uncertain:32"):
        assert str(ReplayPlan.parse(name)) == name and ReplayPlan.parse(name).runs_target
    assert str(ReplayPlan.parse("uncertain:4+tokens:2+bottom:1")) == "bottom:1+tokens:2+uncertain:4"
    for name in ("uncertain", "uncertain:0", "uncertain:-1", "uncertain:x", "uncertain:1+uncertain:2"):
        with pytest.raises(ValueError, match="`replay` must be one of none, .* uncertain:32 .*from 1"):
            ReplayPlan.parse(name)
    for name in ("full+uncertain:3", "sparse:8+uncertain:3"):
        with pytest.raises(ValueError, match="full and sparse run all layers over all tokens, so .* Leave out either"):
            ReplayPlan.parse(name)
    with pytest.raises(ValueError, match="`uncertain` of a plan must be 0 or more, got 0, 0, -1"):
        ReplayPlan(uncertain=-1)


TRANSLATORS = {
    "all layers": {},
    "resumed": {"resume_layer": 2},
    "upper layers": {"target_layers": [1, 2], "replay": "bottom:1"},
    "middle layer": {"target_layers": [1], "replay": "full"},
    "hidden state": {"target_hidden_layer": 0},
    "hidden state, not causal": {
        **{"target_hidden_layer": 0, "method": "mot", "causal": False},
        **{"rank": None, "hidden_size": 8, "num_attention_heads": 2},
    },
    "hidden state, no source": {"target_hidden_layer": 0, "source_layers": []},
}


@pytest.mark.parametrize("form", TRANSLATORS)
@pytest.mark.parametrize("plan", ["uncertain:3", "bottom:1+uncertain:3", "resume:1+tokens:2+uncertain:3", "sparse:8"])
def test_plan_that_a_refusal_names_is_one_that_this_translator_takes(form, plan):
    mot = make_random_translator(make_own("llama"), **TRANSLATORS[form])
    try:
        mot.plan(plan)
    except ValueError as error:
        named = re.findall(r"'((?:full|bottom|tokens|resume)[^']*)'", str(error))
        assert named or "resume" in plan  # which only another translator takes
        for instead in named:
            mot.plan(instead)
    else:
        assert "uncertain" not in plan


def test_plans_that_cannot_be_are_refused_before_anything_runs(own):
    pair, mot, inputs, output = own
    message = (
        rf"tokens:1.uncertain:{SHORTEST} runs {SHORTEST + 1} tokens .* row 0 .* has {SHORTEST} .*:{SHORTEST - 1} or"
    )
    check_runs_slots(pair["target"])  # asked once, by a run of its own
    with tokens_run(pair["target"]) as (given, _):
        cache, ids, mask = mot.read_source(TEXTS, pair["source"], pair["source_tokenizer"])
        read_by_source = list(given)
        arguments = {name: pair[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
        with pytest.raises(ValueError, match=message):
            plan = f"tokens:1+uncertain:{SHORTEST}"
            mot.translate(cache, ids, source_attention_mask=mask, replay=plan, text=TEXTS, **arguments)
        with pytest.raises(ValueError, match="with all 3 layers native no token is uncertain"):
            mot.handoff(TEXTS, replay="bottom:3+uncertain:2", **pair)
        silent = make_translator(pair)
        with pytest.raises(ValueError, match=r"does not tell which \(`predicts_error`\).*replay='bottom:1.tokens:5'"):
            silent.handoff(TEXTS, replay="bottom:1+tokens:2+uncertain:3", **pair)
    assert given == read_by_source
    with pytest.raises(ValueError, match="does not tell which"):
        MoTModel(MoTConfig(**silent.config.to_dict() | {"replay": "uncertain:3"}))
    with pytest.raises(ValueError, match="`log_error` is required by the plan uncertain:3"):
        assembled(own, "uncertain:3", replace(output, log_error=None))
    with pytest.raises(ValueError, match="no loss would reach these. Train with replay='bottom:1', which serves both"):
        Comparison(None, pair["target"], plan=ReplayPlan.parse("bottom:1+uncertain:3"), losses=["cc"])


@pytest.mark.parametrize(
    ("family", "fields", "plan", "message"),
    [
        ("MPT", {"predicts_error": True}, "uncertain:2", "MptForCausalLM, .* takes no mask for that"),
        ("MPT", {}, "sparse:2/0", "The attention of MptForCausalLM can be made sparse neither"),
        ("Gemma-4 (shared KV layers)", {"resume_layer": 1}, "resume:0", "caches 2 of its 4 layers"),
    ],
)
def test_target_that_cannot_is_refused_before_source_or_translator_run(family, fields, plan, message):
    torch.manual_seed(0)
    model, source = ALL_FAMILIES[family](len(TOKENIZER)), make_own("llama")["target"]
    pair = {"source": source, "target": model, "source_tokenizer": TOKENIZER, "target_tokenizer": TOKENIZER}
    mot = make_random_translator(pair, **fields)
    read = mot.read_source(TEXTS[:1], source, TOKENIZER, plan=ReplayPlan.parse(plan))
    ready = {name: part for name, part in pair.items() if name != "source"}
    with tokens_run(source) as (given, _), mock.patch.object(mot, "forward") as forward:
        with pytest.raises(ValueError, match=message):
            mot.handoff(TEXTS[0], replay=plan, **pair)
        with pytest.raises(ValueError, match=message):
            mot.translate(*read[:2], text=TEXTS[:1], replay=plan, **ready)
    assert not any(given) and not forward.called


def test_checkpointing_that_takes_the_cache_away_is_noticed():
    pair = make_own("llama")
    mot = predicting(make_translator(pair))
    inputs, output = read(pair, mot)
    check_runs_slots(pair["target"])
    pair["target"].activation_checkpointing_enable()
    pair["target"].train()
    with pytest.raises(RuntimeError, match=r"ran past the cache, or .* its layers \[0, 1, 2\]|must match the size"):
        mot.assemble(output, inputs, pair["target"], ReplayPlan.parse("uncertain:2"))


def test_target_is_left_as_it_was(own):
    target = own[0]["target"]
    before = patches(target)
    expected = assembled(own, "uncertain:3")
    assert patches(target) == before

    def fail(*args):
        raise KeyError("within")

    hook = decoder_layers(target)[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="within"):
        assembled(own, "uncertain:3")
    hook.remove()
    assert patches(target) == before
    assert torch.equal(assembled(own, "uncertain:3").layers[-1].keys, expected.layers[-1].keys)


def test_curve_measures_it_where_the_error_is_predicted(own):
    pair, mot, *_ = own
    assert {"uncertain:3", "uncertain:6"} <= set(default_plans(mot, 24))
    assert not any("uncertain" in plan for plan in default_plans(make_translator(pair), 24))


def test_curve_without_named_plans_leaves_out_what_the_target_cannot_run():
    model, plans = ALL_FAMILIES["MPT"](len(TOKENIZER)), ["none", "bottom:1+uncertain:3", "tokens:3"]
    assert runnable_plans(plans, model) == ["none", "tokens:3"]
    assert runnable_plans(plans, make_own("llama")["target"]) == plans


def test_twin_that_cannot_do_the_plan_is_refused_before_anything_is_measured():
    pair = make_own("llama")
    plain = make_translator(pair)
    both = {"translator": predicting(plain), "no_source": plain, "source": pair["source"], "target": pair["target"]}
    check_models(["no_source"], **both, baselines={}, plans=["none"])
    check_models(["translated"], **both, baselines={}, plans=["uncertain:3"])
    with pytest.raises(ValueError, match="this translator does not tell which"):
        check_models(["no_source"], **both, baselines={}, plans=["none", "uncertain:3"])


def test_row_whose_last_tokens_are_all_run_already_has_none_that_are_uncertain():
    with pytest.raises(ValueError, match=r"tokens:5\+uncertain:1 runs 6 tokens .* has 5 .*Leave out uncertain\."):
        ReplayPlan.parse("tokens:5+uncertain:1").translated_tokens(torch.ones(1, 6, dtype=torch.long), 1)


FORMS = {
    "reduced rank": {},
    "pieces": {"piece_ranks": [[8, 2], [3, 8], [5, 2]]},
    "mixture": {"method": "mot", "linear_path": True, "num_translators": 2, "hidden_size": 8},
    "trunk": {"method": "mot", "trunk": True, "hidden_size": 8},
    "mlp": {"method": "mlp", "linear_path": True, "hidden_size": 8},
}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_linear_path_predicts_and_translates_as_before(form):
    pair = make_own("llama")
    plain = MoTModel(MoTConfig(**make_translator(pair).config.to_dict() | FORMS[form])).eval()
    for weight in plain.parameters():
        weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(weight.numel()))
    mot = MoTModel(MoTConfig(**plain.config.to_dict() | {"predicts_error": True})).eval()
    mot.load_state_dict(plain.state_dict(), strict=False)
    path = next(module for module in mot.modules() if getattr(module, "error", None) is not None)
    path.error.weight.normal_(generator=torch.Generator().manual_seed(3))
    inputs, output = read(pair, mot)
    _, before = read(pair, plain)
    assert before.log_error is None and output.log_error.shape == inputs.target_mask.shape
    assert output.log_error.std() > 0.1
    for ours, theirs in zip(
        output.key_states + output.value_states, before.key_states + before.value_states, strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    upper = mot(inputs.source_states, inputs.embeddings, inputs.target_mask, first_layer=2)
    torch.testing.assert_close(upper.log_error, output.log_error)
    plan, length = ReplayPlan.parse("uncertain:2"), inputs.target_mask.shape[1]
    assert plan.flops(mot.config, length) - ReplayPlan.parse("uncertain:2").target_flops(mot.config, length) == (
        ReplayPlan().flops(plain.config, length) + 2 * 2 * 8 * length
    )


def test_prediction_needs_a_linear_map_of_low_rank():
    pair = make_own("llama")
    config = make_translator(pair).config.to_dict() | {"predicts_error": True}
    for changes in ({"rank": None}, {"method": "mlp"}, {"method": "mot"}):
        with pytest.raises(ValueError, match="`predicts_error` needs a linear map of low rank"):
            MoTConfig(**config | changes)
