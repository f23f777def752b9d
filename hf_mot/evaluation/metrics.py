"""Figures that compare arms: ratios of means over documents, each with a bootstrap interval over documents."""

import torch

RESAMPLES = 2000
LEVEL = 0.95

# metric: (a, (b, c)). The metric of an arm x is mean(a - x) / mean(b - c) over the documents' NLLs.
METRICS = {
    "recovery": ("no_context", ("no_context", "native")),
    "content_recovery": ("wrong_document", ("native_wrong_document", "native")),
    "source_value": ("no_source", ("no_source", "native")),
}


def bootstrap_means(values: torch.Tensor, resamples: int = RESAMPLES, seed: int = 0) -> torch.Tensor:
    """
    Means of `values` over resampled documents, drawn with replacement. All columns share each draw, so that a ratio of
    two columns stays paired.

    Args:
        values (`torch.Tensor` of shape `(documents, columns)`): One figure a document and column.
        resamples (`int`, *optional*, defaults to 2000): Number of draws.
        seed (`int`, *optional*, defaults to 0): Seed of the draws.

    Returns:
        `torch.Tensor` of shape `(resamples, columns)`, fp64.
    """
    documents = len(values)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(documents, (resamples, documents), generator=generator)
    # Multiplicities instead of a gather: [resamples, documents] is all that is ever held.
    counts = torch.zeros(resamples, documents, dtype=torch.float64)
    counts.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
    return counts @ values.double() / documents


def ratio_of_means(
    numerator: torch.Tensor, denominator: torch.Tensor, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, float]:
    """
    mean(`numerator`) / mean(`denominator`) with its percentile bootstrap interval over documents, the ratio computed
    anew in each resample.

    Args:
        numerator (`torch.Tensor` of shape `(documents,)`): One figure a document.
        denominator (`torch.Tensor` of shape `(documents,)`): One figure a document, in the same order.
        resamples (`int`, *optional*, defaults to 2000): Number of draws.
        seed (`int`, *optional*, defaults to 0): Seed of the draws.

    Returns:
        `dict`: `value`, and `low` and `high`, the ends of the 95 % interval.

    Raises:
        ValueError: With fewer than two documents, or where the denominator is not positive in each resample (the ratio
            would mean nothing there).
    """
    if len(numerator) < 2:
        raise ValueError(f"an interval over documents needs at least 2 of them, got {len(numerator)}")
    means = bootstrap_means(torch.stack([numerator, denominator], dim=1), resamples, seed)
    tail = (1 - LEVEL) / 2
    quantiles = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    if not means[:, 1].min() > 0:
        low, high = torch.quantile(means[:, 1], quantiles).tolist()
        raise ValueError(
            f"the denominator ({denominator.double().mean():.4f} nats, 95 % interval {low:.4f} to {high:.4f}) is not "
            f"clearly positive over {len(denominator)} documents"
        )
    low, high = torch.quantile(means[:, 0] / means[:, 1], quantiles).tolist()
    value = numerator.double().mean() / denominator.double().mean()
    return {"value": value.item(), "low": low, "high": high}


def compare(
    nll: dict[str, torch.Tensor], metric: str, arm: str = "translated", resamples: int = RESAMPLES, seed: int = 0
) -> tuple[dict[str, float] | None, str | None]:
    """
    One metric of one arm, or the reason why it cannot be had.

    - *recovery*: (no_context - x) / (no_context - native), what of the context's worth the arm keeps;
    - *content_recovery*: (wrong_document - x) / (native_wrong_document - native), the same against a context of
      the right form and the wrong content;
    - *source_value*: (no_source - x) / (no_source - native), what the source adds to the target's own embeddings.

    Args:
        nll (`dict[str, torch.Tensor]`): Per arm the NLL of each document in nats, shape `(documents,)`.
        metric (`str`): A key of `METRICS`.
        arm (`str`, *optional*, defaults to `"translated"`): The arm x.
        resamples (`int`, *optional*, defaults to 2000): Number of bootstrap draws.
        seed (`int`, *optional*, defaults to 0): Seed of the draws.

    Returns:
        `tuple`: `(figure, None)` with a figure as `ratio_of_means` gives it; `(None, note)` where the ratio is not
        defined; `(None, None)` where an arm that it needs was not measured.
    """
    reference, (worst, best) = METRICS[metric]
    if not {arm, reference, worst, best} <= nll.keys():
        return None, None
    try:
        return ratio_of_means(nll[reference] - nll[arm], nll[worst] - nll[best], resamples, seed), None
    except ValueError as error:
        return None, f"{metric} of {arm} is left out: {error}."
