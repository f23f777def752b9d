"""The translator that a config asks for: tensors in, tensors out. It knows nothing of language models, tokenizers or
caches.

Shapes: source states `[batch, seq, source width]`, embeddings `[batch, seq, embedding width]` (the causal window of
the target's token embeddings, own token first), hidden states of the target `[batch, seq, hidden]`, each `None` where
it is not read; output `[batch, seq, target width - start]`: per target layer keys, then values, or the one state that
both are restored from, and at the end the hidden state that a target resumes from, if any; from channel `start` on,
where a layer begins; what lies before is computed only where that is simpler. With a
[`ErrorPrediction`] one more channel follows, what it says.
`attention_mask` is `[batch, seq]`, 0 on the pads of left-padded rows.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .configuration_mot import MoTConfig
from .translators_backbone_mot import BackboneTranslator, FeedForward
from .translators_error_mot import ErrorPrediction
from .translators_linear_mot import ReducedRankTranslator
from .translators_mixture_mot import Mixture, Router
from .translators_mlp_mot import MLPTranslator
from .translators_sides_mot import MixtureTranslator, Refinement
from .translators_widths_mot import Widths


def build_translator(config: MoTConfig) -> nn.Module:
    """The module that `config.method` names."""
    return _BUILDERS[config.method](config, Widths.of(config))


def translator_flops(config: MoTConfig, context_length: int, skipped_layers: int = 0) -> int:
    """FLOPs (2 × MACs) of a translator over `context_length` tokens; attention counted over all pairs of tokens.
    `skipped_layers`: so many of the first layers that it translates are not wanted."""
    widths = Widths.of(config)
    if context_length == 0 or skipped_layers >= len(widths.target):
        return 0
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        source, embeddings, hidden = (
            torch.empty(1, context_length, width) if width else None
            for width in (widths.source_dim, widths.embeddings, widths.hidden)
        )
        start = sum(map(sum, widths.target[:skipped_layers]))
        build_translator(config)(source, embeddings, start=start, target_hidden_states=hidden)
    return counter.get_total_flops()


class IdentityTranslator(nn.Module):
    """The oracle: hands the states of the target itself through, and what goes into the layer that a plan resumes
    from, if that is given. Its output must give the target's own logits."""

    def forward(
        self,
        source_states: torch.Tensor | None,
        embeddings: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        start: int = 0,
        target_hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        states = source_states[..., start:]
        return states if target_hidden_states is None else torch.cat([states, target_hidden_states], dim=-1)


def _mixture(config: MoTConfig, gate_dim: int, slot_dims: Sequence[int], output_dim: int) -> Mixture:
    """`config.num_translators` backbones and their router; or, for `experts="ffn"`, one backbone whose feed-forward
    layers are such mixtures (MoE)."""

    def routed(make_expert, width: int) -> Mixture:
        router = Router(width, config.num_translators, config.top_k, config.routing)
        experts = [make_expert() for _ in range(config.num_translators)]
        return Mixture(experts, router if config.num_translators > 1 else None)

    def backbone(make_ffn=None) -> BackboneTranslator:
        return BackboneTranslator(
            slot_dims,
            output_dim,
            config.hidden_size,
            config.num_attention_heads,
            config.num_stages,
            config.causal,
            config.output_activation,
            make_ffn,
        )

    if config.experts == "ffn":
        return Mixture([backbone(lambda width: _RoutedFeedForward(routed(partial(FeedForward, width), width)))], None)
    return routed(backbone, gate_dim)


class _RoutedFeedForward(nn.Module):
    """Experts inside a dense block (MoE): the block's own state chooses."""

    def __init__(self, mixture: Mixture):
        super().__init__()
        self.mixture = mixture

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.mixture(state, state)


def _linear_path(config: MoTConfig, widths: Widths, refine: nn.Module | None = None) -> ReducedRankTranslator:
    pieces = None
    if config.piece_ranks is not None:
        pieces = list(zip(sum(widths.target, ()), sum(config.piece_ranks, []), strict=True))
    channels = (widths.source_dim, widths.embeddings, widths.output_dim)
    error = ErrorPrediction(config.rank) if config.predicts_error else None
    return ReducedRankTranslator(*channels, config.rank, refine, pieces, config.source_window, widths.hidden, error)


def _build_mixture(config: MoTConfig, widths: Widths) -> nn.Module:
    make_mixture = partial(_mixture, config)
    if config.trunk:
        return _linear_path(config, widths, Refinement(config.rank, make_mixture))
    return MixtureTranslator(widths, make_mixture, _linear_path(config, widths) if config.linear_path else None)


def _build_mlp(config: MoTConfig, widths: Widths) -> nn.Module:
    return MLPTranslator(widths, config.hidden_size, _linear_path(config, widths) if config.linear_path else None)


_BUILDERS = {
    "reduced_rank": _linear_path,
    "mot": _build_mixture,
    "mlp": _build_mlp,
    "identity": lambda config, widths: IdentityTranslator(),
}
