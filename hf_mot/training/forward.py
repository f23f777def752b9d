"""What the target makes of a batch, in the form that losses compare.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, ids and masks `[batch, seq]`; contexts are left-padded,
prompts right-padded, so that no pad stands between two tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel

from hf_mot.cache_mot import TranslatedCache
from hf_mot.compat_mot import decoder_layers
from hf_mot.evaluation.answers import prompt_logits
from hf_mot.geometry_mot import ModelGeometry
from hf_mot.rows_mot import positions_from_mask


@dataclass(frozen=True)
class Prompt:
    """
    What follows the contexts. All tokens but the first of a row are scored: no logits of the prompt stand before it.

    Args:
        ids, mask (`torch.Tensor`): `[batch, prompt]`, right-padded.
    """

    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def labels(self) -> torch.Tensor:
        """`[scored tokens]`."""
        return self.scored(self.ids[:, 1:])

    def scored(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows `[batch, prompt - 1, …]` of what is scored alone: `[scored tokens, …]`."""
        scored = self.mask[:, 1:].bool()
        # Logits over a large vocabulary are not copied, there and back, where no pad stands among them.
        return rows.flatten(0, 1) if bool(scored.all()) else rows[scored.to(rows.device)]

    def logits(self, target: PreTrainedModel, cache: TranslatedCache) -> torch.Tensor:
        """The target's logits after a context, `[scored tokens, vocab]`. Gradients flow to the cache."""
        lengths = self.mask.sum(dim=1).tolist()
        rows = [row[:length] for row, length in zip(self.ids.tolist(), lengths, strict=True)]
        return self.scored(prompt_logits(target, cache, rows)[0])


def context_states(
    cache: Cache, layers: Sequence[int], geometry: ModelGeometry | None, mask: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Keys and values, layer by layer; with a geometry, their positions are taken off."""
    keys, values = [], []
    for layer_idx in layers:
        pair = (cache.layers[layer_idx].keys, cache.layers[layer_idx].values)
        if geometry is not None:
            pair = geometry.strip_positions(layer_idx, *pair, positions_from_mask(mask).to(pair[0].device))
        keys.append(pair[0])
        values.append(pair[1])
    return tuple(keys), tuple(values)


@contextmanager
def layer_outputs(model: PreTrainedModel, wanted: bool = True) -> Iterator[list[torch.Tensor]]:
    """Collects the outputs `[batch, seq, hidden]` of the decoder layers of what runs within, lowest first."""
    found: list[torch.Tensor] = []

    def keep(module, args, output):
        found.append(output[0] if isinstance(output, tuple) else output)

    hooks = []
    if wanted:
        hooks = [layer.register_forward_hook(keep) for layer in decoder_layers(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
