"""The controls on context-NLL, each against its definition written out."""

from dataclasses import replace

import pytest
import torch
from conftest import make_documents
from evaluation_pair import CONTEXT, make_pair

from hf_mot import MoTConfig, inputs_mot
from hf_mot.baselines import RawCopy
from hf_mot.evaluation import arms as arms_module
from hf_mot.evaluation import evaluate, run
from hf_mot.evaluation.arms import ARMS
from hf_mot.evaluation.batch import Batch, Models
from hf_mot.evaluation.measure import partner_shift
from hf_mot.evaluation.similarity import cache_similarity
from hf_mot.evaluation.windows import cut_windows
from hf_mot.modeling_mot import MoTModel
from hf_mot.replay_mot import ReplayPlan


@pytest.fixture(scope="module")
def pair():
    return make_pair()


def windows_of(pair, documents, **options):
    prefix_ids = pair["translator"].config.target["prefix_ids"]
    options = {"context_length": CONTEXT, **options}
    return cut_windows(documents, pair["target_tokenizer"], prefix_ids=prefix_ids, **options).windows


def models_of(pair):
    names = ("translator", "no_source", "source", "source_tokenizer", "target", "target_tokenizer")
    return Models(
        **{name: pair[name] for name in names},
        identity=MoTModel.identity(pair["target"], pair["target_tokenizer"]).eval(),
        prefix_ids=pair["translator"].config.target["prefix_ids"],
    )


def states(cache):
    return torch.cat([torch.stack([layer.keys, layer.values]) for layer in cache.layers])


def test_wrong_source_reads_the_right_tokens_beside_the_other_documents_states(pair):
    first, second = windows_of(pair, make_documents(2))
    batch = Batch(models_of(pair), [first], [second])
    translator = pair["translator"]
    own, other = batch.inputs(translator), Batch(batch.models, [second]).inputs(translator)
    expected = translator.assemble(translator(other.source_states, own.embeddings), own, pair["target"])
    torch.testing.assert_close(states(ARMS["wrong_source"].cache(batch)), states(expected))
    assert (states(expected) - states(ARMS["translated"].cache(batch))).abs().max() > 1e-2


def test_wrong_source_starts_again_where_the_other_document_is_shorter(pair):
    long = windows_of(pair, make_documents(1))[0]
    short = windows_of(pair, make_documents(5, seed=1), context_length=9)[0]
    batch = Batch(models_of(pair), [long], [short])
    own, other = batch.inputs(pair["translator"]), Batch(batch.models, [short]).inputs(pair["translator"])
    index = [0, *(1 + place % 8 for place in range(CONTEXT - 1))]  # BOS, then the 8 tokens over and over
    output = pair["translator"](other.source_states[:, index], own.embeddings)
    expected = pair["translator"].assemble(output, own, pair["target"])
    torch.testing.assert_close(states(ARMS["wrong_source"].cache(batch)), states(expected))


def test_zero_cache_is_zero_behind_a_native_prefix(pair):
    batch = Batch(models_of(pair), windows_of(pair, make_documents(2)))
    zero, native = states(ARMS["zero_cache"].cache(batch)), states(batch.native_cache)
    assert zero[:, :, :, 1:].abs().max() == 0
    torch.testing.assert_close(zero[:, :, :, :1], native[:, :, :, :1])


def test_random_cache_has_the_moments_of_the_native_one(pair):
    batch = Batch(models_of(pair), windows_of(pair, make_documents(2, words=400), context_length=300))
    made = ARMS["random_cache"].cache(batch)
    for own, native in zip(made.layers, batch.native_cache.layers, strict=True):
        for part in ("values",):  # keys are turned by their positions
            noise, right = getattr(own, part)[:, :, 1:], getattr(native, part)[:, :, 1:]
            spread = right.std(dim=2)
            torch.testing.assert_close(noise.mean(dim=2) / spread, right.mean(dim=2) / spread, atol=0.35, rtol=0)
            torch.testing.assert_close(noise.std(dim=2) / spread, torch.ones_like(spread), atol=0.25, rtol=0)
            assert (noise - right).abs().mean() > 0.5 * spread.mean()


def test_all_arms_of_documents_run_and_batch_size_changes_nothing(pair):
    others = ("raw_copy", "ridge", "target_layers_only")
    arms = [arm for arm in ARMS if not ARMS[arm].tasks_only and arm not in others]
    one, four = (
        evaluate(documents=make_documents(5), arms=arms, batch_size=size, **pair)["documents"] for size in (1, 4)
    )
    for arm in arms:
        assert [row[arm] for row in one] == pytest.approx([row[arm] for row in four], abs=1e-4), arm


