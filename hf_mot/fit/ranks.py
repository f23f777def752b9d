"""A budget of weights: how many inner channels a translator has, and how many of them each piece reads.

The channels of a reduced-rank regression are orthonormal in the whitened features and come in order. So a piece (the
keys or the values of one layer) that reads the first r of them loses just what the further rows of its up-projection
hold, and the error of every choice of ranks is known without fitting again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..geometry_mot import ModelGeometry
from ..replay_cost_mot import bottom_flops, native_flops, projection_flops, resume_flops
from .weights import output_blocks

BUDGET_CONTEXT = 1024  # tokens of context at which a share of the native prefill's FLOPs is counted
_STEP = 64  # pieces of equal rank are one product, and products of few channels are slow
_BISECTIONS = 60


@dataclass(frozen=True)
class Budget:
    """
    What the two projections of a translator may cost.

    Args:
        weights (`int`): Weights of both; gains and biases of channels, and what key norms have, left out.
        widths (`list[int]`): Channels of each piece.
        source_window (`int`, *optional*, defaults to 1): Tokens whose source states are read; each but the own one
            takes the square of the rank.
    """

    weights: int
    widths: list[int]
    source_window: int = 1

    @classmethod
    def of(
        cls,
        geometry: ModelGeometry,
        max_parameters: int | None,
        flops_share: float | None,
        source_window: int = 1,
        first_layer: int = 0,
        restored_layers: Sequence[int] = (),
        resume_layer: int | None = None,
        rank: int = 0,
    ) -> "Budget | None":
        """
        The tighter of two limits; `None` without any.

        Args:
            geometry ([`ModelGeometry`]): The target's.
            max_parameters (`int`, *optional*): Parameters in all, the gains and biases of channels and the gains of
                key norms included.
            flops_share (`float`, *optional*): FLOPs as a share of the target's own prefill, at 1,024 tokens.
            source_window (`int`, *optional*, defaults to 1): Tokens whose source states are read.
            first_layer (`int`, *optional*, defaults to 0): The target layers below are its own, by the plan bottom,
                whose FLOPs are part of the share.
            restored_layers (`Sequence[int]`, *optional*, defaults to `()`): Layers whose keys and values the target
                restores, whose FLOPs are too.
            resume_layer (`int`, *optional*): The layer whose input is fitted, with the layers below it alone: the
                others are the target's own, by the plan resume, whose FLOPs are too.
            rank (`int`, *optional*, defaults to 0): The most that it may be: each channel is read, and its square, to
                predict the error, in buffers that are no parameters.

        Raises:
            `ValueError`: a limit that is not positive, or a share that the target alone takes.
        """
        for name, value in (("max_parameters", max_parameters), ("flops_share", flops_share)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"`{name}` must be more than 0 and finite, got {value}.")
        resumed = [] if resume_layer is None else [resume_layer]
        end = len(geometry.layers) if resume_layer is None else resume_layer + 1
        fitted = replace(geometry, layers=geometry.layers[first_layer:end])
        widths = output_blocks(fitted, [idx - first_layer for idx in (*restored_layers, *resumed)])
        limits = []
        if max_parameters is not None:
            gains = sum(layer.kv_heads for layer in fitted.layers)
            limits.append(max_parameters - 2 * sum(widths) - gains)
        if flops_share is not None:
            native, own = native_flops(geometry, BUDGET_CONTEXT), bottom_flops(geometry, BUDGET_CONTEXT, first_layer)
            own += sum(projection_flops(geometry, BUDGET_CONTEXT, layer_idx) for layer_idx in restored_layers)
            own += sum(resume_flops(geometry, BUDGET_CONTEXT, layer_idx) for layer_idx in resumed)
            if own >= flops_share * native:
                parts = [f"the plan bottom:{first_layer}"] if first_layer else []
                parts += [f"the plan resume:{layer_idx - 1}" for layer_idx in resumed]
                parts += ["restoring layers"] if restored_layers else []
                raise ValueError(
                    f"`flops_share` is {flops_share}, but {' and '.join(parts)} alone takes {own / native:.3f} of the "
                    "target's own prefill. Allow more, or let the target run less: a lower "
                    "`target_hidden_layer`, a higher `resume_layer`, fewer `restored_layers`."
                )
            limits.append(max(0, int((flops_share * native - own) / (2 * BUDGET_CONTEXT)) - 2 * rank))
        return cls(min(limits), widths, source_window) if limits else None

    def check(self, rank: int, features: int) -> None:
        """Raises `ValueError` if the lowest ranks take more, of those up to `rank` on so many features."""
        lowest = rank_grid(min(rank, features, sum(self.widths)))[0]
        least = self._down(lowest, features) + lowest * sum(self.widths)
        if self.weights < least:
            raise ValueError(
                f"`max_parameters` or `flops_share` leaves {self.weights:,} weights to the projections, but "
                f"{lowest} channels alone take {least:,}. Allow more, or lower `rank`, the number of source layers "
                "or `embedding_window`."
            )

    def _down(self, rank: int, features: int) -> int:
        return rank * (features + (self.source_window - 1) * rank)

    def spend(self, up: torch.Tensor, features: int) -> list[int]:
        """
        The rank of each piece, of those on a grid, at which the squared error is least; the highest is the
        translator's. For each width that the down-projection could have, the price of a weight is sought at which the
        pieces, each on its own, buy what is left.

        Args:
            up (`torch.Tensor`): The up-projection of a fit in ordered orthonormal channels, `[rank, outputs]`, in
                units in which the plain squared error counts.
            features (`int`): Width of what the down-projection reads.

        Raises:
            `ValueError`: the budget is less than the lowest ranks take.
        """
        self.check(len(up), features)
        grid = rank_grid(len(up))
        energy = torch.stack([piece.square().sum(1) for piece in up.split(self.widths, dim=1)])  # [pieces, rank]
        lost = torch.stack([energy[:, rank:].sum(1) for rank in grid], dim=1)
        cost = torch.outer(*(torch.tensor(own, dtype=lost.dtype) for own in (self.widths, grid)))
        choices = []
        for size, rank in enumerate(grid, start=1):
            spare = self.weights - self._down(rank, features)
            if cost[:, 0].sum() <= spare:
                chosen = _buy(lost[:, :size], cost[:, :size], spare)
                choices.append((lost.gather(1, chosen).sum().item(), [grid[place] for place in chosen.flatten()]))
        return min(choices)[1]


def rank_grid(rank: int) -> list[int]:
    """The ranks that a piece may have: multiples of 64 (of an eighth of `rank`, if that is less) up to `rank`."""
    step = max(1, min(_STEP, rank // 8))
    return [*range(step, rank, step), rank]


def _buy(lost: torch.Tensor, cost: torch.Tensor, budget: float) -> torch.Tensor:
    """Places in the grid, `[pieces, 1]`, that are best at the lowest price at which they keep to the budget."""

    def at(price: float) -> torch.Tensor:
        return (lost + price * cost).argmin(dim=1, keepdim=True)  # of equal ones the first, which is the cheapest

    def keeps(price: float) -> bool:
        return cost.gather(1, at(price)).sum().item() <= budget

    if keeps(0.0):
        return at(0.0)
    low, high = 0.0, 2 * (lost.max() / (cost[:, 1] - cost[:, 0]).min()).item()  # there nobody buys
    for _ in range(_BISECTIONS):
        price = (low + high) / 2
        low, high = (low, price) if keeps(price) else (price, high)
    return at(high)
