"""Mixture-of-Translators (paper 3.1): a router gives each token its translators.

Shapes: gate inputs and outputs are `[batch, seq, width]`, weights `[batch, seq, experts]`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Router(nn.Module):
    """
    Token-level gate: the weights of `num_experts` experts, zero on all but the `top_k` most probable.

    Args:
        input_dim (`int`): Width of what the gate reads.
        num_experts (`int`): Number of experts (N_Tr).
        top_k (`int`): Experts a token (Top-K).
        routing (`str`): How the probabilities g of the selected experts become weights:

            - `"renormalized"`: g over their sum (Eq. 5). At `top_k=1` this is 1 whatever g is, so no gradient of the
              output reaches the gate;
            - `"switch"`: g as it is (Fedus et al., 2021): the gate learns, the output is scaled by g;
            - `"straight_through"`: the value of `"renormalized"` with the gradient of `"switch"`;
            - `"uniform"`: all experts, 1 / N_Tr each (MoT-Uni); the gate is not used.
    """

    def __init__(self, input_dim: int, num_experts: int, top_k: int, routing: str):
        super().__init__()
        self.num_experts, self.top_k, self.routing = num_experts, top_k, routing
        self.norm = nn.LayerNorm(input_dim)
        self.gate = nn.Linear(input_dim, num_experts)

    def forward(self, gate_input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, and the probabilities that they come from."""
        if self.routing == "uniform":
            weights = gate_input.new_full((*gate_input.shape[:-1], self.num_experts), 1 / self.num_experts)
            return weights, weights
        probabilities = self.gate(self.norm(gate_input)).softmax(dim=-1)
        chosen = probabilities.topk(self.top_k, dim=-1).indices
        selected = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
        scaled = probabilities * selected
        if self.routing == "switch":
            return scaled, probabilities
        renormalized = scaled / scaled.sum(dim=-1, keepdim=True)
        if self.routing == "straight_through":
            renormalized = scaled + (renormalized - scaled).detach()
        return renormalized, probabilities


class Mixture(nn.Module):
    """
    The weighted sum of experts, by a [`Router`]. Every expert runs on every token: the translators' cross-attention
    reads all tokens, whatever their own expert is.

    Args:
        experts (`Sequence[nn.Module]`): Modules of equal arguments and output width.
        router ([`Router`]): Their router; `None` for a single expert.
    """

    def __init__(self, experts: Sequence[nn.Module], router: Router | None):
        super().__init__()
        self.experts, self.router = nn.ModuleList(experts), router

    def forward(self, gate_input: torch.Tensor, *args: Any) -> torch.Tensor:
        if self.router is None:
            return self.experts[0](*args)
        weights, _ = self.router(gate_input)
        shares = weights[..., None].unbind(dim=-2)
        return sum(share * expert(*args) for share, expert in zip(shares, self.experts, strict=True))
