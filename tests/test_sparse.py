"""Plan `sparse`: `full`, but that above its first layers the target looks where the source has looked most."""

import json
import runpy
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import (
    FAMILIES,
    changed,
    make_documents,
    make_model,
    make_own,
    make_pair,
    make_tokenizer,
    make_translator,
    save_pair,
)
from evaluation_pair import make_pair as make_evaluation_pair
from families import FAMILIES as ALL_FAMILIES
from test_arms import models_of, windows_of
from test_replay_parts import assert_equal_states, patches
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_mot import MoTConfig, MoTModel, ReplayPlan, sparse_mot
from hf_mot.attention_mot import missed_layers
from hf_mot.capture_mot import prefill
from hf_mot.compat_mot import cache_argument, decoder_layers
from hf_mot.evaluation.arms import ARMS
from hf_mot.evaluation.batch import Batch
from hf_mot.evaluation.cost import measure_cost
from hf_mot.evaluation.memory import peak_growth
from hf_mot.guidance_mot import Guide, carried_over, most_attended
from hf_mot.replay_cost_mot import native_flops
from hf_mot.sparse_mot import sparse_attention, sparse_way
from hf_mot.training.comparison import Comparison

TOLERANCE = 1e-4
TOKENIZER = make_tokenizer(merges=40)
TEXTS = make_documents(1, 6, 1) + make_documents(1, 20, 2)  # the second goes beyond the window of gemma3
WAYS = ("gathered", "masked")
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(params=FAMILIES, scope="module")
def own(request):
    """A model with a random translator to itself."""
    pair = make_own(request.param)
    return pair, make_translator(pair)


def use(way, model, monkeypatch):
    """Has the model's attention made sparse in this way, whatever the probe finds."""
    monkeypatch.setitem(sparse_mot._FOUND, model, way)


def arguments(pair):
    return {name: pair[name] for name in ("target", "source_tokenizer", "target_tokenizer")}


