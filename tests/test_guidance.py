"""Guidance for plan `sparse`: where the source looks is heard, and carried over to the tokens of the target."""

import random
from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES, make_model, make_own, make_pair, make_translator
from families import FAMILIES as ALL_FAMILIES
from families import build
from test_replay_parts import patches
from test_sparse import TEXTS, TOKENIZER, TOLERANCE, arguments, assert_equal_caches
from transformers import DynamicCache

from hf_mot import ReplayPlan, guidance_mot
from hf_mot.capture_mot import prefill
from hf_mot.compat_mot import cache_argument, decoder_layers, layer_windows
from hf_mot.guidance_mot import Guide, carried_over


@pytest.fixture(params=FAMILIES, scope="module")
def own(request):
    """A model with a random translator to itself."""
    pair = make_own(request.param)
    return pair, make_translator(pair)


LISTENED = {
    "llama": lambda: make_model("llama", TOKENIZER),
    "gemma3": lambda: make_model("gemma3", TOKENIZER),  # windows of 16, its own scaling
    "gpt2": lambda: make_model("gpt2", TOKENIZER),
    "softcap": lambda: build("Gemma2ForCausalLM", 60, attn_implementation="eager", attn_logit_softcapping=2.0),
    "sinks": lambda: ALL_FAMILIES["GPT-OSS"](60),
    "latent": lambda: ALL_FAMILIES["DeepSeek-V3"](60),
}


@pytest.mark.parametrize("family", LISTENED)
def test_guidance_is_where_the_mean_attention_of_the_heads_is_largest(family, monkeypatch):
    monkeypatch.setattr(guidance_mot, "BLOCK", 7)
    torch.manual_seed(0)
    model, size = LISTENED[family](), 6
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    depth = len(decoder_layers(model))
    guide = Guide(tuple(range(depth)), size)
    found = prefill(model, ids, mask, layers=(), guide=guide).guidance.positions
    alone = prefill(model, ids[1:], layers=(), guide=guide).guidance.positions  # without a mask
    assert all(torch.equal(positions, found[layer_idx][1:]) for layer_idx, positions in alone.items())
    model.set_attn_implementation("eager")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        attentions = model(ids, attention_mask=mask, position_ids=positions, output_attentions=True).attentions
    assert len(found) == len(attentions) == depth
    for layer_idx, attention in enumerate(attentions):
        dense, window = attention.mean(dim=1), layer_windows(model.config)[layer_idx]
        for row, token in mask.nonzero().tolist():
            kept = found[layer_idx][row, token]
            kept = kept[kept >= 0].tolist()
            low = max(5 * (row == 0), 0 if window is None else token - window + 1)
            assert len(kept) == len(set(kept)) == min(size, token - low + 1)
            assert kept[0] == token and min(kept) >= low and max(kept) == token
            forced = [token] + [slot for slot in [5 * (row == 0)] if slot >= low and slot != token]
            assert kept[: len(forced)] == forced
            rest = [slot for slot in range(low, token + 1) if slot not in forced]
            best = dense[row, token, rest].sort(descending=True).values[: len(kept) - len(forced)]
            torch.testing.assert_close(dense[row, token, kept[len(forced) :]], best, atol=1e-5, rtol=1e-4)


def test_positions_are_carried_over_by_the_alignment():
    """Against a plain loop: for each token what its own source token looks at, most first, as the tokens of these."""
    draw = random.Random(0)
    for _ in range(30):
        before, pads, size = draw.randint(1, 12), draw.randint(0, 2), draw.randint(1, 6)
        aligned = sorted(draw.choices(range(before), k=draw.randint(1, 12)))
        positions = torch.full((1, before, min(size, before)), -1, dtype=torch.int32)
        for token in range(before):
            seen = [token, *draw.sample(range(token), min(token, size - 1))][:size]
            positions[0, token, : len(seen)] = torch.tensor(seen)
        ours = carried_over(positions, torch.tensor([[-1] * pads + aligned]), size)[0]
        assert ours.shape == (pads + len(aligned), min(size, before + pads + len(aligned)))
        assert ours[:pads].tolist() == [[pad] * ours.shape[1] for pad in range(pads)]
        for token, source in enumerate(aligned):
            looked_at = positions[0, source].tolist()
            wanted, pieces = [token], [other for other, part in enumerate(aligned[:token]) if part == source]
            for place, seen in enumerate([*looked_at[1:2], None, *looked_at[2:]]):
                tokens = [other for other, part in enumerate(aligned) if part == seen]
                if seen is None or (not looked_at[1:2] and place == 0):
                    tokens = pieces[::-1]
                elif seen >= 0 and not tokens:  # a part of the next token
                    tokens = [other for other, part in enumerate(aligned) if part > seen][:1]
                wanted += tokens
            wanted = [pads + other for other in wanted][: ours.shape[1]]
            expected = wanted + [pads + token] * (ours.shape[1] - len(wanted))
            assert ours[pads + token].tolist() == expected
            assert expected[0] == pads + token


