"""The linear map of a closed form, and what others that are trained on top of it need: their output is added to its.

Shapes as in `translators_mot`.
"""

from collections.abc import Sequence

import torch
from torch import nn

from .rows_mot import causal_window
from .translators_pieces_mot import PieceProjections, project_from


class ReducedRankTranslator(nn.Module):
    """
    A linear map from all inputs to the keys and values of all target layers through one shared down-projection
    (reduced-rank regression). Its weights come from a closed-form fit, centring and scaling folded in.

    Args:
        source_dim (`int`): Source width; 0 for a translator that reads no source.
        embedding_dim (`int`): Width of the embedding window; 0 for none.
        output_dim (`int`): Target width, keys and values of all layers.
        rank (`int`, *optional*): Width of the down-projection; `None` for a full-rank map.
        refine (`nn.Module`, *optional*): Adds to the `rank` inner channels, from these themselves (and the attention
            mask), before they are projected up.
        pieces (`Sequence[tuple[int, int]]`, *optional*): Width of each piece (the keys or the values of one target
            layer), and how many of the inner channels it reads, the leading ones. By default all read all.
        source_window (`int`, *optional*, defaults to 1): Tokens whose source states a token reads, the own one and
            those before it; these through the same `rank` channels, so that each costs `rank²` weights.
        hidden_dim (`int`, *optional*, defaults to 0): Width of the target's hidden state; 0 for none.
        error (`nn.Module`, *optional*): Tells from the `rank` inner channels, unrefined, how wrong a token is likely
            to be, in a channel after the output's.
    """

    def __init__(
        self,
        source_dim: int,
        embedding_dim: int,
        output_dim: int,
        rank: int | None,
        refine: nn.Module | None = None,
        pieces: Sequence[tuple[int, int]] | None = None,
        source_window: int = 1,
        hidden_dim: int = 0,
        error: nn.Module | None = None,
    ):
        super().__init__()
        inner = output_dim if rank is None else rank
        self.source_window = source_window
        self.source_in = nn.Linear(source_dim, inner, bias=False) if source_dim else None
        before = inner * (source_window - 1) if source_dim else 0
        self.source_before = nn.Linear(before, inner, bias=False) if before else None
        self.embedding_in = nn.Linear(embedding_dim, inner, bias=False) if embedding_dim else None
        self.hidden_in = nn.Linear(hidden_dim, inner, bias=False) if hidden_dim else None
        self.refine, self.error = refine, error
        if pieces is not None:
            self.up = PieceProjections(*zip(*pieces, strict=True))
        else:
            self.up = nn.Identity() if rank is None else nn.Linear(rank, output_dim, bias=False)
        # What of a closed form can be trained on few texts: a gain and a bias of each channel.
        self.gain, self.bias = nn.Parameter(torch.ones(output_dim)), nn.Parameter(torch.zeros(output_dim))
        # Inner channels of mean 0 and variance 1, and outputs in units of their own: a step of one size suits all.
        self.register_buffer("center", torch.zeros(inner))
        self.register_buffer("scale", torch.ones(output_dim))

    def forward(
        self,
        source_states: torch.Tensor | None,
        embeddings: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        start: int = 0,
        target_hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        full_rank = isinstance(self.up, nn.Identity)
        inner = self.inner(source_states, embeddings, attention_mask, start, target_hidden_states)
        error = [] if self.error is None else [self.error(inner).to(inner.dtype)]
        if self.refine is not None:
            inner = inner + self.refine(inner, attention_mask)
        if isinstance(self.up, PieceProjections):
            inner = self.up(inner, start)
        elif not full_rank:
            inner = project_from(self.up, inner, start)
        states = (inner * self.gain[start:] + self.bias[start:]) * self.scale[start:]
        return torch.cat([states, *error], dim=-1) if error else states

    def inner(
        self,
        source_states: torch.Tensor | None,
        embeddings: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        start: int = 0,
        target_hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The inner channels, `[batch, seq, rank]`; of a full-rank map those of the output, from `start` on."""
        inner, start = 0, start if isinstance(self.up, nn.Identity) else 0
        for project, states in (
            (self.source_in, source_states),
            (self.embedding_in, embeddings),
            (self.hidden_in, target_hidden_states),
        ):
            if project is not None:
                inner = inner + project_from(project, states, start)
            if project is self.source_in and self.source_before is not None:
                before = causal_window(inner, attention_mask, self.source_window)[..., inner.shape[-1] :]
                inner = inner + self.source_before(before)
        return inner - self.center[start:]


def add_linear(states: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    """The sum of both paths, and behind it what the linear one says of the error, if it does."""
    width = states.shape[-1]
    if linear.shape[-1] == width:
        return states + linear
    return torch.cat([states + linear[..., :width], linear[..., width:]], dim=-1)


def start_at_zero(projection: nn.Linear) -> None:
    """Initialises what is added to a linear map, so that training starts where the closed form ends."""
    nn.init.zeros_(projection.weight)
    nn.init.zeros_(projection.bias)
