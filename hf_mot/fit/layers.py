"""The choice of source layers: greedy, on random projections of a sample's states."""

import math
from collections.abc import Iterable

import torch

from ..modeling_mot import MoTModel
from .pair import Pair
from .solve import choose_layers, output_sketch
from .windows import Window

_LAYER_SKETCH = 96  # random channels that stand for one source layer while layers are chosen


def choose_source_layers(
    pair: Pair,
    sample: Iterable[list[Window]],
    count: int,
    embedding_window: int,
    seed: int,
    weights: torch.Tensor | None = None,
) -> list[int]:
    """Source layers by greedy selection on random projections of a sample's states; `weights` `[outputs]` are what
    the squared errors of outputs count."""
    depth = len(pair.source_geometry.layers)
    if count >= depth:
        return list(range(depth))
    shell = MoTModel(pair.config(source_layers=list(range(depth)), rank=1, embedding_window=embedding_window))
    widths = [layer.width for layer in pair.source_geometry.layers]
    embedding_dim, hidden_width = pair.beside_dims
    embedding_width = embedding_window * embedding_dim
    generator = torch.Generator().manual_seed(seed)

    def projection(width: int, to: int) -> torch.Tensor:
        return torch.randn(width, min(width, to), generator=generator) / math.sqrt(width)

    projections = [projection(width, _LAYER_SKETCH) for width in widths]
    embedding_projection = projection(embedding_width, 4 * _LAYER_SKETCH)
    hidden_projection = projection(hidden_width, 4 * _LAYER_SKETCH) if hidden_width else torch.zeros(0, 0)
    outputs = pair.output_blocks
    sketch = output_sketch(sum(outputs), seed).float()
    sketched, scale = [], None
    for batch in sample:
        x, y = pair.rows(shell, [window.text for window in batch])
        y = pair.in_metric(y)
        if scale is None:
            x_shift, x_scale = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
            variances = y.var(0, correction=0).split(outputs)
            scale = torch.cat([v.mean().sqrt().clamp(min=1e-12).expand_as(v) for v in variances])
            scale = scale if weights is None else scale / weights.sqrt().to(scale)
        x = (x - x_shift) / x_scale
        *pieces, embeddings, hidden = x.split([*widths, embedding_width, hidden_width], dim=1)
        layers = [piece @ p for piece, p in zip(pieces, projections, strict=True)]
        beside = torch.cat([embeddings @ embedding_projection, hidden @ hidden_projection], dim=1)
        sketched.append((layers, beside, (y / scale) @ sketch))
    if sum(len(y) for _, _, y in sketched) < 8:
        raise ValueError("`documents` gave fewer than 8 tokens to choose source layers on. Pass more text.")
    blocks = [torch.cat([layers[layer_idx] for layers, _, _ in sketched]) for layer_idx in range(depth)]
    return choose_layers(
        blocks, torch.cat([base for _, base, _ in sketched]), torch.cat([y for _, _, y in sketched]), count
    )
