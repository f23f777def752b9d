"""The translator modules: tensors in, tensors out. They know nothing of language models, tokenizers or caches.

Shapes: source states `[batch, seq, source width]`, embeddings `[batch, seq, embedding width]` (the causal window of
the target's token embeddings, own token first), hidden states of the target `[batch, seq, hidden]`, each `None` where
it is not read; output `[batch, seq, target width - start]`: per target layer keys, then values, or the one state that
both are restored from, and at the end the hidden state that a target resumes from, if any; from channel `start` on,
where a layer begins; what lies before is computed only where that is simpler. With a
[`ErrorPrediction`] one more channel follows, what it says.
`attention_mask` is `[batch, seq]`, 0 on the pads of left-padded rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .configuration_mot import MoTConfig
from .geometry_mot import ModelGeometry
from .rows_mot import causal_window
from .translators_backbone_mot import BackboneTranslator, FeedForward
from .translators_error_mot import ErrorPrediction
from .translators_mixture_mot import Mixture, Router
from .translators_pieces_mot import PieceProjections, project_from


@dataclass(frozen=True)
class Widths:
    """
    Channels a token that a translator reads and writes.

    Args:
        source (`tuple[tuple[int, int], ...]`): Per source layer read, of its keys and of its values.
        embeddings (`int`): Of the window of target token embeddings; 0 for none.
        target (`tuple[tuple[int, ...], ...]`): Per target layer translated, of its keys and of its values, or of the
            one state that they are restored from; at the end of that which a target resumes from, if any.
        hidden (`int`, *optional*, defaults to 0): Of the target's hidden state that is read; 0 for none.
    """

    source: tuple[tuple[int, int], ...]
    embeddings: int
    target: tuple[tuple[int, ...], ...]
    hidden: int = 0

    @classmethod
    def of(cls, config: MoTConfig) -> "Widths":
        """Those of a translator with this configuration."""
        source, target = (ModelGeometry.from_dict(contract["geometry"]) for contract in (config.source, config.target))
        translated = range(len(target.layers)) if config.target_layers is None else config.target_layers

        def dims(geometry: ModelGeometry, layer_idx: int) -> tuple[int, int]:
            layer = geometry.layers[layer_idx]
            return layer.kv_heads * layer.key_dim, layer.kv_heads * layer.value_dim

        embeddings = config.embedding_window * target.embedding_dim
        hidden = 0 if config.target_hidden_layer is None else target.hidden_dim
        written = [(target.hidden_dim,) if idx in config.restored_layers else dims(target, idx) for idx in translated]
        written += [] if config.resume_layer is None else [(target.hidden_dim,)]
        return cls(tuple(dims(source, idx) for idx in config.source_layers), embeddings, tuple(written), hidden)

    @property
    def source_dim(self) -> int:
        return sum(map(sum, self.source))

    @property
    def read_dim(self) -> int:
        """Of all that is read."""
        return self.source_dim + self.embeddings + self.hidden

    @property
    def output_dim(self) -> int:
        return sum(map(sum, self.target))


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


class Refinement(nn.Module):
    """Mixed backbone translators within the inner channels of a [`ReducedRankTranslator`]: one slot, which keys and
    values share. Its output starts at zero, so that training starts where the closed form ends."""

    def __init__(self, rank: int, make_mixture):
        super().__init__()
        self.mixture = make_mixture(gate_dim=rank, slot_dims=[rank], output_dim=rank)
        for expert in self.mixture.experts:
            _start_at_zero(expert.output_projection)

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
                    _start_at_zero(expert.output_projection)

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
        return _added(states, self.linear(source_states, embeddings, attention_mask, start, target_hidden_states))


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
            _start_at_zero(self.down)

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
        return _added(states, self.linear(source_states, embeddings, attention_mask, start, target_hidden_states))


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


def _added(states: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    """The sum of both paths, and behind it what the linear one says of the error, if it does."""
    width = states.shape[-1]
    if linear.shape[-1] == width:
        return states + linear
    return torch.cat([states + linear[..., :width], linear[..., width:]], dim=-1)


def _start_at_zero(projection: nn.Linear) -> None:
    nn.init.zeros_(projection.weight)
    nn.init.zeros_(projection.bias)


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
