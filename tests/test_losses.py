"""The losses against what they say they are, written out; and the queries that the attention-aware one reads."""

from dataclasses import replace

import pytest
import torch
from conftest import make_model, make_tokenizer
from families import build
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_mot.capture_mot import prefill
from hf_mot.training.losses import LOSSES, LossInputs, TopLogProbs, native_variances, weighted_sum
from hf_mot.training.queries import LayerQueries, capture_queries

BATCH, SEQ, VOCAB = 2, 7, 11
SHAPES = [(2, 8), (1, 16), (2, 4)]  # (kv_heads, head_dim) a layer
QUERY_HEADS = 4


def make_inputs(seed: int = 0, equal: bool = False) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)

    def layers():
        return tuple(torch.randn(BATCH, heads, SEQ, dim, generator=generator) for heads, dim in SHAPES)

    def hidden():
        return tuple(torch.randn(BATCH, SEQ, 6, generator=generator) for _ in SHAPES)

    native = {"native_key_states": layers(), "native_value_states": layers(), "native_hidden_states": hidden()}
    native["native_logits"] = torch.randn(5, VOCAB, generator=generator)
    own = {"key_states": layers(), "value_states": layers(), "hidden_states": hidden()}
    own["logits"] = torch.randn(5, VOCAB, generator=generator)
    if equal:
        own = {name.removeprefix("native_"): value for name, value in native.items()}
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[:, 0] = 0  # a prefix
    mask[0, :3] = 0  # and pads
    queries = tuple(
        LayerQueries(torch.randn(BATCH, QUERY_HEADS, SEQ, dim, generator=generator) * dim**-0.5) for _, dim in SHAPES
    )
    labels = torch.randint(0, VOCAB, (5,), generator=generator)
    return LossInputs(**own, **native, mask=mask, labels=labels, query_states=queries)


def differentiable(inputs: LossInputs) -> LossInputs:
    def leaf(states):
        return states.clone().requires_grad_()

    return replace(
        inputs,
        key_states=tuple(map(leaf, inputs.key_states)),
        value_states=tuple(map(leaf, inputs.value_states)),
        hidden_states=tuple(map(leaf, inputs.hidden_states)),
        logits=leaf(inputs.logits),
    )


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"pl"}))
def test_loss_is_zero_for_equal_states_alone(name):
    assert LOSSES[name](make_inputs(equal=True)).abs() < 1e-6
    assert LOSSES[name](make_inputs()) > 0.01


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_reaches_what_the_loss_compares_and_no_slot_that_does_not_count(name):
    inputs = differentiable(make_inputs())
    LOSSES[name](inputs).backward()
    reads = {
        "cc": ("key_states", "value_states"),
        "cr": ("key_states", "value_states"),
        "cc_hidden": ("hidden_states",),
        "key_attention": ("key_states",),
    }.get(name, ("logits",))
    for part in ("key_states", "value_states", "hidden_states"):
        for states in getattr(inputs, part):
            assert (states.grad is not None) == (part in reads)
            if part in reads:
                by_slot = states.grad if states.dim() == 3 else states.grad.transpose(1, 2)
                assert by_slot[inputs.mask == 0].abs().sum() == 0
                assert by_slot[inputs.mask == 1].abs().sum() > 0
    assert (inputs.logits.grad is not None) == (reads == ("logits",))


@pytest.mark.parametrize("name", ["cc", "cr", "cc_hidden", "key_attention"])
def test_pads_and_prefix_do_not_count(name):
    inputs, other = make_inputs(), make_inputs(seed=1)

    def elsewhere(ours, theirs):
        return tuple(
            torch.where(inputs.mask.bool()[:, None, :, None] if a.dim() == 4 else inputs.mask.bool()[..., None], a, b)
            for a, b in zip(ours, theirs, strict=True)
        )

    changed = replace(
        inputs,
        **{
            part: elsewhere(getattr(inputs, part), getattr(other, part))
            for part in ("key_states", "value_states", "hidden_states")
        },
    )
    assert torch.equal(LOSSES[name](inputs), LOSSES[name](changed))


def test_cc_is_the_error_over_the_native_variance_written_out():
    inputs = make_inputs()
    terms = []
    for part in ("key_states", "value_states"):
        for ours, native in zip(getattr(inputs, part), getattr(inputs, f"native_{part}"), strict=True):
            rows = [(ours[b, :, t].flatten(), native[b, :, t].flatten()) for b, t in inputs.mask.nonzero().tolist()]
            ours, native = torch.stack([a for a, _ in rows]), torch.stack([b for _, b in rows])
            variance = ((native - native.mean(0)) ** 2).mean()
            terms.append(((ours - native) ** 2).mean() / variance)
    assert torch.allclose(LOSSES["cc"](inputs), torch.stack(terms).mean(), rtol=1e-5)


