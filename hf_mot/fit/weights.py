"""What errors count: pieces (the keys or the values of one target layer) weighed by what their translation costs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..geometry_mot import ModelGeometry

STATES = ("keys", "values")
_FLOOR = 0.1  # of the mean cost: below lies noise, and no piece may come to count nothing
_LEAST_UNEXPLAINED = 1e-3


def output_blocks(geometry: ModelGeometry, restored: Collection[int] = ()) -> list[int]:
    """Widths of the blocks of a row of outputs: keys and values of each layer, or, of one of `restored`, one hidden
    state, that both are restored from or that goes into the layer."""
    blocks = []
    for layer_idx, layer in enumerate(geometry.layers):
        own = [layer.kv_heads * layer.key_dim, layer.kv_heads * layer.value_dim]
        blocks += [geometry.hidden_dim] if layer_idx in restored else own
    return blocks


def key_blocks(geometry: ModelGeometry, restored: Collection[int] = ()) -> dict[int, int]:
    """The layers whose keys are in a row of outputs, and the place of these among its blocks."""
    kept = [layer_idx for layer_idx in range(len(geometry.layers)) if layer_idx not in restored]
    return {layer_idx: 2 * layer_idx - sum(other < layer_idx for other in restored) for layer_idx in kept}


def piece_weights(
    sensitivity: Mapping[str, Any], target_contract: Mapping[str, Any], power: float = 1.0
) -> list[list[float]]:
    """
    Weights for [`fit`] from a measured sensitivity: since each piece has a variance of 1 a channel in the fit, a
    channel's squared error weighs what [`unit_costs`] says of its piece by the piece's number of channels.

    Args:
        sensitivity, target_contract (`Mapping`): As in [`unit_costs`].
        power (`float`, *optional*, defaults to 1.0): Exponent of the weights: 0 weighs all channels alike, as a fit
            does by itself; between, weights are moderate, as for costs that are not measured well.

    Returns:
        `list[list[float]]`: `[keys, values]` per target layer, with a mean of 1 over channels.

    Raises:
        `ValueError`: as [`unit_costs`], or a negative power.
    """
    _check_power(power)
    widths = torch.tensor(output_blocks(ModelGeometry.from_dict(target_contract["geometry"])), dtype=torch.float64)
    weights = (unit_costs(sensitivity, target_contract).flatten() / widths) ** power
    weights = weights / ((weights * widths).sum() / widths.sum())
    return weights.view(-1, 2).tolist()


def loss_weights(
    sensitivity: Mapping[str, Any], target_contract: Mapping[str, Any], power: float = 1.0
) -> list[tuple[float, float]]:
    """
    Weights for the `layer_weights` of [`MoTTrainer`] from a measured sensitivity: the losses on states compare a whole
    piece in units of its variance, so it weighs what [`unit_costs`] says. Arguments and errors as in
    [`piece_weights`].

    Returns:
        `list[tuple[float, float]]`: `(keys, values)` per target layer, with a mean of 1.
    """
    _check_power(power)
    weights = unit_costs(sensitivity, target_contract) ** power
    return [(keys, values) for keys, values in (weights / weights.mean()).tolist()]


def unit_costs(sensitivity: Mapping[str, Any], target_contract: Mapping[str, Any]) -> torch.Tensor:
    """
    What a unit of unexplained variance costs in each piece.

    A piece whose translation left the share u of its variance unexplained and cost c is taken to cost c / u per unit
    of it, so that the sum over pieces of (c / u) times what a translation leaves unexplained estimates its cost.

    Args:
        sensitivity (`Mapping`): What `analysis.measure_sensitivity` returned. The cost of a piece is the mean of
            `lost` over its measures (of `cost`, in nats, where one has no `lost`), but at least a tenth of the mean
            over pieces.
        target_contract (`Mapping`): The contract of the target: sensitivities of others are refused.

    Returns:
        `torch.Tensor`: `[target layers, 2]`, of keys and of values, in fp64.

    Raises:
        `ValueError`: another target, layers that are missing, or no cost anywhere.
    """
    missing = [key for key in ("measures", "unexplained", "target_fingerprint") if key not in sensitivity]
    if missing:
        raise ValueError(
            f"`sensitivity` lacks {', '.join(missing)}. Pass what hf-mot analyze --sensitivity --json has written."
        )
    if not set(sensitivity["target_fingerprint"].items()) & set(target_contract["fingerprint"].items()):
        raise ValueError("`sensitivity` was measured on another target. Measure it on the target of this translator.")
    measures = sensitivity["measures"].values()
    key = "lost" if all("lost" in figures for figures in measures) else "cost"
    costs: dict[tuple[int, str], list[float]] = {}
    for figures in measures:
        for piece in figures["pieces"]:
            costs.setdefault((piece["layer"], piece["states"]), []).append(piece[key]["value"])
    unexplained = {(piece["layer"], piece["states"]): piece["value"] for piece in sensitivity["unexplained"]}
    geometry = ModelGeometry.from_dict(target_contract["geometry"])
    pieces = [(layer_idx, states) for layer_idx in range(len(geometry.layers)) for states in STATES]
    lacking = sorted({piece[0] for piece in pieces if piece not in costs or piece not in unexplained})
    if lacking:
        raise ValueError(f"`sensitivity` lacks the target's layers {lacking}. Measure it with all layers translated.")
    cost = torch.tensor([sum(costs[piece]) / len(costs[piece]) for piece in pieces], dtype=torch.float64).clamp(min=0)
    if not cost.mean() > 0:
        raise ValueError("`sensitivity` finds no cost in any piece: there is nothing to weigh by. Leave it out.")
    shares = torch.tensor([unexplained[piece] for piece in pieces], dtype=torch.float64).clamp(min=_LEAST_UNEXPLAINED)
    return (cost.clamp(min=_FLOOR * cost.mean()) / shares).view(-1, 2)


def _check_power(power: float) -> None:
    if not power >= 0:
        raise ValueError(f"`sensitivity_power` must be at least 0, got {power}.")


def channel_weights(
    weights: Sequence[Sequence[float]], geometry: ModelGeometry, restored: Collection[int] = ()
) -> torch.Tensor:
    """
    The weight of each output channel, `[outputs]` in fp64.

    Args:
        weights (`Sequence[Sequence[float]]`): `[keys, values]` per target layer.
        geometry ([`ModelGeometry`]): The target's.
        restored (`Collection[int]`, *optional*, defaults to `()`): Layers of which one state is fitted, which weighs
            what keys and values do in the mean.

    Raises:
        `ValueError`: not one pair of positive, finite weights a layer.
    """
    depth = len(geometry.layers)
    if len(weights) != depth or any(len(pair) != len(STATES) for pair in weights):
        raise ValueError(f"`piece_weights` must hold [keys, values] for each of {depth} layers, got {weights!r}.")
    pairs = [[sum(pair) / 2] if layer_idx in restored else pair for layer_idx, pair in enumerate(weights)]
    flat = torch.tensor([own for pair in pairs for own in pair], dtype=torch.float64)
    if not (torch.isfinite(flat).all() and (flat > 0).all()):
        raise ValueError(f"`piece_weights` must be positive and finite, got {weights!r}.")
    return flat.repeat_interleave(torch.tensor(output_blocks(geometry, restored)))
