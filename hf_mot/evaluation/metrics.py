"""Figures that compare arms: means, differences and ratios of means, each with a bootstrap interval over documents."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

RESAMPLES = 2000
LEVEL = 0.95

# metric: (a, (b, c)). The metric of an arm x is mean(a - x) / mean(b - c) over the documents' NLLs.
METRICS = {
    "recovery": ("no_context", ("no_context", "native")),
    "content_recovery": ("wrong_document", ("native_wrong_document", "native")),
    "source_value": ("no_source", ("no_source", "native")),
}
# What a translation is compared with; the gate asks for the middle three.
COMPARED = ("no_context", "wrong_document", "wrong_source", "no_source", "target_layers_only")


def bootstrap_means(
    values: torch.Tensor, resamples: int = RESAMPLES, seed: int = 0, clusters: Sequence[Hashable] | None = None
) -> torch.Tensor:
    """
    Means of `values` over resampled documents, drawn with replacement. All columns share each draw, so that a
    difference or ratio of two columns stays paired.

    Args:
        values (`torch.Tensor` of shape `(rows, columns)`): One figure a row and column.
        resamples (`int`, *optional*, defaults to 2000): Number of draws.
        seed (`int`, *optional*, defaults to 0): Seed of the draws.
        clusters (`Sequence`, *optional*): The document of each row, where one has several: its rows are drawn
            together. By default each row is a document.

    Returns:
        `torch.Tensor` of shape `(resamples, columns)`, fp64.
    """
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters or range(len(values))))}
    documents = len(numbers)
    sums, sizes = values.double(), torch.ones(documents, dtype=torch.float64)
    if documents < len(values):
        index = torch.tensor([numbers[cluster] for cluster in clusters])
        sums = torch.zeros(documents, values.shape[1], dtype=torch.float64).index_add_(0, index, sums)
        sizes = torch.bincount(index).double()
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(documents, (resamples, documents), generator=generator)
    # Multiplicities instead of a gather: [resamples, documents] is all that is ever held.
    counts = torch.zeros(resamples, documents, dtype=torch.float64)
    counts.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
    return counts @ sums / (counts @ sizes)[:, None]


def count_documents(values: torch.Tensor, clusters: Sequence[Hashable] | None = None) -> int:
    """How many documents the rows are of. An interval over fewer than 2 says nothing."""
    return len(values) if clusters is None else len(set(clusters))


def interval(means: torch.Tensor) -> tuple[float, float]:
    """The ends of the percentile interval of resampled figures `(resamples,)`."""
    tail = (1 - LEVEL) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def mean_with_interval(
    values: torch.Tensor, seed: int = 0, clusters: Sequence[Hashable] | None = None
) -> dict[str, float]:
    """
    The mean with its bootstrap interval over documents; of differences of two arms, the paired one.

    Args:
        values (`torch.Tensor` of shape `(rows,)`): One figure a row.
        seed (`int`, *optional*, defaults to 0): Seed of the draws.
        clusters (`Sequence`, *optional*): As in `bootstrap_means`.

    Returns:
        `dict`: `value`, and `low` and `high`, the ends of the 95 % interval.
    """
    low, high = interval(bootstrap_means(values[:, None], seed=seed, clusters=clusters)[:, 0])
    return {"value": values.double().mean().item(), "low": low, "high": high}


def ratio_of_means(
    numerator: torch.Tensor,
    denominator: torch.Tensor,
    resamples: int = RESAMPLES,
    seed: int = 0,
    clusters: Sequence[Hashable] | None = None,
) -> dict[str, float]:
    """
    mean(`numerator`) / mean(`denominator`) with its percentile bootstrap interval over documents, the ratio computed
    anew in each resample.

    Args:
        numerator (`torch.Tensor` of shape `(rows,)`): One figure a row: a document, or a window or question of one of
            `clusters`.
        denominator (`torch.Tensor` of shape `(rows,)`): Likewise, in the same order.
        resamples (`int`, *optional*, defaults to 2000): Number of draws.
        seed (`int`, *optional*, defaults to 0): Seed of the draws.
        clusters (`Sequence`, *optional*): As in `bootstrap_means`.

    Returns:
        `dict`: `value`, and `low` and `high`, the ends of the 95 % interval.

    Raises:
        ValueError: With fewer than two documents, or where the denominator is not positive in each resample (the ratio
            would mean nothing there).
    """
    documents = count_documents(numerator, clusters)
    if documents < 2:
        raise ValueError(f"an interval over documents needs at least 2 of them, got {documents}")
    means = bootstrap_means(torch.stack([numerator, denominator], dim=1), resamples, seed, clusters)
    if not means[:, 1].min() > 0:
        low, high = interval(means[:, 1])
        raise ValueError(
            f"the denominator ({denominator.double().mean():.4f} nats, 95 % interval {low:.4f} to {high:.4f}) is not "
            f"clearly positive over {documents} documents"
        )
    low, high = interval(means[:, 0] / means[:, 1])
    value = numerator.double().mean() / denominator.double().mean()
    return {"value": value.item(), "low": low, "high": high}


def compare(
    nll: dict[str, torch.Tensor],
    metric: str,
    arm: str = "translated",
    seed: int = 0,
    clusters: Sequence[Hashable] | None = None,
) -> tuple[dict[str, float] | None, str | None]:
    """
    One metric of one arm, or the reason why it cannot be had.

    - *recovery*: (no_context - x) / (no_context - native), what of the context's worth the arm keeps;
    - *content_recovery*: (wrong_document - x) / (native_wrong_document - native), the same against a context of
      the right form and the wrong content;
    - *source_value*: (no_source - x) / (no_source - native), what the source adds to the target's own embeddings.

    Args:
        nll (`dict[str, torch.Tensor]`): Per arm the NLL of each window in nats, shape `(rows,)`.
        metric (`str`): A key of `METRICS`.
        arm (`str`, *optional*, defaults to `"translated"`): The arm x.
        seed (`int`, *optional*, defaults to 0): Seed of the draws.
        clusters (`Sequence`, *optional*): As in `bootstrap_means`.

    Returns:
        `tuple`: `(figure, None)` with a figure as `ratio_of_means` gives it; `(None, note)` where the ratio is not
        defined; `(None, None)` where an arm that it needs was not measured.
    """
    reference, (worst, best) = METRICS[metric]
    if not {arm, reference, worst, best} <= nll.keys():
        return None, None
    try:
        shares = ratio_of_means(nll[reference] - nll[arm], nll[worst] - nll[best], seed=seed, clusters=clusters)
        return shares, None
    except ValueError as error:
        return None, f"{metric} of {arm} is left out: {error}."


def better_by(
    values: Mapping[str, torch.Tensor], seed: int, clusters: Sequence[Hashable] | None = None, sign: int = 1
) -> dict[str, Any]:
    """By how much `translated` is better than each control, paired; `sign` -1 where less is better. Of one document
    that cannot be told."""
    if "translated" not in values or count_documents(values["translated"], clusters) < 2:
        return {}
    found = {
        arm: mean_with_interval(sign * (values["translated"] - values[arm]), seed, clusters)
        for arm in COMPARED
        if arm in values
    }
    return {"better_by": found} if found else {}