def test_similarity_is_one_for_native_states_alone(pair):
    batch = Batch(models_of(pair), windows_of(pair, make_documents(2)))
    for own in cache_similarity(batch.models, ARMS["identity"].cache(batch), batch.native_cache):
        assert own["keys"] == own["values"] == pytest.approx([1] * len(own["keys"]), abs=1e-5)
    report = evaluate(documents=make_documents(3), arms=["native", "translated", "zero_cache"], **pair)
    assert report["similarity"]["zero_cache"]["keys"] == report["similarity"]["zero_cache"]["values"] == 0
    assert abs(report["similarity"]["translated"]["values"]) < 0.5
    exact = evaluate(documents=make_documents(3), arms=["no_context", "native", "identity"], **pair)
    assert "similarity" not in exact


def test_similarity_of_each_layer_from_the_lowest_translated_one(pair):
    depth = len(pair["translator"].target_geometry.layers)
    options = {**pair, "documents": make_documents(3), "arms": ["native", "translated"], "replay": "full:1-1"}
    own = evaluate(**options)["similarity"]["translated"]
    assert own["first_layer"] == 1
    for name, layers in own["by_layer"].items():
        assert len(layers) == depth - 1 and sum(layers) / len(layers) == pytest.approx(own[name], abs=1e-6)
    whole = evaluate(**{**options, "replay": "full"})["similarity"]["translated"]["by_layer"]
    assert own["by_layer"]["values"][0] == pytest.approx(whole["values"][1], abs=1e-5)  # translated alike


def test_long_contexts_give_several_windows_of_a_document_and_clusters(pair, monkeypatch):
    monkeypatch.setattr(run, "LONG_CONTEXT", CONTEXT)
    documents = make_documents(4, words=90)
    windows = windows_of(pair, documents, per_document=4)
    counts = [sum(window.document == index for window in windows) for index in range(4)]
    assert max(counts) > 1
    report = evaluate(documents=documents, **pair)
    assert (report["n"], report["n_documents"]) == (len(windows), 4)
    tokens = pair["target_tokenizer"](documents[0], add_special_tokens=False)["input_ids"]
    stride = CONTEXT - 1 + 65
    own = [window for window in windows if window.document == 0]
    assert [window.context_ids[1:] + window.continuation_ids for window in own] == [
        tokens[number * stride : (number + 1) * stride] for number in range(len(own))
    ]


def test_partner_is_never_of_the_same_document():
    class Item:
        def __init__(self, group):
            self.group = group

    for groups in ("abc", "aabbc", "aabbcc", "aaabbbc"):
        items = [Item(group) for group in groups]
        shift = partner_shift(items)
        assert all(items[n].group != items[(n + shift) % len(items)].group for n in range(len(items)))
    assert partner_shift([Item(group) for group in "abc"]) == 1
    for groups, message in (("a", "needs at least 2 documents"), ("aa", "needs at least 2"), ("aaab", "has 3 of 4")):
        with pytest.raises(ValueError, match=message):
            partner_shift([Item(group) for group in groups])


def test_crash_in_one_arm_keeps_the_others(pair, monkeypatch):
    whole = evaluate(documents=make_documents(3), arms=["native", "no_context"], **pair)

    def crash(batch):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setitem(ARMS, "translated", replace(ARMS["translated"], cache=crash))
    report = evaluate(documents=make_documents(3), arms=["native", "translated", "no_context"], **pair)
    assert report["missing"] == {"context_nll": {"translated": "RuntimeError: out of memory"}}
    assert report["arms"] == whole["arms"]
    with pytest.raises(RuntimeError, match="out of"):  # nothing to keep
        evaluate(documents=make_documents(3), arms=["translated"], **pair)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ["ridge"]}, "`arms` holds ridge, but `baselines` holds none of that name"),
        ({"documents": None}, "`documents` and `tasks` are both missing"),
        ({"tasks": {"sqad": []}}, "'sqad', which is no task. Did you mean squad"),
        (
            {"replay": f"tokens:{CONTEXT}"},
            f"`replay` is tokens:{CONTEXT}, but a context of {CONTEXT} target tokens has",
        ),
        ({"documents": None, "tasks": {"squad": [1]}, "cost_context_length": 40}, "`cost_context_length` needs docum"),
    ],
)
def test_bad_arguments_are_named(pair, change, message):
    with pytest.raises(ValueError, match=message):
        evaluate(**{"documents": make_documents(2), **pair, **change})