def prompt_logits(pair, cache):
    prompt = pair["target_tokenizer"](" the captain wrote", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return pair["target"](prompt, **{cache_argument(pair["target"]): cache.fork()}).logits


def assert_equal_caches(ours, theirs, **tolerance):
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert_equal_states(one, other, ours.prefix_mask, **tolerance)


def everywhere(ids):
    """What tokens may look at, if they may look everywhere."""
    own = torch.arange(ids.shape[1])[:, None].expand(-1, ids.shape[1])
    return torch.minimum(own, own.T).to(torch.int32).expand(len(ids), -1, -1)


@every_way
@pytest.mark.parametrize("window", ["", "full:0-0+", "full:1-1+"])
def test_looking_everywhere_is_native(own, way, window, monkeypatch):
    pair, _ = own
    use(way, pair["target"], monkeypatch)
    mot = MoTModel.identity(pair["target"], pair["target_tokenizer"])
    plan = f"{window}sparse:500/0"
    ours = prompt_logits(pair, mot.handoff(TEXTS[1], replay=plan, **pair))
    native = prompt_logits(pair, mot.handoff(TEXTS[1], **pair))
    other = prompt_logits(pair, mot.handoff(TEXTS[0], replay=plan, **pair))
    torch.testing.assert_close(ours, native, atol=TOLERANCE, rtol=0)
    assert (other - native).abs().max() > 0.1


@pytest.mark.parametrize("full_layers", [0, 1])
def test_few_positions_change_what_stands_above_the_full_layers(own, full_layers):
    pair, mot = own
    ours = mot.handoff(TEXTS, replay=f"full:0-0+sparse:2/{full_layers}", **pair)
    full = mot.handoff(TEXTS, replay="full:0-0", **pair)
    for layer_idx, (one, other) in enumerate(zip(ours.layers, full.layers, strict=True)):
        differs = (one.keys - other.keys).abs().max() > 0.01
        assert bool(differs) == (layer_idx > full_layers)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_keys_that_are_gathered_and_masks_are_the_same(own, size, monkeypatch):
    pair, mot = own
    monkeypatch.setattr(sparse_mot, "BLOCK", 4)  # and blocks are halved where size is small
    caches = []
    for way in WAYS:
        use(way, pair["target"], monkeypatch)
        caches.append(mot.handoff(TEXTS, replay=f"full:0-0+sparse:{size}/0", **pair))
    assert_equal_caches(*caches, atol=TOLERANCE, rtol=TOLERANCE)


@every_way
def test_padded_rows_are_as_alone(own, way, monkeypatch):
    pair, mot = own
    use(way, pair["target"], monkeypatch)
    plan = "full:0-0+sparse:4/0"
    batch = mot.handoff(TEXTS, replay=plan, **pair)
    for row, text in enumerate(TEXTS):
        kept = batch.prefix_mask[row].bool()
        for ours, theirs in zip(batch.layers, mot.handoff(text, replay=plan, **pair).layers, strict=True):
            torch.testing.assert_close(ours.keys[row][:, kept], theirs.keys[0], atol=TOLERANCE, rtol=1e-3)
            torch.testing.assert_close(ours.values[row][:, kept], theirs.values[0], atol=TOLERANCE, rtol=1e-3)


@every_way
def test_nothing_above_a_token_is_seen(own, way, monkeypatch):
    pair, _ = own
    model = pair["target"]
    use(way, model, monkeypatch)
    ids = torch.arange(30, 60)[None]
    other = torch.cat([ids[:, :20], ids[:, 20:] + 1], dim=1)
    found = []
    for given in (ids, other):
        positions = prefill(model, given, guide=Guide((1,), 5)).guidance.positions[1]
        positions = carried_over(positions, torch.arange(30)[None], 5)
        with sparse_attention(model, dict.fromkeys(range(3), positions)):
            found.append(prefill(model, given))
    for one, two in zip(found[0].layers, found[1].layers, strict=True):
        torch.testing.assert_close(one.keys[:, :, :20], two.keys[:, :, :20], atol=TOLERANCE, rtol=TOLERANCE)
        assert (one.keys[:, :, 20:] - two.keys[:, :, 20:]).abs().max() > 0.1


@every_way
def test_a_token_that_looks_at_itself_alone_does_not_know_the_others(own, way, monkeypatch):
    model = own[0]["target"]
    use(way, model, monkeypatch)
    itself, found, native = torch.arange(12, dtype=torch.int32)[None, :, None], [], []
    for start in (30, 50):
        ids = torch.cat([torch.arange(start, start + 11), torch.tensor([70])])[None]
        native.append(prefill(model, ids).layers[-1].values[:, :, -1])
        with sparse_attention(model, dict.fromkeys(range(3), itself)):
            found.append(prefill(model, ids).layers[-1].values[:, :, -1])
    torch.testing.assert_close(*found, atol=TOLERANCE, rtol=TOLERANCE)
    assert (native[0] - native[1]).abs().max() > 0.1


def test_other_tokenizers_look_at_the_same_text(monkeypatch):
    pair = make_pair("llama", "gpt2")
    mot = make_translator(pair)
    full = mot.handoff(TEXTS, replay="full:0-0", **pair)
    assert_equal_caches(mot.handoff(TEXTS, replay="full:0-0+sparse:500/0", **pair), full, atol=TOLERANCE, rtol=1e-3)
    ours = mot.handoff(TEXTS, replay="full:0-0+sparse:6/0", **pair)
    assert (ours.layers[2].keys - full.layers[2].keys).abs().max() > 0.01
    # What is translated stays, and so does the special prefix, which sees itself alone.
    assert_equal_states(ours.layers[0], full.layers[0], ours.prefix_mask, atol=1e-6, rtol=1e-6)
    first = ours.prefix_mask.argmax(dim=1)
    for row, slot in enumerate(first.tolist()):
        torch.testing.assert_close(
            ours.layers[2].keys[row, :, slot], full.layers[2].keys[row, :, slot], atol=TOLERANCE, rtol=1e-3
        )


@every_way
def test_models_are_left_as_they_were(own, way, monkeypatch):
    pair, mot = own
    source, target, plan = pair["source"], pair["target"], "full:0-0+sparse:3/0"
    use(way, target, monkeypatch)
    expected = mot.handoff(TEXTS[0], replay=plan, **pair)
    before, functions = patches(target), dict(ALL_ATTENTION_FUNCTIONS)
    mot.handoff(TEXTS[0], replay=plan, **pair)
    assert patches(target) == before and dict(ALL_ATTENTION_FUNCTIONS) == functions

    def fail(*args):
        raise KeyError("within")

    reading = mot.read_source(TEXTS[:1], source, pair["source_tokenizer"], plan=mot.plan(plan))
    for call in (  # within the listening, and within the sparse attention
        lambda: mot.handoff(TEXTS[0], replay=plan, **pair),
        lambda: mot.translate(reading[0], reading[1], replay=plan, **arguments(pair)),
    ):
        hook = decoder_layers(target)[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyError, match="within"):
            call()
        hook.remove()
        assert patches(target) == before and dict(ALL_ATTENTION_FUNCTIONS) == functions
    assert_equal_caches(mot.handoff(TEXTS[0], replay=plan, **pair), expected, atol=1e-6, rtol=1e-6)


def test_other_models_and_other_threads_look_everywhere_meanwhile():
    one, other = make_model("llama", TOKENIZER), make_model("llama", TOKENIZER, seed=1)
    ids = torch.arange(30, 50)[None]
    native, native_other = prefill(one, ids), prefill(other, ids)
    itself = torch.arange(20, dtype=torch.int32)[None, :, None]
    found = []
    with sparse_attention(one, {0: itself, 1: itself}):
        sparse = prefill(one, ids)
        assert torch.equal(prefill(other, ids).layers[2].keys, native_other.layers[2].keys)
        thread = threading.Thread(target=lambda: found.append(prefill(one, ids)))
        thread.start()
        thread.join()
    assert torch.equal(found[0].layers[2].keys, native.layers[2].keys)
    assert (sparse.layers[2].keys - native.layers[2].keys).abs().max() > 0.1


def test_sparse_attention_that_is_passed_by_is_noticed():
    model = make_model("llama", TOKENIZER)
    itself = torch.arange(5, dtype=torch.int32)[None, :, None]
    sparse_way(model)
    with pytest.raises(RuntimeError, match=r"ran past its sparse attention in its layers \[0, 2\]"):
        with sparse_attention(model, {0: itself, 2: itself}):
            pass


# What a probe finds: families that go through transformers' attention functions, and others.
FOUND = {
    "GPT-BigCode": "gathered",
    "Gemma-2": "gathered",
    "Gemma-3n": "gathered",
    "Gemma-4 (shared KV layers)": "gathered",
    "GPT-OSS": "gathered",
    "DeepSeek-V3": "gathered",
    "DiffLlama": "gathered",
    "JetMoE": "gathered",
    "Llama-4 (text, chunked)": "gathered",
    "Falcon (multi-query)": "masked",
    "Falcon (alibi)": "masked",
    "Bloom": "masked",
    "GPT-Neo (global and local)": "masked",
}


@pytest.mark.parametrize("family", FOUND)
def test_families_are_sparse_in_the_way_that_they_obey(family):
    torch.manual_seed(0)
    model = ALL_FAMILIES[family](60)
    assert sparse_way(model) == FOUND[family]
    assert bool(missed_layers(model)) == (FOUND[family] == "masked")
    ids = torch.arange(8, 48)[None]
    native, own = prefill(model, ids), torch.arange(40, dtype=torch.int32)[None, :, None]
    with sparse_attention(model, dict.fromkeys(range(len(decoder_layers(model))), everywhere(ids))):
        same = prefill(model, ids)
    with sparse_attention(model, {0: own}):
        other = prefill(model, ids)
    for ours, theirs in zip(same.layers, native.layers, strict=True):
        if ours.keys is not None:
            largest = theirs.keys.abs().max()
            torch.testing.assert_close(ours.keys, theirs.keys, atol=TOLERANCE * largest, rtol=1e-3)
    assert (other.layers[1].keys - native.layers[1].keys).abs().max() > 1e-3


def test_family_that_obeys_in_no_way_is_refused_before_the_source_reads():
    torch.manual_seed(0)
    model, source = ALL_FAMILIES["MPT"](len(TOKENIZER)), make_model("llama", TOKENIZER)
    pair = {"source": source, "target": model, "source_tokenizer": TOKENIZER, "target_tokenizer": TOKENIZER}
    mot = make_translator(pair)
    ran = []
    hook = decoder_layers(source)[0].register_forward_pre_hook(lambda *args: ran.append(1))
    with pytest.raises(ValueError, match="attention of MptForCausalLM can be made sparse neither .* replay='full'"):
        mot.handoff(TEXTS[0], replay="sparse:4/0", **pair)
    hook.remove()
    assert not ran


def test_plans_that_cannot_be_are_refused_before_anything_runs(own):
    pair, mot = own
    for name in ("sparse", "sparse:0", "sparse:-1", "sparse:4/", "sparse:4/x", "sparse:4+sparse:5"):
        with pytest.raises(ValueError, match="`replay` must be one of none, full, .* sparse:128 .*from 1"):
            mot.plan(name)
    for name in ("sparse:4+tokens:3", "bottom:2+sparse:4"):
        with pytest.raises(
            ValueError, match="`replay` full and sparse run all layers over all tokens, .* Leave out either"
        ):
            mot.plan(name)
    with pytest.raises(ValueError, match=r"sparse:4/3 has full attention in the first 3 .* has 3, .* to sparse:4/2"):
        mot.plan("sparse:4/3")
    for fields in ({"sparse": -1, "kind": "full"}, {"sparse": 4}, {"full_layers": -1}):
        with pytest.raises(ValueError, match="`sparse` and `full_layers` of a plan must be 0 or more"):
            ReplayPlan(**fields)
    alone = make_translator(pair, source_layers=())
    with pytest.raises(ValueError, match="sparse:4/1 looks where the source .* reads no source. Pass replay='full'"):
        alone.plan("sparse:4/1")


def test_plans_have_one_name():
    for name in ("sparse:128", "sparse:128/0", "full:6-11+sparse:128", "full:0-1+sparse:1/12"):
        assert str(ReplayPlan.parse(name)) == name
    assert str(ReplayPlan.parse("sparse:128/2")) == "sparse:128"
    assert str(ReplayPlan.parse("sparse:128/3+full")) == "sparse:128/3"
    assert ReplayPlan.parse("sparse:128") == ReplayPlan("full", sparse=128)
    assert ReplayPlan.parse("full:6-11+sparse:128").unguided == ReplayPlan.parse("full:6-11")


def test_sliding_layers_keep_a_window_that_is_near_the_positions():
    plan = ReplayPlan("full", sparse=4, full_layers=1)
    assert plan.sparse_layers([None, None, 4, 16, 17, None]) == [1, 4, 5]
    own = make_own("gemma3")  # windows of 16 in the layers below the last
    mot = make_translator(own)
    full = mot.handoff(TEXTS, replay="full:0-0", **own)
    kept = mot.handoff(TEXTS, replay="full:0-0+sparse:4/0", **own)
    assert_equal_caches(kept, full, atol=1e-6, rtol=1e-6)  # layer 2 alone is sparse, and nothing stands above it
    narrow = mot.handoff(TEXTS, replay="full:0-0+sparse:3/0", **own)
    assert (narrow.layers[2].keys - full.layers[2].keys).abs().max() > 0.01


def test_cost_is_native_without_what_nobody_looks_at():
    own = make_own("llama")
    config = MoTModel.identity(own["target"], own["target_tokenizer"]).config
    geometry = MoTModel(config).target_geometry
    length = 40

    def run(plan, config=config):
        return ReplayPlan.parse(plan).target_flops(config, length)

    native = native_flops(geometry, length)
    assert run("sparse:40/0") == run("sparse:400/0") == run("full") == native
    unseen = sum(max(0, token - 8) for token in range(1, length + 1))
    for full_layers in (0, 1, 2):
        saved = 4 * geometry.attention_dim * unseen * (3 - full_layers)
        assert run(f"sparse:8/{full_layers}") == native - saved
    own = make_own("gemma3")
    config = MoTModel.identity(own["target"], own["target_tokenizer"]).config
    geometry = MoTModel(config).target_geometry
    native = native_flops(geometry, length)
    assert geometry.windows == (16, 16, None)
    assert native - run("sparse:8/0", config) == 4 * geometry.attention_dim * unseen  # of the last layer
    older = MoTConfig(**changed(config.to_dict(), ("target", "geometry", "windows"), ...))
    assert run("sparse:8/0", older) == native  # an upper bound
    damaged = changed(config.to_dict(), ("target", "geometry", "windows", 0), "wide")
    with pytest.raises(ValueError, match="`windows` of `geometry` must be a size or null for each layer"):
        MoTModel(MoTConfig(**damaged))


def test_memory_grows_with_the_context_and_not_with_its_square():
    generator = torch.Generator().manual_seed(0)
    grown = []
    for length in (512, 1024):
        query, key = (torch.randn(1, heads, length, 8, generator=generator) for heads in (4, 2))
        positions = []
        grown.append(
            [
                peak_growth(
                    lambda q=query, k=key, p=positions: p.append(most_attended(q, k, 16)), torch.device("cpu")
                ),
                peak_growth(
                    lambda p=positions, n=length: p.append(carried_over(p[0], torch.arange(n)[None], 16)),
                    torch.device("cpu"),
                ),
                peak_growth(
                    lambda q=query, k=key, p=positions: sparse_mot.attend_to_blocks(
                        [sparse_mot._row_blocks(p[1][0].long())], q, k, k
                    ),
                    torch.device("cpu"),
                ),
            ]
        )
    for short, long in zip(*grown, strict=True):
        assert long < 2.4 * short


def test_gradient_flows_through_gathered_keys():
    own = make_own("llama")
    mot = make_translator(own)
    cache, ids, _ = mot.read_source(TEXTS[:1], own["source"], own["source_tokenizer"], plan=mot.plan("sparse:4/0"))
    inputs = mot.prepare(cache, ids, text=TEXTS[:1], **arguments(own))
    output = mot(inputs.source_states, inputs.embeddings)
    leaves = [part.detach().clone().requires_grad_() for part in (*output.key_states, *output.value_states)]
    output = replace(output, key_states=tuple(leaves[:3]), value_states=tuple(leaves[3:]))
    made = mot.assemble(output, inputs, own["target"], ReplayPlan.parse("full:0-1+sparse:4/0"))
    made.layers[2].keys.sum().backward()
    assert all(leaves[index].grad.any() for index in (0, 1, 3, 4))


def test_arms_of_an_evaluation_are_guided_by_the_source_or_look_everywhere():
    pair = make_evaluation_pair("llama", "gpt2")
    windows = windows_of(pair, make_documents(3))
    sparse, full = (
        Batch(replace(models_of(pair), replay=plan), windows[:2], windows[1:])
        for plan in ("full:0-0+sparse:3/0", "full:0-0")
    )
    for arm in ("identity", "no_source", "zero_cache", "random_cache"):
        assert_equal_caches(ARMS[arm].cache(sparse), ARMS[arm].cache(full), atol=1e-5, rtol=1e-4)
    assert_equal_caches(ARMS["identity"].cache(sparse), sparse.native_cache, atol=1e-4, rtol=1e-3)
    for arm in ("translated", "wrong_source"):
        ours, theirs = ARMS[arm].cache(sparse), ARMS[arm].cache(full)
        assert (ours.layers[2].keys - theirs.layers[2].keys).abs().max() > 0.01
    names = ("source", "target", "source_tokenizer", "target_tokenizer")
    ids = {"target_input_ids": sparse.padded[0], "target_attention_mask": sparse.padded[1]}
    expected = pair["translator"].handoff(
        sparse.texts, replay=sparse.models.replay, **ids, **{name: pair[name] for name in names}
    )
    assert_equal_caches(ARMS["translated"].cache(sparse), expected, atol=1e-5, rtol=1e-4)
    for arm, saves in (("translated", True), ("no_source", False)):
        assert (ARMS[arm].flops(sparse.models, 24) < ARMS[arm].flops(full.models, 24)) == saves
    cost = measure_cost(sparse.models, windows[0], repeats=1)
    assert cost["flops_ratio"] < measure_cost(full.models, windows[0], repeats=1)["flops_ratio"]


def test_training_is_for_the_plan_that_sparse_is_a_cheaper_form_of():
    with pytest.raises(
        ValueError, match="`replay` sparse:4 is a cheaper way to run full, .* Train with replay='full'"
    ):
        Comparison(None, None, plan=ReplayPlan.parse("sparse:4"), losses=["cc"])


def test_example_measures_what_sparse_saves(tmp_path, monkeypatch, capsys):
    save_pair(make_pair("llama", "llama"), tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(make_documents(4)), encoding="utf-8")
    models = ["--source", tmp_path / "source", "--target", tmp_path / "target", "--text", tmp_path / "text.txt"]
    given = [*models, "--plan", "sparse:4/1", "--lengths", 48, "--repeats", 1, "--json", tmp_path / "out.json"]
    monkeypatch.setattr(sys, "argv", ["sparse_attention.py", *map(str, given)])
    runpy.run_path(str(Path(__file__).parent.parent / "examples" / "sparse_attention.py"), run_name="__main__")
    report = json.loads((tmp_path / "out.json").read_text())
    figures = report["lengths"]["48"]
    assert "48 tokens: source_s" in capsys.readouterr().out and str(tmp_path) not in report["command"]
    assert report["way"] == "gathered" and figures["sparse_layers"] == 2 and 0 < figures["flops_share"] < 1
    assert all(value > 0 for name, value in figures.items() if name != "guidance_share")
