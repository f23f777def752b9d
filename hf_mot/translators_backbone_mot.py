"""The backbone translator (paper C.2): recurrent cross-attention over the slots of a channel window.

Shapes: each slot is `[batch, seq, slot width]`, the output `[batch, seq, output width]`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

ACTIVATIONS: dict[str | None, Callable[[], nn.Module]] = {None: nn.Identity, "gelu": nn.GELU}


class BackboneTranslator(nn.Module):
    """
    Projects each slot into one hidden space, lets a running state attend to one slot after the other, and projects all
    states of the last scan to the output (paper C.2).

    Args:
        slot_dims (`Sequence[int]`): Width of each slot. Slots of one width share their input projection.
        output_dim (`int`): Output width.
        hidden_size (`int`): Hidden width.
        num_heads (`int`): Attention heads; a divisor of `hidden_size`.
        num_stages (`int`, *optional*, defaults to 1): Scans over the slots, each with blocks of its own.
        causal (`bool`, *optional*, defaults to `True`): Whether a token attends only to itself and those before it, so
            that more context never changes the translation of what came first. The paper does not say.
        output_activation (`str`, *optional*): `"gelu"` is the paper's formula, which bounds every output below by
            -0.17; `None` leaves the output linear.
        make_ffn (`Callable`, *optional*): From a width to the blocks' feed-forward module; a GELU MLP by default.
    """

    def __init__(
        self,
        slot_dims: Sequence[int],
        output_dim: int,
        hidden_size: int,
        num_heads: int,
        num_stages: int = 1,
        causal: bool = True,
        output_activation: str | None = None,
        make_ffn: Callable[[int], nn.Module] | None = None,
    ):
        super().__init__()
        self.input_projections = nn.ModuleDict(
            {
                str(width): nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden_size), nn.GELU())
                for width in dict.fromkeys(slot_dims)
            }
        )
        make_ffn = FeedForward if make_ffn is None else make_ffn
        self.stages = nn.ModuleList(
            nn.ModuleList(CrossAttentionBlock(hidden_size, num_heads, causal, make_ffn) for _ in slot_dims)
            for _ in range(num_stages)
        )
        self.output_norm = nn.LayerNorm(len(slot_dims) * hidden_size)
        self.output_projection = nn.Linear(len(slot_dims) * hidden_size, output_dim)
        self.output_activation = ACTIVATIONS[output_activation]()

    def forward(self, slots: Sequence[torch.Tensor], attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """`attention_mask`: `[batch, seq]`, 0 on the pads of left-padded rows."""
        projected = [self.input_projections[str(slot.shape[-1])](slot) for slot in slots]
        state, states = projected[0], []
        for stage in self.stages:
            states = []
            for block, slot in zip(stage, projected, strict=True):
                state = block(state, slot, attention_mask)
                states.append(state)
        return self.output_activation(self.output_projection(self.output_norm(torch.cat(states, dim=-1))))


class CrossAttentionBlock(nn.Module):
    """The running state attends to a slot's tokens; then a feed-forward layer. Both add to the state."""

    def __init__(self, hidden_size: int, num_heads: int, causal: bool, make_ffn: Callable[[int], nn.Module]):
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.query_norm, self.context_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.ffn_norm = nn.LayerNorm(hidden_size)
        self.query, self.key, self.value, self.output = (nn.Linear(hidden_size, hidden_size) for _ in range(4))
        self.ffn = make_ffn(hidden_size)

    def forward(self, state: torch.Tensor, slot: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        context = self.context_norm(slot)
        heads = [
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [batch, heads, seq, head_dim]
            for part in (self.query(self.query_norm(state)), self.key(context), self.value(context))
        ]
        padded = attention_mask is not None and not bool(attention_mask.all())
        attended = F.scaled_dot_product_attention(
            *heads,
            attn_mask=_attention_mask(attention_mask, self.causal) if padded else None,
            is_causal=self.causal and not padded,
        )
        state = state + self.output(attended.transpose(1, 2).flatten(2))
        return state + self.ffn(self.ffn_norm(state))


class FeedForward(nn.Sequential):
    """A GELU MLP, four times as wide inside."""

    def __init__(self, hidden_size: int):
        super().__init__(nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size))


def _attention_mask(attention_mask: torch.Tensor, causal: bool) -> torch.Tensor:
    """`[batch, 1, seq, seq]`, `True` where a query may look. A pad sees itself, so that no row is empty."""
    seq = attention_mask.shape[1]
    seen = attention_mask.bool()[:, None, None, :].expand(-1, 1, seq, -1)
    own = torch.eye(seq, dtype=torch.bool, device=attention_mask.device)
    return (seen.tril() if causal else seen) | own
