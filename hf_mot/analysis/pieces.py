"""The pieces of a target's cache: the keys or the values of one layer, native or translated.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, masks `[batch, seq]`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_mot.cache_mot import TranslatedCache
from hf_mot.capture_mot import positions_from_mask
from hf_mot.evaluation.batch import Batch
from hf_mot.fit.weights import STATES
from hf_mot.modeling_mot import MoTModel
from hf_mot.replay_mot import ReplayPlan

Piece = tuple[int, str]  # a target layer, and which of its states


def translated_pieces(translator: MoTModel, replay: str) -> list[Piece]:
    """What a translation replaces by this plan, bottom layer first. Raises `ValueError` if it leaves none, or for a
    plan by which more comes of a translation than that."""
    layers, plan = translator.injected_layers(replay), ReplayPlan.parse(replay)
    if plan.resume is not None:
        raise ValueError(
            f"`replay` is {plan}, by which the layers above {plan.resume} come of a translated hidden state, which is "
            "no piece of a cache: what that costs would be left out. Pass replay='full', by which they are native and "
            "the layers below are measured."
        )
    if not layers:
        raise ValueError(
            f"`replay` {replay} leaves every layer to the target, so no piece is translated. Take fewer layers."
        )
    return [(layer_idx, states) for layer_idx in layers for states in STATES]


def mix(native: TranslatedCache, translated: TranslatedCache, pieces: Iterable[Piece]) -> TranslatedCache:
    """The native cache with some pieces of the translated one, of the same tokens. Neither is changed."""
    mixed = native.fork()
    for layer_idx, states in pieces:
        setattr(mixed.layers[layer_idx], states, getattr(translated.layers[layer_idx], states))
    mixed.is_fork = False
    return mixed


def paired_states(batch: Batch, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
    """Position-free native and translated states of each piece, `[tokens, channels]`, without pads and prefix."""
    geometry, mask = batch.models.translator.target_geometry, batch.padded[1]
    positions = positions_from_mask(mask)
    kept = mask.bool() & (positions >= len(batch.models.prefix_ids))
    for layer_idx, states in pieces:
        both = []
        for cache in (batch.native_cache, batch.translated_cache):
            layer = cache.layers[layer_idx]
            pair = geometry.strip_positions(layer_idx, layer.keys, layer.values, positions)
            own = pair[STATES.index(states)]
            both.append(own.transpose(1, 2).flatten(2)[kept.to(own.device)].double())  # [tokens, channels]
        yield (layer_idx, states), *both


@dataclass
class Unexplained:
    """Squared error of a piece's translation as a share of its variance, over batches."""

    count: int = 0
    total: torch.Tensor | float = 0.0
    square: float = 0.0
    error: float = 0.0

    def add(self, native: torch.Tensor, translated: torch.Tensor) -> None:
        self.count += len(native)
        self.total = self.total + native.sum(dim=0)
        self.square += native.square().sum().item()
        self.error += (translated - native).square().sum().item()

    @property
    def share(self) -> float:
        variance = self.square - self.total.square().sum().item() / self.count
        return self.error / variance if variance > 0 else 0.0  # states that never change