def test_cc_does_not_change_with_the_scale_of_a_layer():
    inputs = make_inputs()
    scales = (100.0, 0.01, 1.0)
    scaled = replace(
        inputs,
        **{
            part: tuple(s * states for s, states in zip(scales, getattr(inputs, part), strict=True))
            for part in ("key_states", "native_key_states")
        },
    )
    assert torch.allclose(LOSSES["cc"](inputs), LOSSES["cc"](scaled), rtol=1e-4)


def test_cc_compares_all_layers_from_its_start_and_cr_the_window_alone():
    inputs = make_inputs()
    per_layer = [
        LOSSES["cc"](replace(inputs, layer_weights=[float(n == layer) for n in range(3)])) for layer in range(3)
    ]
    windowed = replace(inputs, translated_layers=2)
    assert torch.allclose(LOSSES["cr"](windowed), torch.stack(per_layer[:2]).mean())
    assert torch.allclose(LOSSES["cc"](windowed), torch.stack(per_layer).mean())
    assert torch.allclose(LOSSES["cc"](replace(windowed, cc_start=1)), torch.stack(per_layer[1:]).mean())
    assert torch.equal(LOSSES["cr"](inputs), LOSSES["cc"](inputs))


def test_weights_of_keys_and_values_apart():
    inputs = make_inputs()
    keys = LOSSES["cc"](replace(inputs, layer_weights=[(1.0, 0.0)] * 3))
    values = LOSSES["cc"](replace(inputs, layer_weights=[(0.0, 1.0)] * 3))
    assert not torch.allclose(keys, values)
    both = LOSSES["cc"](replace(inputs, layer_weights=torch.tensor([[3.0, 1.0]] * 3)))
    assert torch.allclose(both, 0.75 * keys + 0.25 * values)


def test_fixed_variances_make_batches_add_up():
    inputs = make_inputs()
    fixed = replace(inputs, variances=native_variances(inputs))

    def row(b):
        def cut(layers):
            return tuple(states[b : b + 1] for states in layers)

        parts = ("key_states", "value_states", "native_key_states", "native_value_states")
        return replace(fixed, mask=fixed.mask[b : b + 1], **{part: cut(getattr(fixed, part)) for part in parts})

    tokens = fixed.mask.sum(1).float()
    parts = torch.stack([LOSSES["cc"](row(b)) for b in range(BATCH)])
    assert tokens[0] != tokens[1]
    assert torch.allclose((parts * tokens).sum() / tokens.sum(), LOSSES["cc"](fixed), rtol=1e-5)


def test_distill_is_the_divergence_written_out():
    inputs = make_inputs()
    p, q = inputs.native_logits.softmax(-1), inputs.logits.softmax(-1)
    expected = sum(p[n, v] * (p[n, v] / q[n, v]).log() for n in range(5) for v in range(VOCAB)) / 5
    assert torch.allclose(LOSSES["distill"](inputs), expected, rtol=1e-5)


def test_distill_to_the_likeliest_tokens_counts_the_others_as_one():
    inputs = make_inputs()
    log_probs = inputs.native_logits.log_softmax(-1)
    values, ids = log_probs.topk(4)
    few = LOSSES["distill"](replace(inputs, native_logits=TopLogProbs(ids.int(), values)))
    p, q = log_probs.exp(), inputs.logits.softmax(-1)
    p_top, q_top = values.exp(), q.gather(-1, ids)
    p_rest, q_rest = 1 - p_top.sum(-1), 1 - q_top.sum(-1)
    expected = (p_top * (p_top / q_top).log()).sum(-1) + p_rest * (p_rest / q_rest).log()
    assert torch.allclose(few, expected.mean(), rtol=1e-4)
    values, ids = log_probs.topk(VOCAB)
    whole = LOSSES["distill"](replace(inputs, native_logits=TopLogProbs(ids.int(), values)))
    assert few < LOSSES["distill"](inputs)
    assert torch.allclose(whole, LOSSES["distill"](inputs), atol=1e-4)
    assert p.sum() > 0


def test_prompt_lm_is_the_cross_entropy():
    inputs = make_inputs()
    expected = -inputs.logits.log_softmax(-1)[range(5), inputs.labels].mean()
    assert torch.allclose(LOSSES["pl"](inputs), expected)


def test_key_attention_is_the_divergence_written_out():
    inputs = make_inputs()
    layers = []
    for queries, keys, native in zip(inputs.query_states, inputs.key_states, inputs.native_key_states, strict=True):
        group = QUERY_HEADS // keys.shape[1]
        total = []
        for b, t in inputs.mask.nonzero().tolist():
            for head in range(QUERY_HEADS):
                query, kv_head = queries.states[b, head, t], head // group
                seen = [(native if inputs.mask[b, s] == 0 else keys)[b, kv_head, s] for s in range(t + 1)]
                q = (torch.stack(seen) @ query).softmax(-1)
                p = (native[b, kv_head, : t + 1] @ query).softmax(-1)
                total.append((p * (p / q).log()).sum())
        layers.append(torch.stack(total).mean())
    assert torch.allclose(LOSSES["key_attention"](inputs), torch.stack(layers).mean(), rtol=1e-4)


