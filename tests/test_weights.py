"""Fits that weigh errors: by piece, from a sensitivity, and by what the target's queries make of keys."""

import pytest
import torch
from conftest import make_documents, make_own, make_pair
from transformers import BloomConfig, BloomForCausalLM

from hf_mot.capture_mot import prefill
from hf_mot.contract_mot import describe_model
from hf_mot.fit import fit, loss_weights, piece_weights
from hf_mot.fit.key_metric import KeyMetric, QueryMoments, listening_to_queries
from hf_mot.fit.solve import solve
from hf_mot.fit.statistics import Statistics
from hf_mot.fit.weights import channel_weights, output_blocks
from hf_mot.geometry_mot import ModelGeometry, probe

OPTIONS = {"num_source_layers": 2, "embedding_window": 2, "max_tokens": 1500, "held_out_documents": 3}


def make_rows(rows=2000, features=30, outputs=24):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, features, generator=generator)
    y = x @ torch.randn(features, outputs, generator=generator) + 4
    return x, y + torch.randn(rows, outputs, generator=generator)


def moments_of(x, y, blocks):
    statistics = Statistics(blocks)
    statistics.add(x, y)
    return statistics.moments()


def predict(solution, x):
    inner = x.double() @ solution.down
    return (inner if solution.up is None else inner @ solution.up) + solution.bias


def test_weights_of_one_change_nothing():
    moments = moments_of(*make_rows(), [8, 16])
    plain, ones = (solve(m, 1e-3, 4, seed=0) for m in (moments, moments.weighted(torch.ones(24).double())))
    assert torch.equal(plain.down, ones.down) and torch.equal(plain.up, ones.up) and torch.equal(plain.bias, ones.bias)


def test_full_rank_is_the_same_for_any_weights():
    x, y = make_rows()
    moments, weights = moments_of(x, y, [8, 16]), torch.logspace(-3, 3, 24).double()
    plain, weighted = (solve(m, 1e-2, None, seed=0) for m in (moments, moments.weighted(weights)))
    torch.testing.assert_close(predict(weighted, x), predict(plain, x), atol=1e-8, rtol=0)


@pytest.mark.parametrize("rank", [1, 3, 10])
@pytest.mark.parametrize("heavy", [0, 1])
def test_a_low_rank_is_spent_on_what_weighs(rank, heavy):
    x, y = make_rows()
    blocks = [8, 16]
    moments = moments_of(x, y, blocks)
    weights = torch.ones(24).double()
    weights.split(blocks)[heavy][:] = 50.0

    def errors(solution):
        return ((predict(solution, x) - y) / moments.y_scale).square().mean(0)

    plain = errors(solve(moments, 1e-10, rank, seed=0))
    weighted = errors(solve(moments.weighted(weights), 1e-10, rank, seed=0))
    assert (weighted * weights).sum() <= (plain * weights).sum() * (1 + 1e-9)
    assert weighted.sum() >= plain.sum() * (1 - 1e-9)
    assert weighted.split(blocks)[heavy].sum() < plain.split(blocks)[heavy].sum()


def make_sensitivity(contract, costs: dict, unexplained: float = 0.5, key: str = "lost") -> dict:
    pieces = [(layer_idx, states) for layer_idx in range(3) for states in ("keys", "values")]
    measured = [
        {"layer": layer, "states": states, key: {"value": costs.get((layer, states), 0.0)}} for layer, states in pieces
    ]
    return {
        "target_fingerprint": contract["fingerprint"],
        "measures": {"context_nll": {key: {"value": sum(costs.values())}, "pieces": measured}},
        "unexplained": [{"layer": layer, "states": states, "value": unexplained} for layer, states in pieces],
    }


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def contract(pair):
    return describe_model(pair["target"], pair["target_tokenizer"])