def test_prefix_of_the_target_is_always_among_the_positions():
    pair = make_pair("llama", "gpt2")
    mot = make_translator(pair)
    cache, ids, mask = mot.read_source(TEXTS, pair["source"], pair["source_tokenizer"], plan=mot.plan("sparse:3/0"))
    inputs = mot.prepare(cache, ids, source_attention_mask=mask, text=TEXTS, **arguments(pair))
    first = inputs.target_mask.argmax(dim=1)[:, None, None]
    own = torch.arange(inputs.target_mask.shape[1])[:, None]
    for positions in inputs.guidance.values():
        real = inputs.target_mask.bool()
        assert (positions == own).any(-1).all() and (positions <= own).all()
        assert (positions == first).any(-1)[real].all()
        assert (positions >= first)[real].all()


def test_ready_cache_takes_what_guide_tells(own):
    pair, mot = own
    plan = "full:0-0+sparse:4/0"
    expected = mot.handoff(TEXTS, replay=plan, **pair)
    _, ids, mask = mot.read_source(TEXTS, pair["source"], pair["source_tokenizer"])
    cache = DynamicCache()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        pair["source"](ids, attention_mask=mask, position_ids=positions, **{cache_argument(pair["source"]): cache})
    longer = torch.cat([ids, ids[:, -1:]], dim=1)  # as generate gives them
    for given, given_mask in ((ids, mask), (longer, torch.cat([mask, mask[:, -1:]], dim=1))):
        guidance = mot.guide(pair["source"], given, given_mask, replay=plan)
        ours = mot.translate(
            cache, ids, source_attention_mask=mask, text=TEXTS, guidance=guidance, replay=plan, **arguments(pair)
        )
        assert_equal_caches(ours, expected, atol=TOLERANCE, rtol=1e-3)
    more = mot.guide(pair["source"], ids, mask, replay="sparse:9/0")
    ours = mot.translate(
        cache, ids, source_attention_mask=mask, text=TEXTS, guidance=more, replay=plan, **arguments(pair)
    )
    assert_equal_caches(ours, expected, atol=TOLERANCE, rtol=1e-3)


def test_rows_of_a_ready_cache_are_padded_at_either_end(own):
    pair, mot = own
    plan = "full:0-0+sparse:4/0"
    _, left, mask = mot.read_source(TEXTS, pair["source"], pair["source_tokenizer"])
    rows = [ids[own.bool()] for ids, own in zip(left, mask, strict=True)]
    ids, mask = (torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in (rows, [r * 0 + 1 for r in rows]))
    assert not bool(mask[:, -1].all())
    given = {"source_attention_mask": mask, "text": TEXTS, "replay": plan, **arguments(pair)}
    cache = prefill(pair["source"], ids, mask)
    ours = mot.translate(cache, ids, guidance=mot.guide(pair["source"], ids, mask, replay=plan), **given)
    assert_equal_caches(ours, mot.handoff(TEXTS, replay=plan, **pair), atol=TOLERANCE, rtol=1e-3)


