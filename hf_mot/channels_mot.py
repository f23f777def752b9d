"""Channels (paper C.3): which source layer a target layer is translated from, and which contiguous target layers."""

from collections.abc import Callable


def depth_ratio(source_depth: int, target_depth: int) -> list[int]:
    """
    For each target layer the source layer of the same relative depth: `round(j * (Ls - 1) / (Lt - 1))` for layer j. A
    source layer serves several where the source is shallower.
    """
    steps = max(1, target_depth - 1)
    return [round(layer_idx * (source_depth - 1) / steps) for layer_idx in range(target_depth)]


def terminal(source_depth: int, target_depth: int) -> list[int]:
    """
    For each target layer the source layer that is as far from the last one (C2C's `last_aligned`); the lowest source
    layer serves all target layers that have none.
    """
    return [max(0, source_depth - target_depth + layer_idx) for layer_idx in range(target_depth)]


MAPPINGS: dict[str, Callable[[int, int], list[int]]] = {"depth_ratio": depth_ratio, "terminal": terminal}


def window_size(channel_ratio: float, source_depth: int, target_depth: int) -> int:
    """
    Channels of a window: the share `channel_ratio` of the paper's m = min(Ls, Lt) pairs, at least one. At 1.0 every
    target layer is covered, also by a shallower source.

    Raises:
        ValueError: For a ratio outside (0, 1].
    """
    if not 0 < channel_ratio <= 1:
        raise ValueError(f"`channel_ratio` must be above 0 and at most 1, got {channel_ratio}.")
    if channel_ratio == 1:
        return target_depth
    return max(1, round(channel_ratio * min(source_depth, target_depth)))


def candidate_windows(size: int, target_depth: int) -> list[range]:
    """Every contiguous window of `size` target layers, lowest first."""
    if not 1 <= size <= target_depth:
        raise ValueError(f"A window has 1 to {target_depth} layers, the target's, got {size}.")
    return [range(start, start + size) for start in range(target_depth - size + 1)]


def channels(
    source_depth: int,
    target_depth: int,
    *,
    channel_ratio: float = 1.0,
    start: int = 0,
    mapping: str = "depth_ratio",
) -> dict[str, list[int]]:
    """
    The channels of a window, as fields of [`MoTConfig`].

    Args:
        source_depth (`int`): Cache layers of the source (Ls).
        target_depth (`int`): Cache layers of the target (Lt).
        channel_ratio (`float`, *optional*, defaults to 1.0): Share of the layers that are translated.
        start (`int`, *optional*, defaults to 0): Lowest target layer of the window (T_start).
        mapping (`str`, *optional*, defaults to `"depth_ratio"`): Or `"terminal"`.

    Returns:
        `dict`: `source_layers`, one for each of `target_layers`, the window.

    Raises:
        ValueError: For an unknown mapping, or a window out of range.
    """
    if mapping not in MAPPINGS:
        raise ValueError(f"`mapping` must be one of {', '.join(MAPPINGS)}, got {mapping!r}.")
    windows = candidate_windows(window_size(channel_ratio, source_depth, target_depth), target_depth)
    if not 0 <= start < len(windows):
        raise ValueError(
            f"`start` must lie in 0..{len(windows) - 1} for a window of {len(windows[0])} of the target's "
            f"{target_depth} layers, got {start}."
        )
    pairs = MAPPINGS[mapping](source_depth, target_depth)
    return {"source_layers": [pairs[layer_idx] for layer_idx in windows[start]], "target_layers": [*windows[start]]}
