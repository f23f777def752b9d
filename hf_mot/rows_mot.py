"""Rows of unequal length in one tensor. Ids and masks are `[batch, seq]`; rows are left-padded."""

from collections.abc import Sequence

import torch
from torch.nn import functional as F


def left_pad(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids as one left-padded tensor and its mask, `[batch, longest]`."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, values in enumerate(rows):
        ids[row, longest - len(values) :] = torch.tensor(values, dtype=torch.long)
        mask[row, longest - len(values) :] = 1
    return ids, mask


def unpad(ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """The ids of each row without pads."""
    if mask is None:
        return ids.tolist()
    return [
        [token_id for token_id, kept in zip(row, kept_row, strict=True) if kept]
        for row, kept_row in zip(ids.tolist(), mask.tolist(), strict=True)
    ]


def positions_from_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position ids of padded rows: 0 at the first real token; pads before it get 0."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def causal_window(states: torch.Tensor, mask: torch.Tensor | None, window: int) -> torch.Tensor:
    """
    Each token's own states and those of the `window - 1` tokens before it, side by side, the own ones first.

    Args:
        states (`torch.Tensor`): `[batch, seq, dim]`.
        mask (`torch.Tensor`, *optional*): `[batch, seq]`, 0 on pads, which read as zeros, as does what lies before
            the row.
        window (`int`): Number of tokens, the own one included.

    Returns:
        `torch.Tensor`: `[batch, seq, window * dim]`.
    """
    shifted = [states if mask is None else states * mask[..., None].to(states.dtype)]
    for _ in range(window - 1):
        shifted.append(F.pad(shifted[-1][:, :-1], (0, 0, 1, 0)))
    return torch.cat(shifted, dim=-1)


def check_rows(ids: torch.Tensor, mask: torch.Tensor | None, argument: str, mask_argument: str) -> None:
    """Refuses ids that are not `[batch, seq]` integers, and a mask of another shape or with other values than 0 and 1.

    Raises:
        `ValueError`: names the argument, the rule and what came.
    """
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        came = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(f"`{argument}` must be a tensor of ids [batch, seq], got {came}.")
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or len(mask) != len(ids):
        came = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"`{mask_argument}` must be a tensor [batch, seq] with {len(ids)} rows, got {came}.")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"`{mask_argument}` must hold 0 (pad) and 1 (token) alone.")
