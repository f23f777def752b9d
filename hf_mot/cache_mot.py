"""TranslatedCache: a target's cache that another model has filled.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

_PER_ROW = ("prefix_mask", "pending_ids", "pending_mask")


class TranslatedCache(DynamicCache):
    """
    A cache of full-length layers in a target's cache space. Generation never writes into it: the `generate` hook (see
    `generation_mot.attach`) works on a fork, so one translated cache serves any number of prompts.

    Args:
        key_states (`Sequence[torch.Tensor]`): Keys per target layer, position encoding on.
        value_states (`Sequence[torch.Tensor]`): Values per target layer.
        prefix_mask (`torch.Tensor`): `[batch, seq]`; 0 on the pads of left-padded rows.
        prefix_ids (`Sequence[int]`, *optional*, defaults to `()`): The special ids (BOS) that the cache starts with
            and that the target's tokenizer also puts before each prompt; the hook removes them from the prompt.
        sliding (`bool`, *optional*, defaults to `False`): Whether the target has sliding-window layers.
        contract (`dict`, *optional*): The target's contract; the hook refuses another model. `None`: not checked.
    """

    def __init__(
        self,
        key_states: Sequence[torch.Tensor],
        value_states: Sequence[torch.Tensor],
        prefix_mask: torch.Tensor,
        prefix_ids: Sequence[int] = (),
        sliding: bool = False,
        contract: dict[str, Any] | None = None,
    ):
        super().__init__()
        self.is_fork = True  # open for writing, until filled
        for layer_idx, (keys, values) in enumerate(zip(key_states, value_states, strict=True)):
            self.update(keys, values, layer_idx)
        self.is_fork = False
        self.prefix_mask = prefix_mask
        self.prefix_ids = list(prefix_ids)
        self.sliding = sliding
        self.contract = contract
        # After a generate call: the last id of each row, which is in the text but not yet in the cache, [batch, 1],
        # and its mask (0 for a row that ended earlier).
        self.pending_ids: torch.Tensor | None = None
        self.pending_mask: torch.Tensor | None = None

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self._require_fork()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_mask_sizes(self, *args, **kwargs):
        self._require_fork()  # the first thing that a model asks of a cache
        return super().get_mask_sizes(*args, **kwargs)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._require_fork()
        super().batch_repeat_interleave(repeats)
        for name in _PER_ROW:
            part = getattr(self, name)
            setattr(self, name, None if part is None else part.repeat_interleave(repeats, dim=0))

    def _require_fork(self) -> None:
        if not self.is_fork:
            raise RuntimeError(
                "A TranslatedCache is read-only, so that it can be used again. Before target.generate(...), call "
                "attach(target) (translate(..., target=target) does, but not within the same expression); for a "
                "direct forward pass, pass cache.fork()."
            )

    def fork(self, repeats: int = 1) -> "TranslatedCache":
        """
        A copy that can be written to; tensors are shared until then. `repeats`: copies of each row (beams, sequences).
        """
        fork = copy.copy(self)
        fork.layers = [copy.copy(layer) for layer in self.layers]
        fork.is_fork = True
        if repeats > 1:
            fork.batch_repeat_interleave(repeats)
        return fork

    def rows(self, indices: torch.Tensor) -> "TranslatedCache":
        """The translated contexts of some rows, `indices` `[rows]`."""
        chosen = self.fork()
        for layer in chosen.layers:
            layer.keys, layer.values = (part[indices.to(part.device)] for part in (layer.keys, layer.values))
        for name in _PER_ROW:
            part = getattr(self, name)
            setattr(chosen, name, None if part is None else part[indices.to(part.device)])
        chosen.is_fork = False
        return chosen

    def packed(self) -> "TranslatedCache":
        """Without pads between the tokens of a row: they are moved to its left end, and dropped where all rows have
        one. Exact, since keys carry the positions of tokens, which pads do not count in."""
        if bool((self.prefix_mask.long().diff(dim=1) >= 0).all()) and bool(self.prefix_mask[:, 0].any()):
            return self
        order = self.prefix_mask.long().sort(dim=1, stable=True).indices
        order = order[:, order.shape[1] - int(self.prefix_mask.sum(dim=1).max()) :]
        packed = self.fork()
        for layer in packed.layers:
            index = order.to(layer.keys.device)[:, None, :, None]
            layer.keys, layer.values = (
                part.gather(2, index.expand(-1, part.shape[1], -1, part.shape[3]))
                for part in (layer.keys, layer.values)
            )
        packed.prefix_mask = self.prefix_mask.gather(1, order)
        packed.is_fork = False
        return packed

    @classmethod
    def concatenate(cls, caches: Sequence["TranslatedCache"]) -> "TranslatedCache":
        """One cache over the rows of several, left-padded to the longest."""
        length = max(cache.prefix_mask.shape[1] for cache in caches)
        joined = caches[0].fork()
        for layer_idx, layer in enumerate(joined.layers):
            for name in ("keys", "values"):
                parts = [getattr(cache.layers[layer_idx], name) for cache in caches]
                padded = [torch.nn.functional.pad(part, (0, 0, length - part.shape[2], 0)) for part in parts]
                setattr(layer, name, torch.cat(padded))
        masks = [cache.prefix_mask for cache in caches]
        joined.prefix_mask = torch.cat([torch.nn.functional.pad(mask, (length - mask.shape[1], 0)) for mask in masks])
        for name in ("pending_ids", "pending_mask"):
            parts = [getattr(cache, name) for cache in caches]
            setattr(joined, name, None if parts[0] is None else torch.cat(parts))
        joined.is_fork = False
        return joined

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)