def test_pieces_weigh_their_cost_per_unexplained_variance(contract):
    costs = {(0, "keys"): 0.4, (1, "keys"): 0.1, (1, "values"): 0.2, (2, "values"): 0.1}
    sensitivity = make_sensitivity(contract, costs)
    sensitivity["unexplained"][2]["value"] = 0.1  # keys of layer 1
    weights = piece_weights(sensitivity, contract)
    assert weights[1][0] / weights[0][0] == pytest.approx(0.1 / 0.1 / (0.4 / 0.5))
    assert weights[1][1] / weights[0][0] == pytest.approx(0.5)
    assert weights[2][0] / weights[0][0] == pytest.approx(0.1 * (0.8 / 6) / 0.4)  # a tenth of the mean cost
    geometry = ModelGeometry.from_dict(contract["geometry"])
    assert channel_weights(weights, geometry).mean().item() == pytest.approx(1)
    root = piece_weights(sensitivity, contract, power=0.5)
    assert root[1][1] / root[0][0] == pytest.approx(0.5**0.5)
    assert piece_weights(sensitivity, contract, power=0) == [[1.0, 1.0]] * 3


def test_losses_weigh_pieces_by_what_a_unit_of_their_variance_costs(contract):
    sensitivity = make_sensitivity(contract, {(0, "keys"): 0.4, (1, "keys"): 0.1, (1, "values"): 0.2})
    sensitivity["unexplained"][2]["value"] = 0.1  # keys of layer 1
    weights = loss_weights(sensitivity, contract)
    assert weights[1][0] / weights[0][0] == pytest.approx(0.1 / 0.1 / (0.4 / 0.5))
    assert weights[1][1] / weights[0][0] == pytest.approx(0.5)
    assert sum(map(sum, weights)) == pytest.approx(6)
    assert loss_weights(sensitivity, contract, power=0) == [(1.0, 1.0)] * 3
    with pytest.raises(ValueError, match="`sensitivity_power` must be at least 0, got -1"):
        loss_weights(sensitivity, contract, power=-1)


def test_costs_are_averaged_over_measures(contract):
    both = make_sensitivity(contract, {(0, "keys"): 0.4})
    both["measures"]["squad"] = make_sensitivity(contract, {(0, "values"): 0.2, (0, "keys"): 0.0})["measures"][
        "context_nll"
    ]
    weights = piece_weights(both, contract)
    assert weights[0][1] / weights[0][0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("change", "power", "message"),
    [
        ({"target_fingerprint": {"float32": "0"}}, 1, "`sensitivity` was measured on another target"),
        ({"measures": ...}, 1, "`sensitivity` lacks measures. Pass what hf-mot analyze"),
        (
            {"measures": {"squad": {"lost": {}, "pieces": []}}},
            1,
            r"`sensitivity` lacks the target's layers \[0, 1, 2\]",
        ),
        ({"unexplained": []}, 1, r"`sensitivity` lacks the target's layers \[0, 1, 2\]"),
        ({}, -1, "`sensitivity_power` must be at least 0, got -1"),
        ({}, 1, "`sensitivity` finds no cost in any piece"),
    ],
)
def test_a_sensitivity_that_cannot_be_used_is_refused(contract, change, power, message):
    sensitivity = {**make_sensitivity(contract, {(0, "keys"): -0.1}), **change}
    sensitivity = {key: value for key, value in sensitivity.items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        piece_weights(sensitivity, contract, power)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"piece_weights": [[1, 1]]}, r"`piece_weights` must hold \[keys, values\] for each of 3 layers"),
        ({"piece_weights": [[1, 0]] * 3}, "`piece_weights` must be positive and finite"),
        ({"key_metric": "qeury"}, "`key_metric` must be one of plain, query, got 'qeury'"),
    ],
)
def test_bad_arguments_of_a_fit_are_named(pair, change, message):
    with pytest.raises(ValueError, match=message):
        fit(make_documents(4), **pair, progress=False, **change)


def test_a_fit_records_its_weights_and_its_twin_has_them(pair):
    weights = [[30.0, 1.0], [1.0, 1.0], [1.0, 2.0]]
    result = fit(
        make_documents(20), **pair, **OPTIONS, rank=6, piece_weights=weights, key_metric="query", progress=False
    )
    for report in (result.report, result.no_source.fit_report):
        assert report["piece_weights"] == weights and report["key_metric"] == "query"
    plain = fit(make_documents(20), **pair, **OPTIONS, rank=6, progress=False)
    assert "piece_weights" not in plain.report and "key_metric" not in plain.report
    own = {name: pair[name] for name in ("target", "target_tokenizer")}
    text = make_documents(1, seed=7)[0]

    def first_keys(model, **models):
        return model.handoff(text, **models).layers[0].keys[:, :, 1:]

    native = prefill(pair["target"], pair["target_tokenizer"](text, return_tensors="pt")["input_ids"]).layers[0].keys
    native = native[:, :, 1:]
    for weighted, other, models in (
        (result.translator, plain.translator, pair),
        (result.no_source, plain.no_source, own),
    ):
        error, before = ((first_keys(model, **models) - native).norm() for model in (weighted, other))
        assert error < before


