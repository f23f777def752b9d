"""The closed-form fit: what it solves, that batches do not matter, what it refuses."""

import json

import pytest
import torch
from conftest import make_documents, make_pair, make_tokenizer

from hf_mot.fit import fit, save_fit
from hf_mot.fit.solve import choose_layers, choose_ridge, solve
from hf_mot.fit.statistics import Statistics
from hf_mot.fit.weights import output_blocks
from hf_mot.fit.windows import batched, calibration_windows
from hf_mot.replay_cost_mot import native_flops
from hf_mot.replay_mot import ReplayPlan


def fill(x, y, parts, blocks):
    statistics = Statistics(blocks)
    for x_part, y_part in zip(x.split(parts), y.split(parts), strict=True):
        statistics.add(x_part, y_part)
    return statistics.moments()


def make_rows(rows=6000, features=40, outputs=24, noise=0.0):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(features, 6, generator=generator) @ torch.randn(6, outputs, generator=generator)
    x = torch.randn(rows, features, generator=generator) * torch.logspace(-2, 2, features) + 30
    y = (x - 30) / torch.logspace(-2, 2, features) @ weights + 5
    return x, y + noise * torch.randn(rows, outputs, generator=generator)


def test_moments_equal_a_direct_computation():
    x, y = make_rows(noise=0.5)
    moments = fill(x, y, 700, [8, 16])
    normal_x = (x.double() - x.double().mean(0)) / x.double().std(0, correction=0)
    torch.testing.assert_close(moments.xx, normal_x.T @ normal_x / len(x), atol=1e-5, rtol=0)
    centred = y.double() - y.double().mean(0)
    scale = torch.cat([b.var(0, correction=0).mean().sqrt().expand(b.shape[1]) for b in y.double().split([8, 16], 1)])
    torch.testing.assert_close(moments.xy, normal_x.T @ (centred / scale) / len(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("parts", [64, 999, 6000])
def test_splitting_the_rows_changes_nothing(parts):
    x, y = make_rows(noise=0.5)
    one, other = (solve(fill(x, y, p, [24]), 1e-3, 4, seed=0) for p in (5000, parts))
    ours, theirs = (x.double() @ m.down @ m.up + m.bias for m in (one, other))
    assert (ours - theirs).norm() / theirs.norm() < 1e-6


def test_full_rank_equals_least_squares():
    x, y = make_rows(noise=0.5)
    solution = solve(fill(x, y, 1000, [24]), 1e-12, None, seed=0)
    ones = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
    expected = ones @ torch.linalg.lstsq(ones, y.double()).solution
    torch.testing.assert_close(x.double() @ solution.down + solution.bias, expected, atol=1e-4, rtol=0)


def test_a_map_of_low_rank_is_found_exactly_and_needs_its_rank():
    x, y = make_rows()
    moments = fill(x, y, 1000, [24])
    errors = {}
    for rank in (5, 6):
        solution = solve(moments, 1e-10, rank, seed=0)
        assert solution.down.shape == (40, rank) and solution.up.shape == (rank, 24)
        predicted = x.double() @ solution.down @ solution.up + solution.bias
        errors[rank] = ((predicted - y).norm() / (y - y.mean(0)).norm()).item()
    assert errors[6] < 1e-4 < 1e-2 < errors[5]


def test_reduced_rank_equals_the_singular_value_decomposition():
    x, y = make_rows(noise=2.0)
    moments = fill(x, y, 1000, [24])
    solution = solve(moments, 1e-10, 3, seed=0)
    ours = (x.double() @ solution.down @ solution.up + solution.bias - moments.y_mean) / moments.y_scale
    normal_x, _ = moments.normalise(x, y)
    u, s, v = torch.linalg.svd(normal_x @ torch.linalg.solve(moments.xx, moments.xy), full_matrices=False)
    torch.testing.assert_close(ours, u[:, :3] * s[:3] @ v[:3], atol=1e-3, rtol=0)


def test_ridge_is_chosen_by_held_out_rows():
    x, y = make_rows(rows=60, noise=3.0)
    held_x, held_y = make_rows(rows=500)
    few, curve = choose_ridge(fill(x, y, 60, [24]), held_x, held_y, seed=0)
    many, _ = choose_ridge(fill(*make_rows(rows=6000), 1000, [24]), held_x, held_y, seed=0)
    assert few > many
    assert few == min(curve, key=lambda point: point["error"])["ridge"]


def test_layers_that_carry_the_output_are_chosen():
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randn(2000, 8, generator=generator) for _ in range(5)]
    base = torch.randn(2000, 3, generator=generator)
    y = 2 * blocks[3] + blocks[1] + base.sum(1, keepdim=True) + 0.1 * torch.randn(2000, 8, generator=generator)
    assert choose_layers(blocks, base, y, 1) == [3]
    assert choose_layers(blocks, base, y, 2) == [1, 3]


def test_windows_mix_lengths_and_keep_to_the_budget():
    import random

    tokenizer = make_tokenizer()
    documents = make_documents(30, 700)
    windows = list(calibration_windows(documents, tokenizer, 1.0, 4096, 60_000, random.Random(0)))
    assert {window.length for window in windows} == {128, 256, 512, 1024, 2048}
    assert 55_000 < sum(window.tokens for window in windows) <= 60_000
    assert all(any(window.text in document for document in documents) for window in windows)
    batches = list(batched(windows, 1024))
    assert sorted(w for batch in batches for w in batch) == sorted(windows)
    assert all(len({window.length for window in batch}) == 1 for batch in batches)


@pytest.fixture(scope="module")
def pair():
    return make_pair()


OPTIONS = {
    "rank": 24,
    "num_source_layers": 2,
    "embedding_window": 2,
    "max_tokens": 5000,
    "held_out_documents": 3,
    "progress": False,
}


@pytest.fixture(scope="module")
def fitted(pair):
    return fit(make_documents(40, 60), **pair, **OPTIONS)


def translated(translator, pair, text):
    cache = translator.handoff(text, **pair)
    return torch.cat([s.flatten() for layer in cache.layers for s in (layer.keys, layer.values)])


@pytest.mark.parametrize("batch_tokens", [1, 3000])
def test_batches_split_differently_give_the_same_fit(pair, fitted, batch_tokens):
    other = fit(make_documents(40, 60), **pair, **OPTIONS, batch_tokens=batch_tokens)
    assert other.report["tokens"] == fitted.report["tokens"]
    assert other.translator.config.source_layers == fitted.translator.config.source_layers
    text = make_documents(1, 30, seed=9)[0]
    ours, theirs = translated(other.translator, pair, text), translated(fitted.translator, pair, text)
    assert (ours - theirs).norm() / theirs.norm() < 1e-4


def test_fit_beats_its_own_control_and_the_mean(pair, fitted):
    """On held-out text: reading the source predicts the target's states better than its embeddings alone."""
    from hf_mot import MoTModel

    text = make_documents(1, 60, seed=8)[0]
    identity = MoTModel.identity(pair["target"], pair["target_tokenizer"])
    own = {**pair, "source": pair["target"], "source_tokenizer": pair["target_tokenizer"]}
    native = identity.handoff(text, **own)
    values = [layer.values[:, :, 1:] for layer in native.layers]

    def error(cache):
        pairs = zip(cache.layers, values, strict=True)
        return sum((ours.values[:, :, 1:] - v).square().sum().item() for ours, v in pairs)

    mean = sum((v - v.mean(2, keepdim=True)).square().sum().item() for v in values)
    with_source = error(fitted.translator.handoff(text, **pair))
    without = error(fitted.no_source.handoff(text, target=pair["target"], target_tokenizer=pair["target_tokenizer"]))
    assert with_source < without < mean


def test_inner_channels_are_standardised_and_outputs_in_units_of_their_own(pair, fitted):
    """So that one learning rate suits all weights that come after the source's and the embeddings' projections."""
    mot, module = fitted.translator, fitted.translator.translator
    inner, states = [], []
    for text in make_documents(30):
        cache, ids, _ = mot.read_source([text], pair["source"], pair["source_tokenizer"])
        arguments = {name: pair[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
        inputs = mot.prepare(cache, ids, text=text, **arguments)
        read = module.source_in(inputs.source_states) + module.embedding_in(inputs.embeddings) - module.center
        inner.append(read[0, 1:])
        states.append((module.up(read) + module.bias)[0, 1:])
    inner, states = torch.cat(inner), torch.cat(states)
    assert inner.mean(0).abs().max() < 0.35 and 0.5 < inner.std(0).min() and inner.std(0).max() < 1.5
    for piece in states.split(output_blocks(mot.target_geometry), dim=1):
        assert 0.7 < piece.var(0).mean().sqrt() < 1.3
    assert len(module.scale.unique()) == len(output_blocks(mot.target_geometry))


def test_a_dataset_is_read_as_its_texts(pair, fitted):
    rows = [{"title": "", "text": document} for document in make_documents(40, 60)]
    other = fit(rows, **pair, **OPTIONS)
    assert other.report["tokens"] == fitted.report["tokens"]
    text = make_documents(1, 30, seed=9)[0]
    assert torch.equal(translated(other.translator, pair, text), translated(fitted.translator, pair, text))


def test_no_source_reads_no_source(pair, fitted):
    assert fitted.no_source.config.source_layers == []
    assert fitted.no_source.config.embedding_window == fitted.translator.config.embedding_window
    assert fitted.no_source.translator.source_in is None


def test_report_says_what_was_done(fitted):
    report = fitted.report
    assert report["method"] == "reduced_rank" and report["rank"] == 24 and len(report["source_layers"]) == 2
    assert 4000 < report["tokens"] <= 5000 and report["held_out_documents"] == 3
    assert report["ridge"] in [point["ridge"] for point in report["ridge_curve"]]
    json.dumps(report)


def test_cost_estimate_counts_the_translators_weights(fitted):
    config = fitted.translator.config
    weights = sum(w.numel() for name, w in fitted.translator.named_parameters() if not name.endswith(("bias", "gain")))
    weights += fitted.translator.translator.error.weight.numel()
    plan = ReplayPlan.parse("none")
    assert plan.flops(config, 100) == 2 * weights * 100
    native = native_flops(fitted.translator.target_geometry, 100)
    assert plan.flops_share(config, 100) == pytest.approx(2 * weights * 100 / native)


def test_full_rank_is_an_option(pair):
    result = fit(make_documents(30, 60), **pair, **{**OPTIONS, "rank": None})
    assert result.translator.config.rank is None
    assert result.translator.handoff("river stone", **pair).get_seq_length() > 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "magic"}, "`method` must be 'reduced_rank', got 'magic'"),
        ({"rank": 0}, "`rank` must be at least 1, got 0"),
        ({"source_layers": [7]}, r"`source_layers` must lie in 0..2, got \[7\]"),
        ({"documents": []}, "`documents` holds no text"),
        ({"documents": ["one"]}, "`documents` holds a single document"),
    ],
)
def test_bad_arguments_are_named(pair, change, message):
    arguments = {**OPTIONS, "documents": make_documents(5), **change}
    with pytest.raises(ValueError, match=message):
        fit(arguments.pop("documents"), **pair, **arguments)


def test_a_small_corpus_holds_out_a_quarter(pair):
    result = fit(make_documents(8, 60), **pair, **{**OPTIONS, "held_out_documents": 32})
    assert result.report["held_out_documents"] == 2


def test_few_long_documents_are_fitted_on(pair):
    assert fit(make_documents(2, 250), **pair, **OPTIONS).report["held_out_documents"] == 1


def test_what_is_no_translator_is_not_overwritten(fitted, tmp_path):
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="holds something else than a translator"):
        save_fit(fitted, tmp_path, overwrite=True)
    assert (tmp_path / "letters.txt").read_text() == "dear"


def test_twin_has_a_report_of_its_own(fitted):
    report = fitted.no_source.fit_report
    assert report["source_layers"] == [] and "no_source" not in report
    assert report["ridge"] == fitted.report["no_source"]["ridge"]


def test_fit_that_is_killed_leaves_no_translator(fitted, tmp_path, monkeypatch):
    from hf_mot import MoTModel

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(fitted.no_source, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_fit(fitted, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    save_fit(fitted, tmp_path / "out")
    assert MoTModel.from_pretrained(tmp_path / "out").fit_report == fitted.report
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        save_fit(fitted, tmp_path / "out")
