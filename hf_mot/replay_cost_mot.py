"""FLOPs of what the target computes, by its geometry alone."""

from collections.abc import Sequence

from .geometry_mot import ModelGeometry


def native_flops(geometry: ModelGeometry, context_length: int) -> int:
    """FLOPs (2 × MACs) of a causal prefill without LM head: every decoder weight once a token, and per layer the
    scores and the weighted sum over the tokens before (windows not subtracted)."""
    attention = 2 * len(geometry.layers) * geometry.attention_dim * context_length * (context_length + 1) // 2
    return 2 * (geometry.decoder_parameters * context_length + attention)


def bottom_flops(geometry: ModelGeometry, context_length: int, layers: int) -> int:
    """FLOPs (2 × MACs) of the keys and values of the first `layers` layers: those below the last of them, each with an
    equal share of `native_flops`, and of the last its projections, queries included."""
    if layers == 0:
        return 0
    below = native_flops(geometry, context_length) * (layers - 1) // len(geometry.layers)
    return below + projection_flops(geometry, context_length, layers - 1)


def resume_flops(geometry: ModelGeometry, context_length: int, layer_idx: int) -> int:
    """FLOPs (2 × MACs) of the layers from `layer_idx` up as far as the keys and values of the last: those below that,
    each with an equal share of `native_flops`, and of it its projections."""
    depth = len(geometry.layers)
    run = native_flops(geometry, context_length) * (depth - 1 - layer_idx) // depth
    return run + projection_flops(geometry, context_length, depth - 1)


def projection_flops(geometry: ModelGeometry, context_length: int, layer_idx: int) -> int:
    """FLOPs (2 × MACs) of what makes the keys and values of a layer of the input of its attention: its projections,
    queries included."""
    width = geometry.layers[layer_idx].width + geometry.attention_dim
    return 2 * context_length * (geometry.hidden_dim or geometry.embedding_dim) * width


def unseen_flops(geometry: ModelGeometry, context_length: int, sparse: int) -> int:
    """FLOPs (2 × MACs) that a layer saves by attending to `sparse` positions a token alone."""
    seen = min(context_length, sparse)
    seen = seen * (seen + 1) // 2 + (context_length - seen) * seen
    return 4 * geometry.attention_dim * (context_length * (context_length + 1) // 2 - seen)


def assumed_windows(geometry: ModelGeometry) -> Sequence[int | None]:
    """Windows of a target's layers. Where its contract does not tell them, all are taken to be short: costs are then
    those of `full`, which is an upper bound."""
    return geometry.windows or [0 if geometry.sliding else None] * len(geometry.layers)
