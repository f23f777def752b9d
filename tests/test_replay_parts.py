"""Plans `bottom` and `tokens`: the target's own are its first layers, or the last tokens; the rest is translated."""

from contextlib import contextmanager

import pytest
import torch
from conftest import FAMILIES, make_documents, make_model, make_own, make_tokenizer, make_translator
from families import FAMILIES as ALL_FAMILIES
from families import build
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from hf_mot import MoTConfig, MoTModel, ReplayPlan
from hf_mot.analysis.pieces import translated_pieces
from hf_mot.capture_mot import prefill
from hf_mot.compat_mot import cache_argument, decoder_layers, run_decoder
from hf_mot.geometry_mot import probe
from hf_mot.replay_cost_mot import bottom_flops, native_flops

TEXTS = make_documents(1, 4, 1) + make_documents(1, 12, 2)  # the second goes beyond the window of gemma3


@pytest.fixture(params=FAMILIES, scope="module")
def own(request):
    """A model with a random translator to itself, what that reads of `TEXTS`, and what it makes of them."""
    pair = make_own(request.param)
    mot = make_translator(pair)
    cache, ids, mask = mot.read_source(TEXTS, pair["source"], pair["source_tokenizer"])
    models = {name: pair[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
    inputs = mot.prepare(cache, ids, source_attention_mask=mask, text=TEXTS, **models)
    with torch.no_grad():
        output = mot(inputs.source_states, inputs.embeddings, inputs.target_mask)
    return pair, mot, inputs, output


def assembled(own, plan):
    pair, mot, inputs, output = own
    with torch.no_grad():
        return mot.assemble(output, inputs, pair["target"], ReplayPlan.parse(plan))


@contextmanager
def tokens_run(model):
    """While open, counts how many tokens each decoder layer is given, and how many it is run over to its end."""
    given, done = ([0] * len(decoder_layers(model)) for _ in range(2))

    def counting(counts, layer_idx):
        def hook(module, args, kwargs, *_):
            counts[layer_idx] += (args[0] if args else kwargs["hidden_states"]).shape[1]

        return hook

    hooks = []
    for idx, layer in enumerate(decoder_layers(model)):
        hooks.append(layer.register_forward_pre_hook(counting(given, idx), with_kwargs=True))
        hooks.append(layer.register_forward_hook(counting(done, idx), with_kwargs=True))
    try:
        yield given, done
    finally:
        for hook in hooks:
            hook.remove()


def patches(model):
    """Everything on a model that a run could leave behind."""
    return [
        (name, len(part._forward_pre_hooks), len(part._forward_hooks), "forward" in vars(part))
        for name, part in model.named_modules()
    ]


def assert_equal_states(ours, theirs, mask, **tolerance):
    """Two cache layers on the tokens of rows."""
    for name in ("keys", "values"):
        pair = (getattr(layer, name).transpose(1, 2)[mask.bool()] for layer in (ours, theirs))
        torch.testing.assert_close(*pair, **tolerance)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_bottom_layers_are_native_and_the_others_translated_without_a_run(own, count):
    pair, mot, inputs, _ = own
    mask, prefix = inputs.target_mask, len(mot.config.target["prefix_ids"])
    with tokens_run(pair["target"]) as (given, done):
        cache = assembled(own, f"bottom:{count}")
    native, plain = prefill(pair["target"], inputs.target_ids, mask), assembled(own, "none")
    for layer_idx, layer in enumerate(cache.layers):
        assert_equal_states(layer, (native if layer_idx < count else plain).layers[layer_idx], mask, atol=0, rtol=0)
        assert not layer.keys.transpose(1, 2)[~mask.bool()].any()
    over_prefix = prefix if count < len(given) else 0
    assert given == [over_prefix + mask.shape[1] * (idx < count) for idx in range(len(given))]
    assert done == [over_prefix + mask.shape[1] * (idx < count - 1) for idx in range(len(done))]


@pytest.mark.parametrize("bottom", [0, 1, 2])
def test_last_tokens_are_what_the_target_makes_of_them_after_the_translation(own, bottom):
    pair, mot, inputs, _ = own
    mask, prefix, last = inputs.target_mask, len(mot.config.target["prefix_ids"]), 3
    with tokens_run(pair["target"]) as (given, done):
        cache = assembled(own, f"bottom:{bottom}+tokens:{last}" if bottom else f"tokens:{last}")
    below = assembled(own, f"bottom:{bottom}" if bottom else "none")
    assert given == [prefix + last + (mask.shape[1] - last) * (idx < bottom) for idx in range(len(given))]
    assert done == [prefix + last + (mask.shape[1] - last) * (idx < bottom - 1) for idx in range(len(done))]
    for row in range(len(TEXTS)):
        kept = mask[row].nonzero().flatten()
        alone = below.rows(torch.tensor([row])).fork()
        for layer in alone.layers:
            layer.keys, layer.values = layer.keys[:, :, kept[:-last]], layer.values[:, :, kept[:-last]]
        with torch.no_grad():
            pair["target"](inputs.target_ids[row, kept[-last:]][None], **{cache_argument(pair["target"]): alone})
        for layer_idx, (ours, manual, before) in enumerate(zip(cache.layers, alone.layers, below.layers, strict=True)):
            for name in ("keys", "values"):
                states = getattr(ours, name)[row, :, kept]
                torch.testing.assert_close(states, getattr(manual, name)[0], atol=1e-5, rtol=1e-4)
                changed = (states - getattr(before, name)[row, :, kept])[:, -last:].abs().amax((0, 2))
                assert bool((changed > 0.01).all()) == (layer_idx >= bottom)


@pytest.mark.parametrize("bos", ["<bos>", None])
def test_all_tokens_are_a_native_prefill(bos):
    tokenizer = make_tokenizer(merges=40, bos=bos)
    model = make_model("llama", tokenizer)
    pair = {"source": model, "target": model, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    mot, text = make_translator(pair), TEXTS[0]
    length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    native = prefill(model, tokenizer(text, return_tensors="pt")["input_ids"])
    for plan in (f"tokens:{length}", f"bottom:2+tokens:{length}", "bottom:3", "bottom:3+tokens:1"):
        cache = mot.handoff(text, replay=plan, **pair)
        assert torch.equal(cache.prefix_mask, torch.ones(1, length + bool(bos), dtype=torch.long))
        for ours, theirs in zip(cache.layers, native.layers, strict=True):
            assert_equal_states(ours, theirs, cache.prefix_mask, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=f"last {length + 1} tokens of each row natively, but row 0 .* has {length} "):
        mot.handoff(text, replay=f"tokens:{length + 1}", **pair)


def test_row_that_is_too_short_is_named_before_the_target_runs(own):
    pair, mot, inputs, _ = own
    shortest = int(inputs.target_mask[0].sum()) - 1
    message = rf"runs the last {shortest + 1} tokens .* row 1 .* has {shortest} .* Choose tokens:{shortest} or fewer"
    with tokens_run(pair["target"]) as (given, _):
        cache, ids, mask = mot.read_source(TEXTS[::-1], pair["source"], pair["source_tokenizer"])
        before = list(given)
        arguments = {name: pair[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
        with pytest.raises(ValueError, match=message):
            plan = f"bottom:1+tokens:{shortest + 1}"
            mot.translate(cache, ids, source_attention_mask=mask, replay=plan, text=TEXTS[::-1], **arguments)
    assert given == before


FORMS = {
    "reduced rank": {},
    "full rank": {"rank": None},
    "pieces": {"piece_ranks": [[8, 2], [3, 8], [5, 2]]},
    "mixture": {"method": "mot", "linear_path": True, "num_translators": 2, "hidden_size": 8},
    "trunk": {"method": "mot", "trunk": True, "hidden_size": 8},
    "not causal": {"method": "mot", "causal": False, "hidden_size": 8},
    "mlp": {"method": "mlp", "linear_path": True, "hidden_size": 8},
}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_translator_does_not_run_for_what_the_target_does(form):
    pair = make_own("llama")
    mot = MoTModel(MoTConfig(**make_translator(pair).config.to_dict() | FORMS[form])).eval()
    for weight in mot.parameters():
        weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(weight.numel()))
    cache, ids, mask = mot.read_source(TEXTS[1:], pair["source"], pair["source_tokenizer"])
    arguments = {name: pair[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
    inputs = mot.prepare(cache, ids, source_attention_mask=mask, text=TEXTS[1:], **arguments)
    length = inputs.target_mask.shape[1]
    whole = mot(inputs.source_states, inputs.embeddings, inputs.target_mask)
    costs = []
    for plan, first, end in (("none", 0, 0), ("bottom:1", 1, 0), ("tokens:3", 0, 3), ("bottom:2+tokens:4", 2, 4)):
        plan = ReplayPlan.parse(plan)
        # The other attention of the CPU is not counted.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            output = mot.run(inputs, plan)
        assert counter.get_total_flops() == plan.flops(mot.config, length) - plan.target_flops(mot.config, length)
        costs.append(counter.get_total_flops())
        for name in ("key_states", "value_states"):
            for ours, theirs in zip(output[name], whole[name][first:], strict=True):
                torch.testing.assert_close(ours[:, :, : length - end], theirs[:, :, : length - end])
        ours, theirs = (mot.assemble(part, inputs, pair["target"], plan) for part in (output, whole))
        for one, other in zip(ours.layers, theirs.layers, strict=True):
            assert_equal_states(one, other, inputs.target_mask, atol=1e-5, rtol=1e-4)
    assert form == "not causal" or costs[0] > costs[2] > costs[3]
    assert form == "not causal" or costs[1] < costs[0]
    for plan in map(ReplayPlan.parse, ("bottom:3", f"bottom:3+tokens:{length - 1}")):
        assert mot.run(inputs, plan).key_states == ()
        assert plan.flops(mot.config, length) == plan.target_flops(mot.config, length)


@pytest.mark.parametrize("plan", ["bottom:1", "bottom:2+tokens:2", "full"])
def test_target_is_left_as_it_was(own, plan):
    target = own[0]["target"]
    before = patches(target)
    expected = assembled(own, plan)
    assert patches(target) == before

    def fail(*args):
        raise KeyError("within")

    hook = decoder_layers(target)[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="within"):
        assembled(own, plan)
    hook.remove()
    assert patches(target) == before
    assert torch.equal(assembled(own, plan).layers[-1].keys, expected.layers[-1].keys)


def test_checkpointing_that_takes_the_cache_away_is_noticed():
    own = make_own("llama")
    mot, text = make_translator(own), TEXTS[0]
    own["target"].activation_checkpointing_enable()
    own["target"].train()
    arguments = {name: own[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
    cache, ids, _ = mot.read_source([text], own["source"], own["source_tokenizer"])
    inputs = mot.prepare(cache, ids, text=text, **arguments)
    output = mot(inputs.source_states, inputs.embeddings)
    # Either we see it, or the family's attention cannot lay its mask over what is left.
    with pytest.raises(RuntimeError, match=r"ran past the cache in its layers \[0, 1, 2\]|must match the size"):
        mot.assemble(output, inputs, own["target"], ReplayPlan.parse("tokens:2"))
    cache = mot.assemble(output, inputs, own["target"], ReplayPlan.parse("bottom:2"))  # needs no gradient
    native = prefill(own["target"].eval(), inputs.target_ids)
    assert torch.equal(cache.layers[1].keys, native.layers[1].keys)


def test_translator_without_the_bottom_layers_gets_native_ones():
    own = make_own("gemma3")
    whole = MoTModel.identity(own["target"], own["target_tokenizer"])
    upper = {"source_layers": [1, 2], "target_layers": [1, 2]}
    mot = MoTModel(MoTConfig(**whole.config.to_dict() | upper | {"replay": "bottom:1"}))
    native = prefill(own["target"], own["target_tokenizer"](TEXTS[1], return_tensors="pt")["input_ids"])
    for plan in (None, "bottom:2", "bottom:3", "bottom:1+tokens:2"):
        cache = mot.handoff(TEXTS[1], replay=plan, **own)
        for ours, theirs in zip(cache.layers, native.layers, strict=True):
            assert_equal_states(ours, theirs, cache.prefix_mask, atol=1e-5, rtol=1e-4)
    for plan in ("none", "tokens:2"):
        message = f"`replay` is {plan}, but the translator gives layers 1-2 of the target's 3 alone.*replay='bottom:1'"
        with pytest.raises(ValueError, match=message):
            mot.plan(plan)
    lower = MoTConfig(**whole.config.to_dict() | {"source_layers": [0, 1], "target_layers": [0, 1], "replay": "full"})
    with pytest.raises(ValueError, match=r"gives layers 0-1 of the target's 3 alone.*Pass replay='full'\."):
        MoTModel(lower).plan("bottom:1")


def test_more_layers_than_there_are_are_refused_before_anything_runs(own):
    pair, mot, _, _ = own
    with tokens_run(pair["target"]) as (given, _):
        with pytest.raises(ValueError, match="first 4 layers from the target itself, but it has 3. Choose from bott"):
            mot.handoff(TEXTS, replay="tokens:2+bottom:4", **pair)
    assert given == [0, 0, 0]
    with pytest.raises(ValueError, match="first 4 layers from"):
        MoTModel(MoTConfig(**mot.config.to_dict() | {"replay": "bottom:4"}))


def test_plan_that_translates_nothing_has_no_pieces(own):
    with pytest.raises(ValueError, match="`replay` bottom:3 leaves every layer to the target"):
        translated_pieces(own[1], "bottom:3")
    assert translated_pieces(own[1], "bottom:2+tokens:1") == [(2, "keys"), (2, "values")]


def test_plans_have_one_name():
    for name in ("none", "full", "full:0-2", "bottom:6", "tokens:32", "bottom:6+tokens:32"):
        assert str(ReplayPlan.parse(name)) == name
    assert str(ReplayPlan.parse("tokens:32+bottom:6")) == "bottom:6+tokens:32"
    assert ReplayPlan.parse("bottom:6+tokens:32") == ReplayPlan(bottom=6, tokens=32)
    for name in ("bottom:0", "tokens:0", "bottom", "tokens:x", "tokens:-1", "bottom:1+bottom:2", "bottom:1+", "+"):
        with pytest.raises(ValueError, match="`replay` must be one of none, full, .* both from 1"):
            ReplayPlan.parse(name)
    for name in ("full+tokens:3", "bottom:2+full:0-1"):
        with pytest.raises(
            ValueError, match="`replay` full and sparse run all layers over all tokens, .* Leave out either"
        ):
            ReplayPlan.parse(name)
    with pytest.raises(ValueError, match="`replay` none runs nothing natively, .* got 'tokens:3.none'. Drop none."):
        ReplayPlan.parse("tokens:3+none")
    with pytest.raises(ValueError, match="must be 0 or more, got -1, 0"):
        ReplayPlan(bottom=-1)


# Learned positions, also beside projections of the embeddings; none, tables per layer, and biases by distance.
COUNTED = (
    *("GPT-2", "GPT-BigCode", "GPT-Neo (global and local)", "OPT", "OPT (350m: projections, post-norm)", "BioGPT"),
    *("CTRL", "Bloom", "MPT", "GPT-J", "GPT-NeoX", "Llama", "Qwen3", "Gemma-3", "Gemma-3n", "Gemma-4"),
)


@pytest.mark.parametrize("family", COUNTED)
def test_weights_that_cost_are_those_that_a_prefill_multiplies_by(family):
    """And norms and biases, which are few but in a tiny model; not what is looked up, nor the LM head."""
    model, length = ALL_FAMILIES[family](90), 12
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run_decoder(model, torch.arange(5, 5 + length)[None], DynamicCache())
    counted = counter.get_flop_counts()["Global"]
    multiplied = sum(counted.get(name, 0) for name in (torch.ops.aten.mm, torch.ops.aten.addmm))
    added = 2 * length * sum(weight.numel() for weight in model.parameters() if weight.dim() == 1)
    assert 2 * length * probe(model).decoder_parameters == pytest.approx(multiplied + added, rel=0.01)


@pytest.mark.parametrize("class_name", ["GPT2LMHeadModel", "OPTForCausalLM", "LlamaForCausalLM"])
def test_tied_heads_cost_as_little_as_others(class_name):
    tied, untied = (build(class_name, 90, tie_word_embeddings=tie) for tie in (True, False))
    assert probe(tied).decoder_parameters == probe(untied).decoder_parameters


def test_cost_is_that_of_the_layers_and_tokens_that_are_run(own):
    _, mot, _, _ = own
    geometry, config, length = mot.target_geometry, mot.config, 40
    weights, width, depth = geometry.decoder_parameters, geometry.attention_dim, len(geometry.layers)

    def run(plan):
        return ReplayPlan.parse(plan).target_flops(config, length)

    native = native_flops(geometry, length)
    seen = sum(range(length - 7, length + 1))  # by each of the last eight tokens
    projections = [2 * length * geometry.embedding_dim * (layer.width + width) for layer in geometry.layers]
    assert run("none") == 0 and run("full") == run(f"tokens:{length}") == native
    assert run("tokens:8") == 2 * 8 * weights + 2 * 2 * depth * width * seen
    for count in range(1, depth + 1):
        assert run(f"bottom:{count}") == pytest.approx(native * (count - 1) / depth + projections[count - 1], abs=8)
    translated = length - 8
    assert run("bottom:2+tokens:8") == run("tokens:8") + bottom_flops(geometry, translated, 2)
    for part in ("bottom", "tokens"):
        counts = range(1, (depth if part == "bottom" else length) + 1)
        assert sorted(set(costs := [run(f"{part}:{count}") for count in counts])) == costs
    plan = ReplayPlan.parse("tokens:8")
    assert plan.flops_share(config, length) == plan.flops(config, length) / native
