"""A fit within a budget: which ranks it chooses, that it keeps to the budget, what it refuses."""

import argparse
import itertools
import json
import shutil

import pytest
import torch
from conftest import make_documents, make_pair, save_pair

from hf_mot import MoTModel
from hf_mot.cli.fit import _count
from hf_mot.cli.main import main
from hf_mot.cli.rivals import refit_twin
from hf_mot.fit import fit, save_fit
from hf_mot.fit.ranks import Budget, rank_grid
from hf_mot.fit.solve import solve
from hf_mot.fit.statistics import Statistics

FEATURES, WIDTHS = 40, [8, 16, 8]
RIDGE, CEILING = 1e-3, 20
OPTIONS = {"source_layers": [0, 2], "embedding_window": 2, "max_tokens": 1500, "held_out_documents": 3, "rank": 24}


@pytest.fixture(scope="module")
def rows():
    """Pieces that need few channels, many, and none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, FEATURES, generator=generator) @ torch.randn(FEATURES, FEATURES, generator=generator)
    pieces = [
        torch.randn(3000, width, generator=generator)
        + x @ torch.randn(FEATURES, rank, generator=generator) @ torch.randn(rank, width, generator=generator)
        for width, rank in zip(WIDTHS, (2, 12, 1), strict=True)
    ]
    pieces[2] = torch.randn(3000, WIDTHS[2], generator=generator)
    return x + 3, torch.cat(pieces, 1) + 5


@pytest.fixture(scope="module")
def moments(rows):
    statistics = Statistics(WIDTHS)
    statistics.add(*rows)
    return statistics.moments()


def channels_of(solution, moments) -> torch.Tensor:
    """What a map's channels hold for normalised features, `[features, rank]`."""
    return solution.down * moments.x_scale[:, None]


def error_of(solution, moments) -> torch.Tensor:
    """The regularised squared error of each piece in normalised units, up to a constant."""
    down, up = channels_of(solution, moments), solution.up / moments.y_scale
    penalised = moments.xx + RIDGE * torch.eye(FEATURES, dtype=torch.float64)
    inner = down.T @ penalised @ down
    errors = (up * (inner @ up)).sum(0) - 2 * (up * (down.T @ moments.xy)).sum(0)
    return torch.stack([piece.sum() for piece in errors.split(WIDTHS)])


def test_a_cut_piece_equals_a_refit_from_its_channels(moments):
    solution = solve(moments, RIDGE, CEILING, 0, Budget(500, WIDTHS))
    whole = solve(moments, RIDGE, CEILING, 0)
    assert len(set(solution.piece_ranks)) > 1 and max(solution.piece_ranks) == len(solution.up)
    down, penalised = channels_of(whole, moments), moments.xx + RIDGE * torch.eye(FEATURES, dtype=torch.float64)
    pieces = zip(solution.piece_ranks, solution.up.split(WIDTHS, 1), moments.xy.split(WIDTHS, 1), strict=True)
    for (rank, up, xy), scale in zip(pieces, moments.y_scale.split(WIDTHS), strict=True):
        own = down[:, :rank]
        refit = torch.linalg.solve(own.T @ penalised @ own, own.T @ xy) * scale
        torch.testing.assert_close(up[:rank], refit, atol=1e-8, rtol=1e-6)
        assert not up[rank:].any()


def test_means_are_met_at_any_ranks(moments, rows):
    x, y = (part.double() for part in rows)
    solution = solve(moments, RIDGE, CEILING, 0, Budget(700, WIDTHS))
    predicted = x @ solution.down @ solution.up + solution.bias
    torch.testing.assert_close(predicted.mean(0), y.mean(0), atol=1e-4, rtol=0)


def test_the_budget_is_kept_and_more_of_it_is_never_worse(moments):
    errors = []
    for weights in range(150, 1700, 50):
        solution = solve(moments, RIDGE, CEILING, 0, Budget(weights, WIDTHS))
        ranks = solution.piece_ranks
        assert FEATURES * max(ranks) + sum(w * r for w, r in zip(WIDTHS, ranks, strict=True)) <= weights
        errors.append(error_of(solution, moments).sum().item())
    assert all(later <= earlier + 1e-9 for earlier, later in zip(errors, errors[1:], strict=False))
    assert errors[-1] == pytest.approx(error_of(solve(moments, RIDGE, CEILING, 0), moments).sum().item())
    assert errors[-1] < 2 * errors[0] < 0


