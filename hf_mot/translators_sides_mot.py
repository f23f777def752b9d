"""Mixtures of translators over a token's slots: keys and values apart, or all within the channels of a linear map.

Shapes as in `translators_mot`.
"""

import torch
from torch import nn

from .translators_linear_mot import ReducedRankTranslator, add_linear, start_at_zero
from .translators_widths_mot import Widths


class Refinement(nn.Module):
    """Mixed backbone translators within the inner channels of a [`ReducedRankTranslator`]: one slot, which keys and
    values share. Its output starts at zero, so that training starts where the closed form ends."""

    def __init__(self, rank: int, make_mixture):
        super().__init__()
        self.mixture = make_mixture(gate_dim=rank, slot_dims=[rank], output_dim=rank)
        for expert in self.mixture.experts:
            start_at_zero(expert.output_projection)

    def forward(self, inner: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.mixture(inner, [inner], attention_mask)


# Of the slots of a source, keys and values in turn, those that keys (0), values (1) and hidden states are made from.
_SLOTS, _HIDDEN = (slice(0, None, 2), slice(1, None, 2), slice(None)), 2


class MixtureTranslator(nn.Module):
    """
    Mixture-of-Translators as the paper has it (3.1, C.2): keys and values are translated apart, each from one slot a
    channel and by translators of its own, which a gate over all that is read chooses for each token. Hidden states,
    such as both are restored from (C.5), are a third side, which reads the keys and the values of each channel. The
    embedding window and the target's hidden state, if any, are one more slot each, the first.

    Args:
        widths ([`Widths`]): What is read and written.
        make_mixture (`Callable`): Makes the mixture of one side.
        linear ([`ReducedRankTranslator`], *optional*): A linear path that is added; the outputs of the mixtures then
            start at zero.
    """

    def __init__(self, widths: Widths, make_mixture, linear: ReducedRankTranslator | None = None):
        super().__init__()
        self.widths, self.linear = widths, linear
        own = [width for width in (widths.embeddings, widths.hidden) if width]
        # In the order of the output: the side that writes it, and its width.
        self.pieces = [
            (_HIDDEN if len(dims) == 1 else side, dim) for dims in widths.target for side, dim in enumerate(dims)
        ]
        self.written = sorted({side for side, _ in self.pieces})
        self.sides = nn.ModuleList(
            make_mixture(
                gate_dim=widths.read_dim,
                slot_dims=[*own, *sum(widths.source, ())[_SLOTS[side]]],
                output_dim=sum(self._widths_of(side)),
            )
            for side in self.written
        )
        if linear is not None:
            for side in self.sides:
                for expert in side.experts:
                    start_at_zero(expert.output_projection)

    def _widths_of(self, side: int) -> list[int]:
        return [width for own, width in self.pieces if own == side]

    def forward(
        self,
        source_states: torch.Tensor | None,
        embeddings: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        start: int = 0,
        target_hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        own = [part for part in (embeddings, target_hidden_states) if part is not None]
        gate_input = torch.cat([*([] if source_states is None else [source_states]), *own], dim=-1)
        slots = () if source_states is None else source_states.split([*sum(self.widths.source, ())], dim=-1)
        translated = {}
        for side, translate in zip(self.written, self.sides, strict=True):
            states = translate(gate_input, [*own, *slots[_SLOTS[side]]], attention_mask)
            translated[side] = iter(states.split(self._widths_of(side), dim=-1))
        states = torch.cat([next(translated[side]) for side, _ in self.pieces], dim=-1)[..., start:]
        if self.linear is None:
            return states
        return add_linear(states, self.linear(source_states, embeddings, attention_mask, start, target_hidden_states))
