"""The source window: what the tokens before add, read through the own token's channels, in closed form and at run."""

import pytest
import torch
from conftest import make_documents, make_pair, make_translator

from hf_mot import MoTConfig, MoTModel
from hf_mot.fit import fit
from hf_mot.fit.ranks import Budget
from hf_mot.fit.solve import solve, solve_windowed
from hf_mot.fit.statistics import Statistics
from hf_mot.rows_mot import causal_window
from hf_mot.translators_linear_mot import ReducedRankTranslator
from hf_mot.translators_mot import translator_flops

SOURCE, BESIDE, WIDTHS = 12, 6, [8, 16]
OPTIONS = {"rank": 16, "source_layers": [0, 2], "embedding_window": 2, "held_out_documents": 3, "progress": False}


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def moments():
    """Outputs that depend on the token before by what they read of the own one."""
    generator = torch.Generator().manual_seed(0)
    own, before, beside = (torch.randn(4000, width, generator=generator) for width in (SOURCE, SOURCE, BESIDE))
    read = torch.randn(SOURCE, 3, generator=generator)
    inner = torch.cat([own @ read, before @ read, beside], dim=1)
    outputs = inner @ torch.randn(inner.shape[1], sum(WIDTHS), generator=generator)
    statistics = Statistics(WIDTHS)
    statistics.add(torch.cat([own, before, beside], dim=1) + 2, outputs + torch.randn(outputs.shape) + 5)
    return statistics.moments()


def error_of(solution, moments) -> float:
    down, up = solution.down * moments.x_scale[:, None], solution.up / moments.y_scale
    map_ = down @ up
    return ((map_ * (moments.xx @ map_)).sum() - 2 * (map_ * moments.xy).sum()).item()


def test_moments_of_combinations_are_those_of_combined_rows():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(500, 5, generator=generator) * 3 + 1, torch.randn(500, 4, generator=generator)
    into = torch.randn(5, 3, generator=generator)
    found = []
    for features in (x, x @ into):
        statistics = Statistics([4])
        statistics.add(features, y)
        found.append(statistics.moments())
    mapped, direct = found[0].mapped(into), found[1]
    for name in ("xx", "xy", "x_mean", "x_scale"):
        torch.testing.assert_close(getattr(mapped, name), getattr(direct, name), atol=1e-5, rtol=1e-5)


def test_tokens_before_add_what_a_low_rank_of_all_features_would(moments):
    rank, ridge = 12, 1e-6
    windowed = solve_windowed(moments, SOURCE, 2, ridge, rank, 0)
    free = solve(moments, ridge, rank, 0)
    without = solve(
        moments.select(torch.cat([torch.arange(SOURCE), torch.arange(2 * SOURCE, 2 * SOURCE + BESIDE)])),
        ridge,
        rank,
        0,
    )
    full = torch.zeros(2 * SOURCE + BESIDE, rank, dtype=torch.float64)
    full[:SOURCE], full[2 * SOURCE :] = without.down[:SOURCE], without.down[SOURCE:]
    without.down = full
    spread = error_of(without, moments) - error_of(free, moments)
    assert spread > 0
    assert error_of(windowed, moments) - error_of(free, moments) < 0.02 * spread


def test_states_before_are_in_the_span_of_the_own_ones(moments):
    down = solve_windowed(moments, SOURCE, 2, 1e-3, 7, 0).down
    own, before = down[:SOURCE], down[SOURCE : 2 * SOURCE]
    through = torch.linalg.lstsq(own, before).solution
    torch.testing.assert_close(own @ through, before, atol=1e-8, rtol=1e-6)


def test_budget_pays_for_the_tokens_before(moments):
    budget = Budget(500, WIDTHS, source_window=2)
    found = solve_windowed(moments, SOURCE, 2, 1e-3, 12, 0, budget)
    rank = found.down.shape[1]
    spent = rank * (SOURCE + BESIDE) + rank**2 + sum(r * w for r, w in zip(found.piece_ranks, WIDTHS, strict=True))
    assert max(found.piece_ranks) == rank and 400 < spent <= 500


