import math
import random

import pytest
import torch

from hf_mot.evaluation.metrics import better_by, bootstrap_means, compare, ratio_of_means


def gaussian(documents, mean, seed):
    return mean + 0.1 * torch.randn(documents, generator=torch.Generator().manual_seed(seed))


def test_metrics_follow_their_definitions():
    nll = {
        "native": torch.tensor([1.0, 2.0, 3.0]),
        "no_context": torch.tensor([3.0, 3.0, 6.0]),
        "translated": torch.tensor([2.0, 2.0, 4.0]),
        "no_source": torch.tensor([2.0, 3.0, 4.5]),
        "wrong_document": torch.tensor([4.0, 5.0, 6.0]),
        "native_wrong_document": torch.tensor([5.0, 6.0, 7.0]),
    }
    # Means: native 2, no_context 4, translated 8/3, no_source 19/6, wrong_document 5, native_wrong_document 6.
    assert compare(nll, "recovery")[0]["value"] == pytest.approx((4 - 8 / 3) / (4 - 2))
    assert compare(nll, "content_recovery")[0]["value"] == pytest.approx((5 - 8 / 3) / (6 - 2))
    assert compare(nll, "source_value")[0]["value"] == pytest.approx((19 / 6 - 8 / 3) / (19 / 6 - 2))
    assert compare(nll, "recovery", "no_source")[0]["value"] == pytest.approx((4 - 19 / 6) / (4 - 2))


def test_a_ratio_of_means_is_not_a_mean_of_ratios():
    figure = ratio_of_means(torch.tensor([1.0, 9.0]), torch.tensor([1.0, 3.0]))
    assert figure["value"] == pytest.approx(10 / 4)


def test_recovery_is_zero_for_no_context_and_one_for_native():
    nll = {"native": gaussian(40, 3, 0), "no_context": gaussian(40, 4, 1)}
    assert compare(nll, "recovery", "no_context")[0] == pytest.approx({"value": 0, "low": 0, "high": 0}, abs=1e-7)
    assert compare(nll, "recovery", "native")[0] == pytest.approx({"value": 1, "low": 1, "high": 1}, abs=1e-7)


def test_bootstrap_of_two_documents_gives_the_three_possible_means():
    means = bootstrap_means(torch.tensor([[1.0, 10.0], [3.0, 30.0]]), resamples=4000)
    values, counts = means[:, 0].unique(return_counts=True)
    assert values.tolist() == [1.0, 2.0, 3.0]
    assert (counts / 4000).tolist() == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    assert torch.equal(means[:, 1], 10 * means[:, 0])  # the columns share each draw


def test_interval_agrees_with_a_bootstrap_written_out():
    numerator, denominator = gaussian(30, 0.8, 2), gaussian(30, 1.0, 3)
    figure = ratio_of_means(numerator, denominator, resamples=2000, seed=0)
    pairs, draw = list(zip(numerator.tolist(), denominator.tolist(), strict=True)), random.Random(7)
    ratios = []
    for _ in range(2000):
        sample = draw.choices(pairs, k=30)
        ratios.append(sum(top for top, _ in sample) / sum(bottom for _, bottom in sample))
    ratios.sort()
    assert figure["low"] == pytest.approx(ratios[50], abs=0.005)
    assert figure["high"] == pytest.approx(ratios[1949], abs=0.005)
    assert figure["low"] < figure["value"] < figure["high"]


def test_bootstrap_is_seeded():
    numerator, denominator = gaussian(20, 0.8, 2), gaussian(20, 1.0, 3)
    assert ratio_of_means(numerator, denominator) == ratio_of_means(numerator, denominator, seed=0)
    assert ratio_of_means(numerator, denominator)["low"] != ratio_of_means(numerator, denominator, seed=1)["low"]


def test_a_metric_without_its_arms_is_absent_without_a_note():
    assert compare({"native": torch.ones(3), "translated": torch.ones(3)}, "recovery") == (None, None)


@pytest.mark.parametrize("no_context", [[1.0, 1.0, 1.0], [2.0, 0.0, 1.1], [0.5, 0.4, 0.3], [math.nan, 2.0, 3.0]])
def test_a_denominator_that_is_not_clearly_positive_gives_a_note(no_context):
    nll = {"native": torch.ones(3), "no_context": torch.tensor(no_context), "translated": torch.ones(3)}
    figure, note = compare(nll, "recovery")
    assert figure is None
    assert "recovery of translated is left out" in note and "not clearly positive over 3 documents" in note


def test_one_document_has_no_interval():
    nll = {"native": torch.ones(1), "no_context": torch.full((1,), 2.0), "translated": torch.ones(1)}
    figure, note = compare(nll, "recovery")
    assert figure is None and "needs at least 2" in note


def test_one_document_is_not_said_to_be_better():
    values = {"translated": torch.ones(2), "no_source": torch.zeros(2)}
    assert better_by(values, seed=0)["better_by"]["no_source"]["value"] == 1
    assert better_by(values, seed=0, clusters=["a", "a"]) == {}
