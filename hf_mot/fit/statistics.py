"""Streaming second moments of features and outputs: memory depends on their widths, not on the number of tokens."""

from dataclasses import dataclass

import torch

BLOCK_ROWS = 4096  # tokens a Gram; fixed, so that the result does not depend on how the batches were split
_TILE = 1024
_SUMS = ("x_shift", "y_shift", "x_scale", "y_scale", "x_sum", "y_sum", "y_square", "xx", "xy")


@dataclass
class Moments:
    """
    Second moments over `count` tokens of normalised features and outputs, `(value - mean) / scale`, in fp64.

    Args:
        xx (`torch.Tensor`): Feature covariance `[features, features]`; features have unit variance.
        xy (`torch.Tensor`): Feature-output covariance `[features, outputs]`.
        x_mean, x_scale, y_mean, y_scale (`torch.Tensor`): The normalisation, in the models' own units.
    """

    count: int
    xx: torch.Tensor
    xy: torch.Tensor
    x_mean: torch.Tensor
    x_scale: torch.Tensor
    y_mean: torch.Tensor
    y_scale: torch.Tensor

    def select(self, columns: torch.Tensor) -> "Moments":
        """The moments of some features alone."""
        features = (self.xx[columns][:, columns], self.xy[columns], self.x_mean[columns], self.x_scale[columns])
        return Moments(self.count, *features, self.y_mean, self.y_scale)

    def mapped(self, into: torch.Tensor) -> "Moments":
        """The moments of linear combinations of the features, `features @ into` in the models' own units."""
        own = into.double() * self.x_scale[:, None]
        covariance = own.T @ self.xx @ own
        scale = covariance.diagonal().sqrt().clamp(min=1e-12)
        covariance = covariance / scale / scale[:, None]
        features = (covariance, own.T @ self.xy / scale[:, None], self.x_mean @ into.double(), scale)
        return Moments(self.count, *features, self.y_mean, self.y_scale)

    def weighted(self, weights: torch.Tensor) -> "Moments":
        """The moments with outputs in units in which their plain squared error is the one weighted by `weights`
        `[outputs]`; what is solved from them comes in the models' own units as before."""
        roots = weights.sqrt()
        outputs = (self.y_mean, self.y_scale / roots)
        return Moments(self.count, self.xx, self.xy * roots, self.x_mean, self.x_scale, *outputs)

    def normalise(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows in these units."""
        return (x.double() - self.x_mean) / self.x_scale, (y.double() - self.y_mean) / self.y_scale


class Statistics:
    """
    Accumulates [`Moments`]: fp32 Grams of 4,096 tokens each, added into fp64. The values are shifted and scaled first,
    by the mean and deviation of the first 4,096, so that fp32 loses nothing to large means; the exact ones are put in
    at the end, so that the result depends on the set of rows alone.

    Args:
        blocks (`list[int]`): Widths of the outputs' blocks (a layer's keys, its values, …); each block is scaled to a
            mean variance of 1, so that no layer drowns the others.
    """

    def __init__(self, blocks: list[int]):
        self.blocks = blocks
        self.count = 0
        self._x: list[torch.Tensor] = []
        self._y: list[torch.Tensor] = []

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds rows `[rows, features]`, `[rows, outputs]`."""
        self._x.append(x)
        self._y.append(y)
        if sum(map(len, self._x)) >= BLOCK_ROWS:
            x, y = torch.cat(self._x), torch.cat(self._y)
            whole = len(x) // BLOCK_ROWS * BLOCK_ROWS
            for start in range(0, whole, BLOCK_ROWS):
                self._accumulate(x[start : start + BLOCK_ROWS], y[start : start + BLOCK_ROWS])
            self._x, self._y = [x[whole:].clone()], [y[whole:].clone()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it holds, by name, for [`load`]."""
        held = {"count": torch.tensor(self.count)}
        held |= {name: getattr(self, name) for name in _SUMS} if self.count else {}
        waiting = {"x_waiting": self._x, "y_waiting": self._y}
        return held | {name: torch.cat(rows) for name, rows in waiting.items() if rows}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the place of what it holds."""
        self.count = int(tensors["count"])
        for name in _SUMS if self.count else ():
            setattr(self, name, tensors[name])
        self._x, self._y = ([tensors[name]] if name in tensors else [] for name in ("x_waiting", "y_waiting"))

    def _accumulate(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if not self.count:
            self._start(x, y)
        self.count += len(x)
        x, y = (x - self.x_shift) / self.x_scale, (y - self.y_shift) / self.y_scale
        self.x_sum += x.sum(0, dtype=torch.float64)
        self.y_sum += y.sum(0, dtype=torch.float64)
        self.y_square += y.square().sum(0, dtype=torch.float64)
        for start in range(0, x.shape[1], _TILE):  # the lower triangle is enough
            rows = x[:, start : start + _TILE].T
            self.xx[start : start + _TILE, : start + _TILE] += rows @ x[:, : start + _TILE]
            self.xy[start : start + _TILE] += rows @ y

    def _start(self, x: torch.Tensor, y: torch.Tensor) -> None:
        features, outputs = x.shape[1], y.shape[1]
        self.x_shift, self.y_shift = x.mean(0), y.mean(0)
        self.x_scale, self.y_scale = _deviation(x.var(0, correction=0)), _deviation(y.var(0, correction=0))
        self.xx = torch.zeros(features, features, dtype=torch.float64)
        self.xy = torch.zeros(features, outputs, dtype=torch.float64)
        self.x_sum = torch.zeros(features, dtype=torch.float64)
        self.y_sum = torch.zeros(outputs, dtype=torch.float64)
        self.y_square = torch.zeros(outputs, dtype=torch.float64)

    def moments(self) -> Moments:
        """
        The moments of all rows so far; more rows may follow.

        Raises:
            `ValueError`: fewer than 2 rows, or a row with NaN or infinite values.
        """
        if sum(map(len, self._x)):
            self._accumulate(torch.cat(self._x), torch.cat(self._y))
            self._x, self._y = [], []
        if self.count < 2:
            raise ValueError("`documents` gave fewer than 2 tokens to fit on. Pass more text.")
        x_mean, y_mean = self.x_sum / self.count, self.y_sum / self.count
        xx = self.xx.tril() / self.count
        xx = xx + xx.tril(-1).T
        xx.addr_(x_mean, x_mean, alpha=-1)
        xy = torch.addr(self.xy / self.count, x_mean, y_mean, alpha=-1)
        if not (torch.isfinite(xx).all() and torch.isfinite(xy).all()):
            raise ValueError("The models' states hold NaN or infinite values on this text. Check their dtype.")
        # From the first rows' normalisation to that of all rows.
        x_scale = _deviation(xx.diagonal())
        y_variance = (self.y_square / self.count - y_mean.square()) * self.y_scale.double().square()
        y_scale = torch.cat([_deviation(v.mean()).expand_as(v) for v in y_variance.split(self.blocks)])
        xx = xx / x_scale / x_scale[:, None]
        xy = xy / x_scale[:, None] * (self.y_scale / y_scale)
        return Moments(
            self.count,
            xx,
            xy,
            self.x_shift + self.x_scale * x_mean,
            self.x_scale * x_scale,
            self.y_shift + self.y_scale * y_mean,
            y_scale,
        )


def _deviation(variance: torch.Tensor) -> torch.Tensor:
    """Square root; 1 where a value never changes."""
    return torch.where(variance > 1e-12 * variance.max(), variance.clamp(min=0).sqrt(), torch.ones_like(variance))
