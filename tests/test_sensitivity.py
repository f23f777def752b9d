"""Sensitivity: a piece that is translated badly is found, and nothing else is blamed."""

import json

import pytest
import torch
from conftest import make_documents, make_model, make_random_translator, make_tokenizer
from evaluation_pair import CONTEXT, make_examples
from evaluation_pair import make_pair as make_evaluated_pair
from torch import nn

from hf_mot import MoTConfig, MoTModel
from hf_mot.analysis import measure_sensitivity
from hf_mot.analysis.pieces import Unexplained, mix
from hf_mot.evaluation import evaluate


class Noisy(nn.Module):
    """The identity, but for noise on some channels."""

    def __init__(self, channels: slice, size: float):
        super().__init__()
        self.channels, self.size = channels, size

    def forward(self, source_states, embeddings, attention_mask=None, start=0, target_hidden_states=None):
        states = source_states.clone()
        noise = torch.randn(states[..., self.channels].shape, generator=torch.Generator().manual_seed(0))
        states[..., self.channels] += self.size * noise
        return states[..., start:]


def make_identity(family: str = "gemma3", layer_idx: int = 0, states: str = "keys", noise: float = 0.0) -> dict:
    """Arguments for a target that is its own source, with a translator that is exact but for one piece."""
    tokenizer = make_tokenizer()  # of single bytes: the context alone has the same tokens as within its document
    model = make_model(family, tokenizer)
    translator = MoTModel.identity(model, tokenizer).eval()
    layers = translator.target_geometry.layers
    start = sum(layer.width for layer in layers[:layer_idx])
    keys = layers[layer_idx].kv_heads * layers[layer_idx].key_dim
    channels = slice(start, start + keys) if states == "keys" else slice(start + keys, start + layers[0].width)
    translator.translator = Noisy(channels, noise)
    return {
        "translator": translator,
        "source": model,
        "target": model,
        "source_tokenizer": tokenizer,
        "target_tokenizer": tokenizer,
        "context_length": CONTEXT,
        "progress": False,
    }


def costs(report: dict, measure: str, key: str = "cost") -> dict:
    return {(own["layer"], own["states"]): own[key]["value"] for own in report["measures"][measure]["pieces"]}


@pytest.mark.parametrize(("layer_idx", "states"), [(1, "keys"), (2, "values")])
def test_the_piece_that_is_translated_badly_is_found(layer_idx, states):
    own = make_identity(layer_idx=layer_idx, states=states, noise=5.0)
    report = measure_sensitivity(
        documents=make_documents(4), tasks={"squad": make_examples(5)}, batch_size=3, reverse=True, **own
    )
    assert set(report["measures"]) == {"context_nll", "squad"}
    for measure, figures in report["measures"].items():
        found = costs(report, measure)
        culprit = found.pop((layer_idx, states))
        assert abs(culprit) > 2e-3
        assert len(found) == 5 and max(map(abs, found.values())) < 1e-4
        assert figures["translated"] - figures["native"] == pytest.approx(culprit, abs=1e-4)
    unexplained = {(own["layer"], own["states"]): own["value"] for own in report["unexplained"]}
    assert unexplained.pop((layer_idx, states)) > 0.1
    assert max(unexplained.values()) < 1e-6
    json.dumps(report)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_exact_translation_loses_nothing(family):
    own = make_identity(family)
    report = measure_sensitivity(documents=make_documents(3), tasks={"squad": make_examples(3)}, **own)
    for measure in report["measures"]:
        assert max(map(abs, costs(report, measure).values())) < 1e-4
    assert all(own["value"] < 1e-6 for own in report["unexplained"])


@pytest.fixture(scope="module")
def pair():
    """A real pair in little: other tokenizers, random weights; the target has windows shorter than a context."""
    pair = make_evaluated_pair()
    return {name: value for name, value in pair.items() if name not in ("no_source", "cost")}


def test_references_are_those_of_an_evaluation(pair):
    documents, tasks = make_documents(4), {"squad": make_examples(5), "boolq": make_examples(3, closed=True)}
    report = measure_sensitivity(documents=documents, tasks=tasks, **pair)
    arms = ["native", "no_context", "translated"]
    expected = evaluate(documents=documents, tasks=tasks, arms=arms, **pair, cost=False)
    for arm in arms:
        assert report["measures"]["context_nll"][arm] == pytest.approx(expected["arms"][arm]["nll"], abs=1e-4)
        for task in tasks:
            assert report["measures"][task][arm] == pytest.approx(expected["tasks"][task]["answer_nll"][arm], abs=1e-4)


def test_batches_with_pads_change_nothing(pair):
    tasks = {"squad": make_examples(5)}  # contexts, prompts and answers of unequal length
    one, four = (measure_sensitivity(tasks=tasks, batch_size=size, **pair) for size in (1, 4))
    assert costs(one, "squad") == pytest.approx(costs(four, "squad"), abs=1e-4)
    for own, other in zip(one["unexplained"], four["unexplained"], strict=True):
        assert own["value"] == pytest.approx(other["value"], rel=1e-4)
    assert any(abs(cost) > 1e-3 for cost in costs(one, "squad").values())


