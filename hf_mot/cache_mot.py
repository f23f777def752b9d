"""TranslatedCache: a target's cache that another model has filled.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`.
"""

import copy
from collections.abc import Sequence

import torch
from transformers import DynamicCache


class TranslatedCache(DynamicCache):
    """
    A cache of full-length layers in a target's cache space. Generation never writes into it: the `generate` hook (see
    `generation_mot.attach`) works on a fork, so one translated cache serves any number of prompts.

    Args:
        key_states (`Sequence[torch.Tensor]`): Keys per target layer, position encoding on.
        value_states (`Sequence[torch.Tensor]`): Values per target layer.
        prefix_mask (`torch.Tensor`): `[batch, seq]`; 0 on the pads of left-padded rows.
        bos_token_id (`int`, *optional*): The BOS that the cache starts with and that the target's tokenizer also puts
            before each prompt; the hook removes it from the prompt.
        sliding (`bool`, *optional*, defaults to `False`): Whether the target has sliding-window layers.
    """

    def __init__(
        self,
        key_states: Sequence[torch.Tensor],
        value_states: Sequence[torch.Tensor],
        prefix_mask: torch.Tensor,
        bos_token_id: int | None = None,
        sliding: bool = False,
    ):
        super().__init__()
        self.is_fork = True  # open for writing, until filled
        for layer_idx, (keys, values) in enumerate(zip(key_states, value_states, strict=True)):
            self.update(keys, values, layer_idx)
        self.is_fork = False
        self.prefix_mask = prefix_mask
        self.bos_token_id = bos_token_id
        self.sliding = sliding
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
        for name in ("prefix_mask", "pending_ids", "pending_mask"):
            rows = getattr(self, name)
            setattr(self, name, None if rows is None else rows.repeat_interleave(repeats, dim=0))

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

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)