def test_outputs_come_back_from_the_metrics_coordinates(pair):
    geometry = probe(pair["target"])
    torch.manual_seed(0)
    factors = [torch.randn(layer.kv_heads, layer.key_dim, layer.key_dim) for layer in geometry.layers]
    metric = KeyMetric(geometry, [own @ own.mT for own in factors])
    x, y = make_rows(outputs=sum(output_blocks(geometry)))
    turned = metric.apply(y)
    key_dim = geometry.layers[0].key_dim
    assert not torch.allclose(turned[:, :key_dim], y[:, :key_dim], atol=0.1)
    torch.testing.assert_close(
        turned[:, key_dim : 2 * key_dim], y[:, key_dim : 2 * key_dim]
    )  # values are as they were
    for rank in (None, y.shape[1]):
        plain = solve(moments_of(x, y, output_blocks(geometry)), 1e-10, rank, seed=0)
        ours = metric.undo(solve(moments_of(x, turned, output_blocks(geometry)), 1e-10, rank, seed=0))
        torch.testing.assert_close(predict(ours, x), predict(plain, x), atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_the_metric_is_the_expected_squared_error_of_scores(family):
    """Against all pairs of a query and a key that it sees, written out with the keys' positions put on."""
    model = make_own(family)["target"]
    geometry = probe(model)
    ids, mask = torch.randint(3, 250, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[0, :5] = 0
    seen: dict[int, tuple] = {}
    with listening_to_queries(model, lambda layer_idx, queries, window: seen.update({layer_idx: (queries, window)})):
        prefill(model, ids, mask)
    moments = QueryMoments(geometry, prefix=1)
    for _ in range(150):
        moments.add(model, ids, mask)
    for layer_idx, layer in enumerate(geometry.layers):
        queries, window = seen[layer_idx]
        window = window or 1000
        error = torch.randn(layer.kv_heads, layer.key_dim, generator=torch.Generator().manual_seed(1))
        expected, count = torch.zeros(layer.kv_heads), 0
        for row, pads in ((0, 5), (1, 0)):
            for query in range(1, 24 - pads):
                past = torch.arange(max(1, query - window + 1), query + 1)
                keys = error[None, :, None].expand(1, -1, len(past), -1)
                keys, _ = geometry.apply_positions(layer_idx, keys, keys, past[None])
                own = queries[row, :, pads + query].view(layer.kv_heads, -1, layer.key_dim)
                scores = torch.einsum("ghd,gjd->ghj", own, keys[0])
                expected += scores.square().sum(1).mean(1)
                count += 1
        found = torch.einsum("gd,gde,ge->g", error.double(), moments.sums[layer_idx] / 150, error.double())
        assert count == 18 + 23
        torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0)


def test_listening_changes_nothing_and_ends():
    model = make_own("gemma3")["target"]
    ids = torch.randint(3, 250, (1, 30))
    expected, before = model(ids).logits, model.config._attn_implementation
    heard = []
    with torch.no_grad(), listening_to_queries(model, lambda *shown: heard.append(shown[0])):
        torch.testing.assert_close(model(ids).logits, expected)
    assert heard == [0, 1, 2]
    with pytest.raises(RuntimeError, match="stop"), listening_to_queries(model, print):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == before
    torch.testing.assert_close(model(ids).logits, expected)


def test_a_target_that_does_not_show_its_queries_is_refused():
    config = BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4)
    model = BloomForCausalLM(config).eval()
    moments = QueryMoments(probe(model), prefix=0)
    moments.add(model, torch.randint(3, 250, (1, 8)), torch.ones(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match=r"target's layers \[0, 1\] do not run through the attention interface"):
        moments.metric()
