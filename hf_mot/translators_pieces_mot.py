"""Up-projections that read fewer channels for some pieces: a piece is the keys or the values of one target layer.

The inner channels of a closed form come in order, leading directions first, so that of all maps from the first r of
them to a piece the best is its first r rows. Most pieces need few; a few need all.
"""

from collections.abc import Sequence

import torch
from torch import nn


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

    def _widths_of(self, rank: int) -> list[int]:
        return [width for width, own in zip(self.widths, self.ranks, strict=True) if own == rank]

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        """`[..., rank]` to `[..., sum of widths]`."""
        written = {
            int(rank): iter(project(inner[..., : int(rank)]).split(self._widths_of(int(rank)), dim=-1))
            for rank, project in self.by_rank.items()
        }
        return torch.cat([next(written[rank]) for rank in self.ranks], dim=-1)

    @torch.no_grad()
    def load(self, weight: torch.Tensor) -> None:
        """Takes the weights of a whole up-projection, `[sum of widths, rank]`, without what no piece reads."""
        pieces = list(zip(self.ranks, weight.split(self.widths), strict=True))
        for rank, project in self.by_rank.items():
            project.weight.copy_(torch.cat([piece[:, : int(rank)] for own, piece in pieces if own == int(rank)]))
