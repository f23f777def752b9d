"""The length of a translated key.

A regression shrinks what it is unsure of, so translated keys are too short, and attention over them too flat: what
must be looked up is averaged with its neighbours. Many targets (QK-norm by head, as in Gemma 3, Qwen 3 or Apertus, and
the latent keys of multi-head latent attention) give every key of a head the same weighted length, so that the right
one is known.
"""

import torch
from torch import nn


class KeyNorm(nn.Module):
    """
    Gives the keys of one target layer a fixed weighted length, `gain * k / sqrt(sum_c (scale_c * k_c)²)`, a head at a
    time. The roots of the weights are kept, since in fp16 the weights of large keys would be 0.

    Args:
        kv_heads, key_dim (`int`): Of the layer.
    """

    def __init__(self, kv_heads: int, key_dim: int):
        super().__init__()
        self.register_buffer("scale", torch.full((kv_heads, key_dim), key_dim**-0.5))
        self.gain = nn.Parameter(torch.ones(kv_heads))

    def forward(self, key_states: torch.Tensor) -> torch.Tensor:
        """`[batch, kv_heads, seq, key_dim]`, position-free; computed in fp32."""
        keys = key_states.float()
        length = (keys * self.scale.float()[:, None]).norm(dim=-1, keepdim=True).clamp(min=1e-6)
        return (keys / length * self.gain.float()[:, None, None]).to(key_states.dtype)
