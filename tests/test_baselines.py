import random

import pytest
import torch
from conftest import make_documents, make_model, make_tokenizer
from evaluation_pair import CONTEXT, make_pair

from hf_mot.baselines import RawCopy, Ridge, fit_ridge
from hf_mot.baselines.states import make_shell
from hf_mot.evaluation import evaluate
from hf_mot.evaluation.batch import Batch, Models
from hf_mot.evaluation.windows import cut_windows
from hf_mot.fit.pair import Pair, split
from hf_mot.fit.windows import calibration_windows, characters_per_token
from hf_mot.modeling_mot import MoTModel


@pytest.fixture(scope="module")
def pair():
    return make_pair()


def batch_of(pair, count=2, baselines=None):
    names = ("translator", "no_source", "source", "source_tokenizer", "target", "target_tokenizer")
    prefix_ids = pair["translator"].config.target["prefix_ids"]
    models = Models(
        **{name: pair[name] for name in names}, identity=None, prefix_ids=prefix_ids, baselines=baselines or {}
    )
    windows = cut_windows(
        make_documents(count, seed=9), pair["target_tokenizer"], prefix_ids=prefix_ids, context_length=CONTEXT
    ).windows
    return Batch(models, windows)


def same_pair(layers_of_target=3):
    """One model as source and target: its own states are the right translation."""
    tokenizer = make_tokenizer()
    model = make_model("llama", tokenizer)
    translator = MoTModel.identity(model, tokenizer).eval()
    return {
        "translator": translator,
        "no_source": None,
        "source": model,
        "target": model,
        "source_tokenizer": tokenizer,
        "target_tokenizer": tokenizer,
    }


def states(cache):
    return torch.cat([torch.stack([layer.keys, layer.values]) for layer in cache.layers])


def test_raw_copy_of_a_model_to_itself_is_its_own_cache():
    pair = same_pair()
    batch = batch_of(pair)
    torch.testing.assert_close(
        states(RawCopy(pair["translator"])(batch)), states(batch.native_cache), atol=1e-4, rtol=0
    )


def test_raw_copy_takes_layers_by_depth_and_fills_up_width(pair):
    raw_copy = RawCopy(pair["translator"])
    batch = batch_of(pair, baselines={"raw_copy": raw_copy})
    assert raw_copy.mapping == [0, 1, 2]
    inputs = batch.inputs(
        raw_copy.shell
    )  # 2 heads of 8 channels, keys then values, of 3 layers; the target has 1 × 16
    copied = raw_copy(batch).layers[1].values[:, 0, 1:]
    torch.testing.assert_close(copied, inputs.source_states[:, 1:, 3 * 16 : 4 * 16])
    assert raw_copy.flops(100) == 0


def fit_of(pair, **options):
    names = ("source", "target", "source_tokenizer", "target_tokenizer")
    options = {"stride": 1, "held_out_documents": 4, "progress": False, "layer_counts": (1, 2), **options}
    return fit_ridge(make_documents(60), **{name: pair[name] for name in names}, **options)


def test_ridge_of_a_model_to_itself_finds_each_layer_and_is_exact():
    pair = same_pair()
    ridge = fit_of(pair)
    batch = batch_of(pair, baselines={"ridge": ridge})
    for number, own in enumerate(ridge.maps):
        assert number // 2 in own.layers
    torch.testing.assert_close(states(ridge(batch)), states(batch.native_cache), atol=0.05, rtol=0.02)


def test_ridge_is_the_regression_written_out(pair):
    ridge = fit_of(pair, layer_counts=(2,))
    names = ("source", "target", "source_tokenizer", "target_tokenizer")
    own = Pair(**{name: pair[name] for name in names})
    stream, held_out, _ = split(make_documents(60), 4, 0)
    windows = calibration_windows(
        stream,
        pair["target_tokenizer"],
        characters_per_token(held_out, pair["target_tokenizer"]),
        256,
        300_000,
        random.Random(0),
    )
    shell = make_shell(own.source_contract, own.target_contract, range(3))
    rows = [own.rows(shell, [window.text]) for window in windows if own.fits(window.text)]
    x, y = (torch.cat(part).double() for part in zip(*rows, strict=True))
    assert ridge.report["rows"] == len(x)
    values = ridge.maps[
        3
    ]  # of layer 1; a source layer has 16 channels of keys and 16 of values, as has a target layer
    x = torch.cat([x[:, 32 * layer + 16 : 32 * layer + 32] for layer in values.layers], dim=1)
    y = y[:, 32 + 16 : 32 + 32]
    centred, right = x - x.mean(0), y - y.mean(0)
    gram = centred.T @ centred + 0.01 * torch.eye(x.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(gram, centred.T @ right)
    torch.testing.assert_close(values.weight.double(), weight, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(values.bias.double(), y.mean(0) - x.mean(0) @ weight, atol=1e-3, rtol=1e-2)


def test_saved_ridge_is_the_same_and_of_its_pair_alone(pair, tmp_path):
    ridge = fit_of(pair)
    batch = batch_of(pair, baselines={"ridge": ridge})
    ridge.save(tmp_path / "baselines" / "ridge.safetensors")
    assert [path.name for path in (tmp_path / "baselines").iterdir()] == ["ridge.safetensors"]
    again = Ridge.load(tmp_path / "baselines" / "ridge.safetensors", pair["translator"])
    torch.testing.assert_close(states(again(batch)), states(ridge(batch)))
    assert again.report == ridge.report
    with pytest.raises(ValueError, match="was fitted for another pair of models"):
        Ridge.load(tmp_path / "baselines" / "ridge.safetensors", same_pair()["translator"])


def test_baselines_are_arms_like_others(pair):
    ridge = fit_of(pair)
    arms = ["native", "no_context", "translated", "raw_copy", "ridge"]
    report = evaluate(
        documents=make_documents(3, seed=9),
        arms=arms,
        baselines={"raw_copy": RawCopy(pair["translator"]), "ridge": ridge},
        **pair,
    )
    assert set(report["arms"]) == set(arms)
    # A random pair is no place for a verdict, but what was fitted is nearer to the native states than what was not.
    assert report["similarity"]["ridge"]["values"] > report["similarity"]["raw_copy"]["values"]
    assert report["flops_ratios"]["raw_copy"] == 0 < report["flops_ratios"]["ridge"]


@pytest.mark.parametrize("name", ["max_tokens", "stride"])
def test_sizes_are_checked(pair, name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        fit_of(pair, **{name: 0})
