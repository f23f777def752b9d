"""A metric for errors of keys: what the target's own queries make of them.

A key is read through its scores alone. Of a key with the position-free error Δ at position j, a query q at i (with its
position on) sees the score error q·R(j)Δ = (R(j)⁻¹q)·Δ, where R(j) is the rotary encoding. So the expected squared
score error is ΔᵀAΔ with A = E[(R(j)⁻¹q)(R(j)⁻¹q)ᵀ] over the queries and the keys that they can see. It is estimated
as it stands: each query of real text is turned back by the position of one key drawn from those it sees, j ≤ i within
the layer's window. Pairs of channels that turn fast come out isotropic and uncorrelated with others by that; those
that hardly turn within a context keep the full structure of the queries. One A for each head of keys; the heads of
queries that share it are summed. Softmax is left out of account: all keys that are seen count alike.

Shapes: queries `[batch, heads, seq, head_dim]`, positions and masks `[batch, seq]`, outputs `[rows, channels]`.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..capture_mot import prefill
from ..geometry_mot import ModelGeometry
from ..rows_mot import positions_from_mask
from .solve import LinearMap
from .weights import key_blocks, output_blocks

KEY_METRICS = ("plain", "query")
_SHRINKAGE = 0.05  # towards the plain metric, which keeps directions that no query looks at from being free

Listener = Callable[[int, torch.Tensor, int | None], None]  # layer_idx, queries, sliding window


class KeyMetric:
    """
    Changes of coordinates in which the plain squared error is that of the metric. Its scale is of no matter: a fit
    brings each layer's keys to the same variance afterwards.

    Args:
        geometry ([`ModelGeometry`]): The target's, with the layers that are fitted alone.
        moments (`Sequence[torch.Tensor]`): Per layer with keys the second moments A, `[kv_heads, key_dim, key_dim]`.
        restored (`Collection[int]`, *optional*, defaults to `()`): Layers of which no keys are fitted, see
            [`output_blocks`].
    """

    def __init__(self, geometry: ModelGeometry, moments: Sequence[torch.Tensor], restored: Collection[int] = ()):
        self.places, self.blocks = key_blocks(geometry, restored), output_blocks(geometry, restored)
        self.roots, self.inverses = [], []
        for own in moments:
            own = own.double()
            mean = own.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]  # over the channels of a head
            own = (1 - _SHRINKAGE) * own + _SHRINKAGE * mean * torch.eye(own.shape[1], dtype=own.dtype)
            values, vectors = torch.linalg.eigh(own)
            for into, power in ((self.roots, 0.5), (self.inverses, -0.5)):
                into.append(vectors * values[:, None] ** power @ vectors.mT)

    def apply(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs `[rows, channels]` in the coordinates of the metric."""
        return self._turn(outputs, self.roots)

    def undo(self, solution: LinearMap) -> LinearMap:
        """A map onto outputs in these coordinates as one onto the target's own."""
        bias = self._turn(solution.bias[None], self.inverses)[0]
        if solution.up is None:
            return replace(solution, down=self._turn(solution.down, self.inverses), bias=bias)
        return replace(solution, up=self._turn(solution.up, self.inverses), bias=bias)

    def _turn(self, outputs: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = list(outputs.split(self.blocks, dim=1))
        for place, own in zip(self.places.values(), matrices, strict=True):
            heads = parts[place].unflatten(1, own.shape[:2])  # [rows, kv_heads, key_dim]
            parts[place] = torch.einsum("rhd,hde->rhe", heads, own.to(outputs)).flatten(1)
        return torch.cat(parts, dim=1)


class QueryMoments:
    """
    Accumulates the second moments A of a target's queries, as the keys see them.

    Args:
        geometry ([`ModelGeometry`]): The target's.
        prefix (`int`): Number of leading special tokens, whose keys are native.
        seed (`int`, *optional*, defaults to 0): Of the draw of keys.
    """

    def __init__(self, geometry: ModelGeometry, prefix: int, seed: int = 0):
        self.geometry, self.prefix = geometry, prefix
        self.generator = torch.Generator().manual_seed(seed)
        self.sums: list[torch.Tensor | None] = [None] * len(geometry.layers)

    def add(self, target: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Runs the target over left-padded rows."""
        positions = positions_from_mask(mask)
        kept = mask.bool() & (positions >= self.prefix)

        def listen(layer_idx: int, queries: torch.Tensor, window: int | None) -> None:
            if layer_idx < len(self.sums):  # layers above read the keys of lower ones
                self._add_layer(layer_idx, queries.cpu(), positions, kept, window)

        with listening_to_queries(target, listen):
            prefill(target, input_ids, mask)

    def _add_layer(self, layer_idx, queries, positions, kept, window) -> None:
        layer = self.geometry.layers[layer_idx]
        heads, rest = divmod(queries.shape[1], layer.kv_heads)
        if rest or queries.shape[-1] != layer.key_dim or layer.rotated != "keys":
            raise ValueError(
                f"`key_metric` is 'query', but the queries of the target's layer {layer_idx} "
                f"({queries.shape[1]} × {queries.shape[-1]}) do not meet its cached keys ({layer.kv_heads} × "
                f"{layer.key_dim}) as they are. Use key_metric='plain'."
            )
        lowest = torch.full_like(positions, self.prefix)
        if window is not None:
            lowest = torch.maximum(lowest, positions - window + 1)
        draw = torch.rand(positions.shape, generator=self.generator)
        key_positions = torch.where(kept, lowest + (draw * (positions - lowest + 1)).long(), 0)
        seen, _ = self.geometry.strip_positions(layer_idx, queries, queries, key_positions)
        seen = (
            seen.transpose(1, 2)[kept].unflatten(1, (layer.kv_heads, heads)).double()
        )  # [tokens, kv_heads, heads, d]
        sums = torch.einsum("tghd,tghe->gde", seen, seen)
        self.sums[layer_idx] = sums if self.sums[layer_idx] is None else self.sums[layer_idx] + sums

    def metric(
        self, fitted: ModelGeometry | None = None, first_layer: int = 0, restored: Collection[int] = ()
    ) -> KeyMetric:
        """The metric of the layers of `fitted`, which are those from `first_layer` up, but for those of these that are
        `restored`, counted from there. Raises `ValueError` where the target did not show its queries."""
        blind = [layer_idx for layer_idx, sums in enumerate(self.sums) if sums is None]
        if blind:
            raise ValueError(
                f"`key_metric` is 'query', but the target's layers {blind} do not run through the attention interface "
                "of transformers, by which queries are read. Use key_metric='plain'."
            )
        fitted = self.geometry if fitted is None else fitted
        sums = [self.sums[first_layer + place] for place in key_blocks(fitted, restored)]
        return KeyMetric(fitted, sums, restored)


_LISTENING: ContextVar[tuple[str, Listener]] = ContextVar("_LISTENING")


def _attend_and_tell(module, query, key, value, attention_mask, **kwargs):
    """An attention function: shows the queries, then does what the model would have done."""
    implementation, listener = _LISTENING.get()
    listener(module.layer_idx, query, kwargs.get("sliding_window"))
    family = sys.modules[type(module).__module__]
    attend = family.ALL_ATTENTION_FUNCTIONS.get_interface(implementation, family.eager_attention_forward)
    return attend(module, query, key, value, attention_mask, **kwargs)


@contextmanager
def listening_to_queries(model: PreTrainedModel, listener: Listener) -> Iterator[None]:
    """While open, `listener` gets the index, the queries (positions on, `[batch, heads, seq, head_dim]`) and the
    sliding window, if any, of each attention layer that runs."""
    implementation, name = model.config._attn_implementation, "hf_mot_queries"
    AttentionInterface.register(name, _attend_and_tell)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    token = _LISTENING.set((implementation, listener))
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
        _LISTENING.reset(token)