def test_window_reads_what_came_before_and_never_pads():
    torch.manual_seed(0)
    module = ReducedRankTranslator(6, 4, 10, 5, source_window=3)
    source, embeddings = torch.randn(1, 7, 6), torch.randn(1, 7, 4)
    whole = module(source, embeddings)
    inner = module.source_in(source)
    before = torch.nn.functional.pad(inner, (0, 0, 2, 0))
    expected = inner + module.source_before(torch.cat([before[:, 1:-1], before[:, :-2]], dim=-1))
    expected = module.up(expected + module.embedding_in(embeddings))
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(module(source[:, :4], embeddings[:, :4]), whole[:, :4])  # causal
    pads = torch.full((1, 2, 6), 7.0), torch.full((1, 2, 4), 7.0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
    padded = module(torch.cat([pads[0], source], 1), torch.cat([pads[1], embeddings], 1), mask)
    torch.testing.assert_close(padded[:, 2:], whole)


def test_fit_with_the_tokens_before_is_the_solution_at_run(pair):
    """Where the token before counts, held-out states come out better, and the module gives what was solved."""
    documents, text = make_documents(40, 60), make_documents(1, 60, seed=8)[0]
    native = MoTModel.identity(pair["target"], pair["target_tokenizer"]).handoff(
        text, **{**pair, "source": pair["target"], "source_tokenizer": pair["target_tokenizer"]}
    )
    errors = {}
    for window in (1, 2):
        found = fit(documents, **pair, **OPTIONS, max_tokens=5000, source_window=window)
        cache = found.translator.handoff(text, **pair)
        layers = zip(cache.layers, native.layers, strict=True)
        errors[window] = sum(
            (own.values[:, :, 1:] - ref.values[:, :, 1:]).square().sum().item() for own, ref in layers
        )
        assert found.translator.config.source_window == window
        assert found.no_source.config.source_window == 1
    assert errors[2] < errors[1]


def test_padded_rows_give_what_each_gives_alone(pair):
    mot = make_translator(pair)
    config = {**mot.config.to_dict(), "source_window": 2}
    torch.manual_seed(0)
    mot = MoTModel(MoTConfig(**{k: v for k, v in config.items() if k in MoTConfig().to_dict()})).eval()
    torch.nn.init.normal_(mot.translator.source_before.weight)
    texts = [make_documents(1, 20)[0], make_documents(1, 9, seed=3)[0]]
    both = mot.handoff(texts, **pair)
    for row, text in enumerate(texts):
        alone = mot.handoff(text, **pair)
        length = alone.layers[0].keys.shape[2]
        for ours, theirs in zip(both.layers, alone.layers, strict=True):
            torch.testing.assert_close(ours.values[row, :, -length:], theirs.values[0], atol=1e-5, rtol=1e-4)


def test_cost_counts_the_tokens_before(pair):
    config = make_translator(pair).config
    before = translator_flops(config, 100)
    config.source_window = 3
    assert translator_flops(config, 100) - before == 2 * 100 * 2 * config.rank**2


def test_window_of_a_full_rank_map_is_refused(pair):
    with pytest.raises(ValueError, match="`source_window` must be 1 or more tokens, got 0"):
        MoTConfig(source_window=0)
    with pytest.raises(ValueError, match="`source_window` needs a linear map of low rank"):
        MoTConfig(source_window=2)
    with pytest.raises(ValueError, match="`rank` is None, but a `source_window` of 2 needs one"):
        fit(make_documents(4), **pair, **{**OPTIONS, "rank": None}, source_window=2)
    with pytest.raises(ValueError, match="`source_window` must be at least 1, got 0"):
        fit(make_documents(4), **pair, **OPTIONS, source_window=0)


def test_window_of_one_equals_no_window():
    states, mask = torch.randn(2, 5, 3), torch.tensor([[0, 1, 1, 1, 1], [1] * 5])
    torch.testing.assert_close(causal_window(states, mask, 1), states * mask[..., None])
