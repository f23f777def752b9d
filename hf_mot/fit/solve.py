"""Closed-form solutions from moments: ridge strength, reduced-rank regression, choice of source layers.

Everything is in fp64. Shapes: x `[rows, features]`, y `[rows, outputs]`.
"""

from dataclasses import dataclass, replace

import torch

from .ranks import Budget
from .statistics import Moments

RIDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
_SKETCH = 256  # random combinations of outputs that stand for all of them where only an error is needed
_OVERSAMPLING = 32
_POWER_ITERATIONS = 2


@dataclass
class LinearMap:
    """`y = x @ down @ up + bias` in the models' own units; `up` is `None` for a full-rank map. With `piece_ranks`, the
    rows of `up` that a piece does not read are 0. `center`: the mean of `x @ down`, whose channels have a variance of
    1."""

    down: torch.Tensor
    up: torch.Tensor | None
    bias: torch.Tensor
    piece_ranks: list[int] | None = None
    center: torch.Tensor | None = None


def output_sketch(outputs: int, seed: int) -> torch.Tensor:
    """`[outputs, 256]`, random signs: the squared error of `y @ sketch` estimates that of `y`."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (outputs, _SKETCH), generator=generator, dtype=torch.float64)
    return (2 * signs - 1) / _SKETCH**0.5


def choose_ridge(
    moments: Moments, x: torch.Tensor, y: torch.Tensor, seed: int
) -> tuple[float, list[dict[str, float]]]:
    """
    The ridge strength (relative to features of unit variance) with the smallest error on held-out rows, of a full-rank
    map onto random combinations of the outputs.

    Returns:
        `(ridge, curve)`: the curve lists `{"ridge", "error"}`, the error as a share of the outputs' variance.
    """
    sketch = output_sketch(y.shape[1], seed)
    held_x, held_y = moments.normalise(x, y)
    held_y = held_y @ sketch
    right = moments.xy @ sketch
    curve = []
    for ridge in RIDGES:
        weights = torch.cholesky_solve(right, _factor(moments, ridge))
        error = (held_y - held_x @ weights).square().mean() / held_y.square().mean()
        curve.append({"ridge": ridge, "error": error.item()})
        if len(curve) > 1 and curve[-1]["error"] > 1.02 * min(point["error"] for point in curve):
            break
    return min(curve, key=lambda point: point["error"])["ridge"], curve


def solve(
    moments: Moments,
    ridge: float,
    rank: int | None,
    seed: int,
    budget: Budget | None = None,
    read: int | None = None,
) -> LinearMap:
    """
    Ridge regression, cut to `rank` by reduced-rank regression: of all maps through `rank` channels the one with the
    smallest regularised squared error. Its channels are the leading left singular vectors of `L⁻¹ XᵀY` with
    `LLᵀ = XᵀX + λI`, found by a randomised range finder with power iterations (Halko, Martinsson and Tropp, 2011).
    Within a budget, `rank` is the most that a piece may read, and `read` channels (by default all features) are what
    the down-projection costs.
    """
    factor = _factor(moments, ridge)
    whitened = torch.linalg.solve_triangular(factor, moments.xy, upper=False)  # [features, outputs]
    piece_ranks = None
    if rank is None:
        down, up = torch.linalg.solve_triangular(factor.T, whitened, upper=True), None
    else:
        basis = _leading_directions(whitened, rank, seed)
        up = basis.T @ whitened
        if budget is not None:
            piece_ranks = budget.spend(up, len(basis) if read is None else read)
            read = torch.tensor(piece_ranks).repeat_interleave(torch.tensor(budget.widths))  # [outputs]
            up = up[: read.max()] * (torch.arange(read.max())[:, None] < read)
        down = torch.linalg.solve_triangular(factor.T, basis[:, : len(up)], upper=True)
    # From normalised to own units: scales into the weights, means into the bias.
    down = down / moments.x_scale[:, None]
    if up is None:
        down = down * moments.y_scale
        return LinearMap(down, None, moments.y_mean - moments.x_mean @ down)
    up = up * moments.y_scale
    center = moments.x_mean @ down
    return LinearMap(down, up, moments.y_mean - center @ up, piece_ranks, center)


def solve_windowed(
    moments: Moments, source_dim: int, window: int, ridge: float, rank: int, seed: int, budget: Budget | None = None
) -> LinearMap:
    """
    As [`solve`], where the features start with `source_dim` channels of each of `window` tokens, the own one first,
    and those of the tokens before may be read through what the own token is read through alone: `down` of theirs is
    `down` of the own, `[source_dim, rank]`, times something. The channels are those that are best without the tokens
    before, then rotated.
    """
    features = len(moments.xx)
    own = torch.cat([torch.arange(source_dim), torch.arange(window * source_dim, features)])
    through = solve(moments.select(own), ridge, rank, seed).down[:source_dim]
    while True:
        beside = torch.eye(features - window * source_dim, dtype=through.dtype)
        into = torch.block_diag(*[through] * window, beside)
        found = solve(moments.mapped(into), ridge, through.shape[1], seed, budget, len(own))
        chosen = found.down.shape[1]
        if chosen == through.shape[1]:
            return replace(found, down=into @ found.down)
        through = through[:, :chosen]  # what the budget leaves


def _factor(moments: Moments, ridge: float) -> torch.Tensor:
    penalised = moments.xx.clone()
    penalised.diagonal().add_(ridge)
    return torch.linalg.cholesky(penalised)


def _leading_directions(matrix: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """Orthonormal `[rows, rank]` that spans the leading left singular vectors of `matrix`."""
    generator = torch.Generator().manual_seed(seed)
    width = min(rank + _OVERSAMPLING, *matrix.shape)
    basis = matrix @ torch.randn(matrix.shape[1], width, generator=generator, dtype=matrix.dtype)
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(basis)[0]
        basis = matrix @ (matrix.T @ basis)
    basis = torch.linalg.qr(basis)[0]
    within = basis.T @ matrix
    vectors = torch.linalg.eigh(within @ within.T)[1]  # ascending; a matrix of the sketch's width only
    return basis @ vectors.flip(1)[:, :rank]


def choose_layers(blocks: list[torch.Tensor], base: torch.Tensor, y: torch.Tensor, count: int) -> list[int]:
    """
    Greedy forward selection: one source layer after the other, each time the one that lowers the held-out error of a
    ridge regression most, beside `base`. The last quarter of the rows is held out.

    Args:
        blocks (`list[torch.Tensor]`): Per source layer its (projected) normalised features `[rows, width]`.
        base (`torch.Tensor`): Features that are always read, `[rows, base width]`.
        y (`torch.Tensor`): (Projected) normalised outputs.
        count (`int`): Layers to choose.
    """
    width, start = blocks[0].shape[1], base.shape[1]
    x = torch.cat([base, *blocks], 1).double()
    y = y.double()
    cut = len(x) * 3 // 4
    x, y = x - x[:cut].mean(0), y - y[:cut].mean(0)
    xx, xy = x[:cut].T @ x[:cut] / cut, x[:cut].T @ y[:cut] / cut
    held_xx, held_xy = x[cut:].T @ x[cut:], x[cut:].T @ y[cut:]
    xx.diagonal().add_(1e-2)
    chosen: list[int] = []
    columns = torch.arange(start)
    for _ in range(min(count, len(blocks))):
        errors = {}
        for layer_idx in set(range(len(blocks))) - set(chosen):
            own = torch.arange(start + layer_idx * width, start + (layer_idx + 1) * width)
            tried = torch.cat([columns, own])
            weights = torch.cholesky_solve(xy[tried], torch.linalg.cholesky(xx[tried][:, tried]))
            fitted = held_xx[tried][:, tried] @ weights
            errors[layer_idx] = (weights * (fitted - 2 * held_xy[tried])).sum().item()
        best = min(errors, key=errors.get)
        chosen.append(best)
        columns = torch.cat([columns, torch.arange(start + best * width, start + (best + 1) * width)])
    return sorted(chosen)