@pytest.mark.parametrize(
    ("layers", "guides", "whole"),
    [((0,), (1,), 2), ((2,), (0,), 2), ((), (0,), 1), ((0,), (2,), 3), (None, (0,), 3)],
)
def test_source_runs_as_far_as_it_is_read_and_listened_to(layers, guides, whole):
    model, ids, ran = make_model("llama", TOKENIZER), torch.arange(30, 50)[None], []
    for layer_idx, layer in enumerate(decoder_layers(model)):
        layer.register_forward_hook(lambda *args, idx=layer_idx: ran.append(idx))
    guidance_mot.check_guide(model)  # probes it, once
    ran.clear()
    cache = prefill(model, ids, layers=layers, guide=Guide(guides, 4))
    assert ran == list(range(whole))  # of the next one, no more than keys and values
    everything = prefill(model, ids, guide=Guide((0, 1, 2), 4))
    assert set(cache.guidance.positions) == set(guides)
    for layer_idx in guides:
        assert torch.equal(cache.guidance.positions[layer_idx], everything.guidance.positions[layer_idx])
    for layer_idx, (ours, theirs) in enumerate(zip(cache.layers, everything.layers, strict=True)):
        kept = layers is None or layer_idx in layers
        assert torch.equal(ours.keys, theirs.keys) if kept else ours.keys is None


def test_guidance_that_is_missing_or_of_something_else_is_refused(own):
    pair, mot = own
    source, plan = pair["source"], "sparse:4/0"
    cache, ids, mask = mot.read_source(TEXTS, source, pair["source_tokenizer"])
    given = {"source_attention_mask": mask, "text": TEXTS, **arguments(pair)}
    before = patches(pair["target"])
    with pytest.raises(ValueError, match=r"`guidance` is required by the plan sparse:4/0: .*=mot.guide\(source"):
        mot.translate(cache, ids, replay=plan, **given)
    with pytest.raises(ValueError, match="`guidance` names 2 positions per token, but the plan sparse:4/0 takes 4"):
        mot.translate(cache, ids, replay=plan, guidance=mot.guide(source, ids, mask, "sparse:2/0"), **given)
    for other in (mot.guide(source, ids[:1], replay=plan), mot.guide(source, ids[:, 1:], mask[:, 1:], plan)):
        with pytest.raises(ValueError, match="`guidance` is of . rows of .* Pass what guide"):
            mot.translate(cache, ids, replay=plan, guidance=other, **given)
    with pytest.raises(ValueError, match="`replay` must be sparse, like sparse:128, to need guidance, got full"):
        mot.guide(source, ids, mask, replay="full")
    with pytest.raises(ValueError, match="`source` (has other weights|does not match)"):
        mot.guide(make_model("llama", TOKENIZER, seed=9), ids, mask, replay=plan)
    inputs = mot.prepare(cache, ids, **given)
    output = mot(inputs.source_states, inputs.embeddings, inputs.target_mask)
    for lacking in (inputs, replace(inputs, guidance={})):
        with pytest.raises(ValueError, match="`guidance` is required by the plan"):
            mot.assemble(output, lacking, pair["target"], ReplayPlan.parse(plan))
    assert patches(pair["target"])[1:] == before[1:]  # but for the hook of generate


def test_source_that_does_not_show_its_attention_is_refused():
    torch.manual_seed(0)
    source, target = ALL_FAMILIES["Falcon (multi-query)"](len(TOKENIZER)), make_model("llama", TOKENIZER)
    pair = {"source": source, "target": target, "source_tokenizer": TOKENIZER, "target_tokenizer": TOKENIZER}
    mot = make_translator(pair)
    message = r"FalconForCausalLM computes the attention of its layers \[0, 1, 2\] outside .* cannot guide"
    with pytest.raises(ValueError, match=message):
        mot.handoff(TEXTS[0], replay="sparse:4/0", **pair)
    with pytest.raises(ValueError, match=message):
        mot.guide(source, torch.arange(5)[None], replay="sparse:4/0")
    assert mot.handoff(TEXTS[0], replay="full", **pair).get_seq_length() > 4


def test_few_layers_of_the_source_guide_all_and_those_that_see_everything():
    plan = ReplayPlan("full", sparse=128)
    guide = plan.guide([None] * 30, [None] * 18)
    assert guide.size == 128 and len(guide.layers) == 4 and set(guide.layers) <= set(range(30))
    assert plan.guide([None] * 30, [512, 512, 512, 512, 512, None] * 3).layers == (9, 19, 29)
    assert plan.guide([512, 512, 512, 512, 512, None] * 3, [None] * 30).layers == (5, 11, 17)
    assert plan.guide([64] * 4, [None] * 4).layers == (2, 3)
    assert ReplayPlan.parse("full").guide([None] * 4, [None] * 4) is None