def test_ranks_go_where_they_save_error(moments):
    plain = solve(moments, RIDGE, CEILING, 0, Budget(500, WIDTHS))
    assert plain.piece_ranks[1] > max(plain.piece_ranks[0], plain.piece_ranks[2])
    for heavy in (0, 1, 2):
        weights = torch.full((3,), 1e-2, dtype=torch.float64)
        weights[heavy] = 1
        channels = weights.repeat_interleave(torch.tensor(WIDTHS))
        weighted = solve(moments.weighted(channels), RIDGE, CEILING, 0, Budget(500, WIDTHS))
        before, after = error_of(plain, moments), error_of(weighted, moments)
        assert after[heavy] < before[heavy] and (weights * after).sum() < (weights * before).sum()


def test_no_other_ranks_of_the_grid_at_that_cost_are_better():
    torch.manual_seed(0)
    up = torch.randn(8, 9, dtype=torch.float64) * torch.logspace(0, -2, 8, dtype=torch.float64)[:, None]
    widths, features = [2, 4, 3], 5

    def judge(ranks):
        lost = sum(part[rank:].square().sum() for part, rank in zip(up.split(widths, 1), ranks, strict=True))
        return features * max(ranks) + sum(w * r for w, r in zip(widths, ranks, strict=True)), lost.item()

    everything = [judge(ranks) for ranks in itertools.product(rank_grid(8), repeat=3)]
    for weights in range(14, 120, 7):
        cost, lost = judge(Budget(weights, widths).spend(up, features))
        assert cost <= weights
        assert lost == pytest.approx(min(own for spent, own in everything if spent <= cost))


@pytest.mark.parametrize(("rank", "grid"), [(1, [1]), (7, [*range(1, 8)]), (1024, [*range(64, 1025, 64)])])
def test_ranks_lie_on_a_coarse_grid(rank, grid):
    assert rank_grid(rank) == grid
    assert rank_grid(1000)[-2:] == [960, 1000]


@pytest.fixture(scope="module")
def pair():
    return make_pair()


def fit_within(pair, **options):
    return fit(make_documents(20, 40), **pair, **{**OPTIONS, **options}, progress=False)


@pytest.fixture(scope="module")
def by_share(pair):
    return fit_within(
        pair, flops_share=0.02, piece_weights=[[1000.0, 1.0], [1.0, 1.0], [1.0, 1.0]], key_metric="query"
    )


def test_a_fit_keeps_to_its_share_of_the_prefill(pair, by_share):
    for model in (by_share.translator, by_share.no_source):
        ranks = sum(model.config.piece_ranks, [])
        assert 0.015 < model.plan().flops_share(model.config, 1024) <= 0.02
        assert model.config.rank == max(ranks) <= 24 and min(ranks) < max(ranks)
        assert model.fit_report["piece_ranks"] == model.config.piece_ranks
    assert by_share.translator.config.piece_ranks[0][0] == by_share.translator.config.rank  # what weighs most
    assert by_share.no_source.config.source_layers == []
    assert (by_share.report["flops_share"], by_share.report["max_rank"]) == (0.02, 24)
    assert by_share.report["no_source"]["piece_ranks"] == by_share.no_source.config.piece_ranks
    json.dumps(by_share.report)
    assert by_share.translator.handoff("river stone", **pair).get_seq_length() > 2


def test_a_fit_keeps_to_its_parameters(pair):
    tight, loose = (fit_within(pair, max_parameters=count) for count in (2000, 10**6))
    for model in (tight.translator, tight.no_source):
        assert 1500 < model.num_parameters() <= 2000
    exact = fit_within(pair, max_parameters=tight.translator.num_parameters())
    assert exact.translator.config.key_norms == [0, 1, 2]  # whose gains count too
    assert exact.translator.num_parameters() == tight.translator.num_parameters()
    less = fit_within(pair, max_parameters=tight.translator.num_parameters() - 1)
    assert less.translator.num_parameters() < tight.translator.num_parameters()
    assert loose.translator.config.piece_ranks == [[24, 24]] * 3
    plain, text = fit_within(pair), make_documents(1, 12, seed=5)[0]
    ours, theirs = (own.translator.handoff(text, **pair) for own in (loose, plain))
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own.values, other.values, atol=1e-4, rtol=1e-4)
    assert "max_rank" not in plain.report and "piece_ranks" not in plain.report
    wide = fit_within(pair, max_parameters=3500, rank=1024)  # more than there are features
    assert 2500 < wide.translator.num_parameters() <= 3500
    both = fit_within(pair, max_parameters=2000, flops_share=100.0)
    assert both.translator.config.piece_ranks == tight.translator.config.piece_ranks