def test_translator_without_source_has_no_wrong_source(pair):
    own = {**pair, "translator": pair["no_source"], "arms": ["native", "wrong_source"]}
    with pytest.raises(ValueError, match="`arms` holds wrong_source, but this translator reads no source"):
        evaluate(documents=make_documents(2), **own)


def test_flops_stand_beside_each_arm(pair):
    report = evaluate(documents=make_documents(2), arms=["native", "no_context", "translated", "no_source"], **pair)
    ratios = report["flops_ratios"]
    assert (ratios["native"], ratios["no_context"]) == (1, 0)
    assert 0 < ratios["no_source"] < ratios["translated"]


def test_arms_take_native_parts(pair):
    plan = ReplayPlan.parse("bottom:1+tokens:2")
    models = replace(models_of(pair), replay=str(plan), baselines={"raw_copy": RawCopy(pair["translator"])})
    first, second = windows_of(pair, make_documents(2))
    batch = Batch(models, [first], [second])
    native, ours = states(batch.native_cache), states(ARMS["identity"].cache(batch))
    torch.testing.assert_close(ours, native, atol=1e-4, rtol=1e-4)
    for arm in ("translated", "no_source", "wrong_source", "zero_cache", "raw_copy"):
        cache = ARMS[arm].cache(batch)
        torch.testing.assert_close(cache.layers[0].keys, batch.native_cache.layers[0].keys, atol=1e-4, rtol=1e-4)
        changed = (cache.layers[2].keys - batch.native_cache.layers[2].keys)[:, :, 1:].abs().amax((1, 3))
        assert bool((changed > 1e-3).all())
    config, length = models.translator.config, len(first.context_ids)
    assert ARMS["translated"].flops(models, length) == plan.flops(config, length)
    copied = models.baselines["raw_copy"].flops(length) + plan.target_flops(config, length)
    assert ARMS["raw_copy"].flops(models, length) == copied


def test_rivals_run_as_many_last_tokens_where_the_translator_tells_which_are_uncertain(pair):
    models = models_of(pair)
    fields = models.translator.config.to_dict()
    predicting = MoTModel(MoTConfig(**fields | {"predicts_error": True})).eval()
    caches = {}
    for translator, replay in ((predicting, "uncertain:3"), (models.translator, "tokens:3")):
        own = {"translator": translator, "replay": replay, "baselines": {"raw_copy": RawCopy(translator)}}
        first, second = windows_of(pair, make_documents(2))
        batch = Batch(replace(models, **own), [first], [second])
        caches[replay] = ARMS["raw_copy"].cache(batch)
        assert ARMS["translated"].cache(batch).layers[0].keys.shape == caches[replay].layers[0].keys.shape
    torch.testing.assert_close(states(caches["uncertain:3"]), states(caches["tokens:3"]))


def test_the_source_reads_a_batch_once_for_all_arms(pair, monkeypatch):
    reads, prefill = [], inputs_mot.prefill

    def counted(model, *args):
        reads.append(model)
        return prefill(model, *args)

    monkeypatch.setattr(inputs_mot, "prefill", counted)
    models = replace(models_of(pair), baselines={"raw_copy": RawCopy(pair["translator"])})
    first, second = windows_of(pair, make_documents(2))
    batch = Batch(models, [first], [second])
    for arm in ("translated", "no_source", "wrong_source", "raw_copy"):
        ARMS[arm].cache(batch)
    assert reads == [pair["source"]] * 2  # the other documents of wrong_source once


def test_crash_of_the_translator_leaves_a_report_without_its_cost(pair, monkeypatch):
    def crash(self, *args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(arms_module.Batch, "translate", crash)
    monkeypatch.setattr(MoTModel, "translate", crash)
    report = evaluate(documents=make_documents(3), **{**pair, "arms": ["native", "translated"], "cost": True})
    assert "native" in report["arms"] and "cost" not in report
    assert report["missing"] == {
        "context_nll": {"translated": "RuntimeError: out of memory"},
        "cost": {"translated": "RuntimeError: out of memory"},
    }


def test_arms_for_questions_alone_say_so_on_documents(pair):
    with pytest.raises(ValueError, match="`arms` holds none that has a meaning for context_nll"):
        evaluate(documents=make_documents(3), **{**pair, "arms": ["source_alone"]})
