"""How wrong the translation of a token is likely to be, told from its inner channels, at next to no cost."""

import torch
from torch import nn
from torch.nn import functional as F


class ErrorPrediction(nn.Module):
    """
    The log of a token's mean standardised squared error of keys and values, linear in its inner channels and their
    squares. A closed-form fit sets the weights; they are buffers, since no training has a loss for them.

    Args:
        rank (`int`): Inner channels.
    """

    def __init__(self, rank: int):
        super().__init__()
        self.register_buffer("weight", torch.zeros(1, 2 * rank))
        self.register_buffer("bias", torch.zeros(1))

    @staticmethod
    def features(inner: torch.Tensor) -> torch.Tensor:
        """`[..., rank]` to `[..., 2 * rank]`, in fp32."""
        inner = inner.detach().float()
        return torch.cat([inner, inner.square()], dim=-1)

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        """`[..., rank]` to `[..., 1]`."""
        return F.linear(self.features(inner), self.weight.float(), self.bias.float())
