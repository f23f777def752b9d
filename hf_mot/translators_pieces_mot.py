"""Up-projections that read fewer channels for some pieces: a piece is the keys or the values of one target layer.

The inner channels of a closed form come in order, leading directions first, so that of all maps from the first r of
them to a piece the best is its first r rows. Most pieces need few; a few need all.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn
from torch.nn import functional as F


def project_from(linear: nn.Module, states: torch.Tensor, start: int) -> torch.Tensor:
    """What a linear map writes from channel `start` on. A plain one does not compute the channels before."""
    plain = type(linear) is nn.Linear and type(linear.weight) is nn.Parameter  # no adapter, not quantized
    if start == 0 or not plain:
        return linear(states)[..., start:]
    return F.linear(states, linear.weight[start:], None if linear.bias is None else linear.bias[start:])


class PieceProjections(nn.Module):
    """
    A linear map without bias in which each piece of the output reads the leading channels alone. Pieces that read
    equally many are one product.

    Args:
        widths (`Sequence[int]`): Channels of each piece, in the order of the output.
        ranks (`Sequence[int]`): Leading channels that each piece reads.
    """

    def __init__(self, widths: Sequence[int], ranks: Sequence[int]):
        super().__init__()
        self.widths, self.ranks = list(widths), list(ranks)
        self.by_rank = nn.ModuleDict(
            {str(rank): nn.Linear(rank, sum(self._widths_of(rank)), bias=False) for rank in sorted(set(ranks))}
        )

    def _widths_of(self, rank: int, start: int = 0, stop: int | None = None) -> list[int]:
        pieces = zip(self.widths[start:stop], self.ranks[start:stop], strict=True)
        return [width for width, own in pieces if own == rank]

    def forward(self, inner: torch.Tensor, start: int = 0) -> torch.Tensor:
        """`[..., rank]` to `[..., sum of widths - start]`: the pieces from that which begins at channel `start` on."""
        first, written = [0, *accumulate(self.widths)].index(start), {}
        for rank in sorted(set(self.ranks[first:])):
            left_out, widths = self._widths_of(rank, 0, first), self._widths_of(rank, first)
            states = project_from(self.by_rank[str(rank)], inner[..., :rank], sum(left_out))
            written[rank] = iter(states.split(widths, dim=-1))
        return torch.cat([next(written[rank]) for rank in self.ranks[first:]], dim=-1)

    @torch.no_grad()
    def load(self, weight: torch.Tensor) -> None:
        """Takes the weights of a whole up-projection, `[sum of widths, rank]`, without what no piece reads."""
        pieces = list(zip(self.ranks, weight.split(self.widths), strict=True))
        for rank, project in self.by_rank.items():
            project.weight.copy_(torch.cat([piece[:, : int(rank)] for own, piece in pieces if own == int(rank)]))