def test_a_lost_twin_is_made_anew_within_the_same_budget(pair, by_share, tmp_path):
    save_fit(by_share, tmp_path / "mot")
    loaded = MoTModel.from_pretrained(tmp_path / "mot")
    shutil.rmtree(tmp_path / "mot" / "no_source")
    twin = refit_twin(str(tmp_path / "mot"), loaded, make_documents(20, 40), pair)
    assert twin.plan().flops_share(twin.config, 1024) <= 0.02
    assert twin.fit_report["max_rank"] == 24
    for name, weight in by_share.no_source.state_dict().items():  # of the same text, split in the same way
        torch.testing.assert_close(twin.state_dict()[name], weight, atol=1e-3, rtol=1e-3)
    assert (
        twin.config.rank == by_share.no_source.config.rank > loaded.config.rank
    )  # it reads less, and so affords more


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_parameters": 0}, "`max_parameters` must be more than 0 and finite, got 0"),
        ({"flops_share": -0.1}, "`flops_share` must be more than 0 and finite, got -0.1"),
        ({"flops_share": float("nan")}, "`flops_share` must be more than 0 and finite, got nan"),
        (
            {"max_parameters": 500},
            r"leaves 305 weights to the projections, but 3 channels alone take 681\. Allow more",
        ),
        ({"flops_share": 1e-6}, "leaves 0 weights to the projections"),
        ({"max_parameters": 5000, "rank": None}, "`rank` is None, but a budget needs the most that it may be"),
    ],
    ids=str,
)
def test_impossible_budgets_are_refused_before_the_fit(pair, monkeypatch, options, error):
    monkeypatch.setattr(Statistics, "add", lambda *args: pytest.fail("read the text"))
    with pytest.raises(ValueError, match=error):
        fit_within(pair, **options)


@pytest.mark.parametrize(
    ("given", "count"), [("14M", 14_000_000), ("1.5M", 1_500_000), ("500k", 500_000), ("123456", 123_456)]
)
def test_counts_take_a_suffix(given, count):
    assert _count(given) == count


@pytest.mark.parametrize("given", ["14m", "1.5", "-3", "M", "14 M", "1e6"])
def test_other_counts_are_refused(given):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a number, or one of thousands or millions"):
        _count(given)


def test_fit_within_a_budget_on_the_command_line(pair, by_share, tmp_path, monkeypatch, capsys):
    called = {}
    monkeypatch.setattr("hf_mot.fit.fit", lambda documents, **kwargs: called.update(kwargs) or by_share)
    save_pair(pair, tmp_path)
    (tmp_path / "train.txt").write_text("\n".join(make_documents(4)), encoding="utf-8")
    argv = ["fit", "--source", str(tmp_path / "source"), "--target", str(tmp_path / "target"), "--lines"]
    argv += ["--text", str(tmp_path / "train.txt"), "--out", str(tmp_path / "out"), "--rank", "24"]
    assert main([*argv, "--max-parameters", "2.5k", "--flops-share", "0.2"]) == 0
    assert (called["max_parameters"], called["flops_share"], called["rank"]) == (2500, 0.2, 24)
    assert main([*argv, "--flops-share", "0.2", "--rank", "full", "--overwrite"]) == 1
    assert "`--rank` is full, but a budget needs the most that it may be" in capsys.readouterr().err
    assert main([*argv, "--flops-share", "0.2", "--overwrite"]) == 0
    ranks = by_share.report["piece_ranks"]
    shown = capsys.readouterr().out
    assert f"channels that a piece reads: {min(map(min, ranks))} at least; most: " in shown
    assert f"keys of 0 ({ranks[0][0]})" in shown