def test_reverse_wins_back_what_a_lone_culprit_lost():
    torch.manual_seed(0)
    own = make_identity(layer_idx=1, noise=2.0)
    documents = make_documents(6)
    report = measure_sensitivity(documents=documents, reverse=True, **own)["measures"]["context_nll"]
    assert ("notes" in report) == ("lost" not in report)
    for piece in report["pieces"]:
        if "lost" in report:
            wins = report["lost"]["value"] if (piece["layer"], piece["states"]) == (1, "keys") else 0
            assert piece["restored"]["value"] == pytest.approx(wins, abs=1e-3)
        else:
            assert "restored" not in piece and "lost" not in piece


def test_a_context_that_is_worth_nothing_gives_nats_and_a_note(pair):
    report = measure_sensitivity(tasks={"squad": make_examples(1)}, **pair)["measures"]["squad"]
    assert "lost" not in report and "lost" not in report["pieces"][0] and "cost" in report["pieces"][0]
    assert "at least 2 of them, got 1" in report["notes"][0]


def test_a_channel_window_leaves_other_layers_native(pair):
    report = measure_sensitivity(documents=make_documents(3), replay="full:1-1", **pair)
    assert list(costs(report, "context_nll")) == [(1, "keys"), (1, "values")]


def test_what_resumes_from_a_translated_state_is_no_piece(pair):
    models = {name: pair[name] for name in ("source", "target", "source_tokenizer", "target_tokenizer")}
    resumed = {**pair, "translator": make_random_translator(models, resume_layer=2)}
    with pytest.raises(ValueError, match="the layers above 1 come of a translated hidden state.*Pass replay='full'"):
        measure_sensitivity(documents=make_documents(3), **resumed)
    report = measure_sensitivity(documents=make_documents(3), replay="full", **resumed)
    assert {layer_idx for layer_idx, _ in costs(report, "context_nll")} == {0, 1}


def test_a_mixed_cache_is_native_but_for_its_pieces(pair):
    text = make_documents(1, words=5)[0]
    keys = ("source", "target", "source_tokenizer", "target_tokenizer")
    models = {key: pair[key] for key in keys}
    translated = pair["translator"].handoff(text, **models)
    own = {**models, "source": pair["target"], "source_tokenizer": pair["target_tokenizer"]}
    native = MoTModel.identity(pair["target"], pair["target_tokenizer"]).handoff(text, **own)
    before = [layer.keys.clone() for layer in native.layers]
    mixed = mix(native, translated, [(1, "keys")])
    assert mixed.layers[1].keys is translated.layers[1].keys
    assert mixed.layers[1].values is native.layers[1].values and mixed.layers[0].keys is native.layers[0].keys
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(native.layers, before, strict=True))


def test_unexplained_is_one_minus_r_squared():
    torch.manual_seed(0)
    native, noise = torch.randn(100, 5).double() + 3, torch.randn(100, 5).double()
    own = Unexplained()
    own.add(native[:30], native[:30] + noise[:30])
    own.add(native[30:], native[30:] + noise[30:])
    expected = noise.square().sum() / (native - native.mean(0)).square().sum()
    assert own.share == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": None}, "`documents` and `tasks` are both missing"),
        ({"tasks": {"sqad": []}}, "'sqad', which is no task. Did you mean squad"),
        ({"limit": 0}, "`limit` must be at least 1"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"context_length": 3}, "`context_length` must be an integer of at least 8"),
        ({"replay": "some"}, "`replay` must be one of none, full"),
        ({"source": None}, "`source` is None, but this translator reads a source"),
        ({"replay": "full:1-7"}, "`replay` injects layers 1-7, but the translator gives layers 0-2"),
    ],
)
def test_bad_arguments_are_named(pair, change, message):
    with pytest.raises(ValueError, match=message):
        measure_sensitivity(**{"documents": make_documents(2), **pair, **change})


def test_a_loss_that_is_not_finite_names_its_piece():
    own = make_identity(layer_idx=1, noise=float("nan"))
    with pytest.raises(ValueError, match="The NLL after the translated cache is"):
        measure_sensitivity(documents=make_documents(2), **own)


def test_a_channel_window_is_analysed_by_its_own_plan():
    own = make_identity()
    config = own["translator"].config.to_dict() | {"method": "reduced_rank", "rank": 4}
    window = MoTModel(MoTConfig(**config | {"target_layers": [1], "replay": "full"})).eval()
    report = measure_sensitivity(documents=make_documents(3), **{**own, "translator": window})
    assert report["replay"] == "full:1-1"
    assert costs(report, "context_nll").keys() == {(1, "keys"), (1, "values")}
