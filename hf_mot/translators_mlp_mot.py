"""The MLP mapper. Shapes as in `translators_mot`."""

import torch
from torch import nn

from .translators_linear_mot import ReducedRankTranslator, add_linear, start_at_zero
from .translators_pieces_mot import project_from
from .translators_widths_mot import Widths


class MLPTranslator(nn.Module):
    """A GELU MLP on each token alone, between everything that is read and everything that is written; `linear` as in
    [`MixtureTranslator`]."""

    def __init__(self, widths: Widths, hidden_size: int, linear: ReducedRankTranslator | None = None):
        super().__init__()
        self.linear = linear
        self.norm = nn.LayerNorm(widths.read_dim)
        self.up = nn.Linear(widths.read_dim, hidden_size)
        self.middle = nn.Linear(hidden_size, hidden_size)
        self.down = nn.Linear(hidden_size, widths.output_dim)
        if linear is not None:
            start_at_zero(self.down)

    def forward(
        self,
        source_states: torch.Tensor | None,
        embeddings: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        start: int = 0,
        target_hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        read = [part for part in (source_states, embeddings, target_hidden_states) if part is not None]
        hidden = nn.functional.gelu(self.up(self.norm(torch.cat(read, dim=-1))))
        states = project_from(self.down, nn.functional.gelu(self.middle(hidden)), start)
        if self.linear is None:
            return states
        return add_linear(states, self.linear(source_states, embeddings, attention_mask, start, target_hidden_states))
