"""The translator modules: tensors in, tensors out. They know nothing of models, tokenizers or caches.

Shapes: source states `[batch, seq, source width]`, embeddings `[batch, seq, embedding width]` (the causal window of
the target's token embeddings, own token first), output `[batch, seq, target width]`: position-free keys, raw values.
"""

import torch
from torch import nn


class ReducedRankTranslator(nn.Module):
    """
    A linear map from all inputs to the keys and values of all target layers through one shared down-projection
    (reduced-rank regression). Its weights come from a closed-form fit, centring and scaling folded in.

    Args:
        source_dim (`int`): Source width; 0 for a translator that reads no source.
        embedding_dim (`int`): Width of the embedding window; 0 for none.
        output_dim (`int`): Target width, keys and values of all layers.
        rank (`int`, *optional*): Width of the down-projection; `None` for a full-rank map.
    """

    def __init__(self, source_dim: int, embedding_dim: int, output_dim: int, rank: int | None):
        super().__init__()
        inner = output_dim if rank is None else rank
        self.source_in = nn.Linear(source_dim, inner, bias=False) if source_dim else None
        self.embedding_in = nn.Linear(embedding_dim, inner, bias=False) if embedding_dim else None
        self.up = nn.Identity() if rank is None else nn.Linear(rank, output_dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(output_dim))

    def forward(self, source_states: torch.Tensor | None, embeddings: torch.Tensor | None) -> torch.Tensor:
        inner = 0
        if self.source_in is not None:
            inner = inner + self.source_in(source_states)
        if self.embedding_in is not None:
            inner = inner + self.embedding_in(embeddings)
        return self.up(inner) + self.bias


class IdentityTranslator(nn.Module):
    """The oracle: hands the states of the target itself through. Its output must give the target's own logits."""

    def forward(self, source_states: torch.Tensor | None, embeddings: torch.Tensor | None) -> torch.Tensor:
        return source_states


def embedding_window(embeddings: torch.Tensor, mask: torch.Tensor, window: int) -> torch.Tensor:
    """
    Each token's own embedding and those of the `window - 1` tokens before it, side by side.

    Args:
        embeddings (`torch.Tensor`): Token embeddings `[batch, seq, dim]`.
        mask (`torch.Tensor`): `[batch, seq]`, 0 on pads; they, and what lies before the row, read as zeros.
        window (`int`): Number of tokens, the own one included.

    Returns:
        `torch.Tensor`: `[batch, seq, window * dim]`.
    """
    embeddings = embeddings * mask[..., None].to(embeddings.dtype)
    shifted = [embeddings]
    for _ in range(window - 1):
        shifted.append(nn.functional.pad(shifted[-1][:, :-1], (0, 0, 1, 0)))
    return torch.cat(shifted, dim=-1)