def test_key_attention_does_not_mind_keys_that_nobody_looks_at():
    """A change of a key at a right angle to every query is free; the plain error is not."""
    inputs = make_inputs(equal=True)
    queries = tuple(LayerQueries(F.pad(layer.states[..., 1:], (1, 0))) for layer in inputs.query_states)
    moved = tuple(F.pad(keys[..., 1:], (1, 0), value=5.0) for keys in inputs.key_states)
    inputs = replace(inputs, query_states=queries, key_states=moved)
    assert LOSSES["key_attention"](inputs).abs() < 1e-6
    assert LOSSES["cc"](inputs) > 0.1


FAMILIES = {
    "llama": lambda vocab: make_model("llama", TOKENIZER),
    "gemma3": lambda vocab: make_model("gemma3", TOKENIZER),  # a sliding window of 16, its own scaling
    "gpt2": lambda vocab: make_model("gpt2", TOKENIZER),
    "gemma2": lambda vocab: build(
        "Gemma2ForCausalLM", vocab, attn_implementation="eager", attn_logit_softcapping=2.0, sliding_window=8
    ),
}
TOKENIZER = make_tokenizer(merges=40)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_queries_give_the_models_own_attention(family):
    model = FAMILIES[family](len(TOKENIZER))
    ids = torch.randint(0, len(TOKENIZER), (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    before = dict(ALL_ATTENTION_FUNCTIONS)
    queries = capture_queries(model, ids, mask)
    assert dict(ALL_ATTENTION_FUNCTIONS) == before
    cache = prefill(model, ids, mask)
    model.set_attn_implementation("eager")
    own = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), output_attentions=True)
    assert len(queries) == len(own.attentions) == model.config.num_hidden_layers
    for layer, cached, attention in zip(queries, cache.layers, own.attentions, strict=True):
        mine = layer.log_attention(cached.keys).exp()
        assert torch.allclose(
            mine[mask.bool()[:, None].expand(mine.shape[:3])],
            attention[mask.bool()[:, None].expand(mine.shape[:3])],
            atol=1e-4,
        )


def test_families_with_an_attention_of_their_own_are_refused_by_name():
    falcon = build("FalconForCausalLM", 50)
    with pytest.raises(ValueError, match="FalconForCausalLM ran 0 of its layers through.*Leave the loss"):
        capture_queries(falcon, torch.arange(6)[None])
    with pytest.raises(ValueError, match="GptOssForCausalLM adds `s_aux`"):
        capture_queries(build("GptOssForCausalLM", 50, num_local_experts=2), torch.arange(6)[None])


def test_weighted_sum_names_its_parts_and_leaves_out_those_of_weight_zero():
    inputs = differentiable(replace(make_inputs(), query_states=None))
    total, parts = weighted_sum(inputs, {"cc": 1.0, "distill": 0.5, "key_attention": 0.0})
    assert set(parts) == {"cc", "distill"}
    assert torch.allclose(total, parts["cc"] + 0.5 * parts["distill"])
    assert total.requires_grad and not any(part.requires_grad for part in parts.values())
    weighted, _ = weighted_sum(inputs, {"cc": 1.0}, layer_weights=[1.0, 0.0, 0.0])
    assert not torch.allclose(weighted, parts["cc"])


@pytest.mark.parametrize(
    ("weights", "layer_weights", "message"),
    [
        ({"ccc": 1.0}, None, "`losses` names 'ccc', which is none of cc, cc_hidden, cr, pl, distill, key_attention"),
        ({"cc": 0.0}, None, "`losses` must have weights of 0 or more, at least one above 0"),
        ({"cc": -1.0}, None, "`losses` must have weights"),
        ({"key_attention": 1.0}, None, "The loss 'key_attention' needs `query_states`, which is None"),
        ({"cc": 1.0}, [1.0], "`layer_weights` must have a weight for each of the 3 layers, got 1"),
        ({"cc": 1.0}, [2.0, -0.5, 1.0], "`layer_weights` must be finite and 0 or more, got -0.5 for layer 1"),
        ({"cc": 1.0}, [(1.0, float("nan"))] * 3, "`layer_weights` must be finite and 0 or more, got .* for layer 0"),
        ({"cc": 1.0}, [0.0] * 3, "`layer_weights` leave no layer to compare"),
    ],
)
def test_impossible_sums_are_refused(weights, layer_weights, message):
    inputs = replace(make_inputs(), query_states=None)
    with pytest.raises(ValueError, match=message):
        weighted_sum(inputs, weights, layer_weights)
