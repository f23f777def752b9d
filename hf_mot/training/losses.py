"""
The losses that a translator is trained with, and their weighted sum.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, one pair a compared layer; masks `[batch, seq]`; logits
`[scored tokens, vocab]`. Every loss is a mean over what it compares, so its size does not depend on the batch's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn import functional as F

from hf_mot.training.queries import LayerQueries


class TopLogProbs(NamedTuple):
    """The native target's likeliest tokens: ids and log-probabilities `[scored tokens, k]`."""

    ids: torch.Tensor
    values: torch.Tensor


@dataclass
class LossInputs:
    """
    What the losses compare; a part that no wanted loss reads may be `None`.

    Args:
        key_states, value_states (`tuple[torch.Tensor, ...]`): What the target has in its cache for the context:
            translated, or recomputed by the replay above the window. Position-free, or with the positions on, as the
            native ones.
        native_key_states, native_value_states (`tuple[torch.Tensor, ...]`): The native target's, of the same layers.
        mask (`torch.Tensor`): `[batch, seq]`, 1 on the context tokens that count (no pads, no prefix).
        logits (`torch.Tensor`, *optional*): `[scored tokens, vocab]`, after the translated context. Of a narrower
            vocabulary, where ids below are in its numbering too.
        native_logits (`torch.Tensor` or [`TopLogProbs`], *optional*): The native target's for the same tokens.
        labels (`torch.Tensor`, *optional*): `[scored tokens]`, the tokens that really follow.
        hidden_states, native_hidden_states (`tuple[torch.Tensor, ...]`, *optional*): Outputs of the decoder layers
            over the context, `[batch, seq, hidden]`.
        query_states (`tuple[LayerQueries, ...]`, *optional*): The native target's own queries over the context, of
            the compared layers; keys must then have their positions on.
        translated_layers (`int`, *optional*): The first so many compared layers are the window, whose states were
            translated; those after it were recomputed. By default all were translated.
        cc_start (`int`, *optional*, defaults to 0): First compared layer of `"cc"` and `"cc_hidden"`: 0 for T_start,
            1 for T_start + 1, the literal Eq. 14.
        variances (`dict[str, Sequence[float]]`, *optional*): Native variances a layer, as [`native_variances`] gives
            them, of `"keys"`, `"values"` and, for `"cc_hidden"`, `"hidden"`. By default those of this batch; give
            fixed ones where several batches must add up to one large batch.
        layer_weights (`Sequence`, *optional*): A weight for each compared layer, or a pair of them for its keys and
            its values. Only their ratios count.
    """

    key_states: tuple[torch.Tensor, ...]
    value_states: tuple[torch.Tensor, ...]
    native_key_states: tuple[torch.Tensor, ...]
    native_value_states: tuple[torch.Tensor, ...]
    mask: torch.Tensor
    logits: torch.Tensor | None = None
    native_logits: torch.Tensor | TopLogProbs | None = None
    labels: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    native_hidden_states: tuple[torch.Tensor, ...] | None = None
    query_states: tuple[LayerQueries, ...] | None = None
    translated_layers: int | None = None
    cc_start: int = 0
    variances: dict[str, Sequence[float]] | None = None
    layer_weights: Sequence[float | tuple[float, float]] | None = None


def native_variances(inputs: LossInputs) -> dict[str, list[float]]:
    """How much each layer's native states vary from token to token: per channel over the tokens that count, then the
    mean over channels; 1.0 where nothing varies."""
    parts = {"keys": inputs.native_key_states, "values": inputs.native_value_states}
    if inputs.native_hidden_states is not None:
        parts["hidden"] = inputs.native_hidden_states
    found = {}
    for name, layers in parts.items():
        rows = [_rows(states, inputs.mask).detach() for states in layers]
        variances = [row.var(0, correction=0).mean().item() if len(row) else 0.0 for row in rows]
        found[name] = [variance if variance > 0 else 1.0 for variance in variances]
    return found


def context_correction(inputs: LossInputs) -> torch.Tensor:
    """
    Context Correction in its KV form (paper Eq. 14): the cache **after** replay against the native one, in every layer
    from `cc_start` on, so in the window and in what the target recomputed above it. The squared error of a layer's
    keys (values) is divided by their native variance, so that no layer drowns the others.
    """
    return _state_error(inputs, slice(inputs.cc_start, None))


def context_reconstruction(inputs: LossInputs) -> torch.Tensor:
    """
    Context Reconstruction (LSC, 2601.06123): the **translated** states against the native ones, before any replay, so
    in the window alone. With every layer translated it equals `"cc"`; variances as there.
    """
    return _state_error(inputs, slice(inputs.translated_layers))


def hidden_correction(inputs: LossInputs) -> torch.Tensor:
    """Context Correction on hidden states (paper Eq. 6): decoder-layer outputs of the replay against the native ones,
    before the final norm, divided by each layer's native variance."""
    hidden, native = _needed(inputs, "cc_hidden", "hidden_states", "native_hidden_states")
    variances = (inputs.variances or native_variances(inputs))["hidden"]
    weights = [sum(pair) / 2 for pair in _layer_weights(inputs, len(hidden))]
    terms = [
        (weight, _mean_square(states, wanted, inputs.mask) / variance)
        for states, wanted, variance, weight in zip(hidden, native, variances, weights, strict=True)
    ]
    return _weighted_mean(terms[inputs.cc_start :])


def prompt_lm(inputs: LossInputs) -> torch.Tensor:
    """Prompt LM: the cross-entropy of the tokens that really follow."""
    logits, labels = _needed(inputs, "pl", "logits", "labels")
    return F.cross_entropy(logits.float(), labels.to(logits.device))


def distillation(inputs: LossInputs) -> torch.Tensor:
    """
    KL(native ‖ translated) of the next token, mean over the scored tokens. Of a native distribution known by its
    likeliest tokens alone, all others count as one: a lower bound, and exact if they are all there.
    """
    logits, native = _needed(inputs, "distill", "logits", "native_logits")
    log_probs = logits.float().log_softmax(-1)
    if isinstance(native, TopLogProbs):
        log_probs = _with_rest(log_probs.gather(-1, native.ids.to(logits.device).long()))
        native = _with_rest(native.values.to(logits.device).float())
    else:
        native = native.to(logits.device).float().log_softmax(-1)
    return F.kl_div(log_probs, native, reduction="batchmean", log_target=True)


def key_attention(inputs: LossInputs) -> torch.Tensor:
    """
    What the target's own queries do with the keys: KL(softmax(q·K) ‖ softmax(q·K̂)), mean over layers, query heads and
    the tokens that count. It weighs an error by how much it moves attention; a key that nobody looks at is free.

    Each query sees what it sees in the model (causal, sliding windows, no pads, the prefix too), with the model's
    scaling and soft cap, as [`queries.capture_queries`] recorded them. Slots that do not count are the native target's
    on both sides. Where query heads share a key head, each group of them reads its own.
    """
    (queries,) = _needed(inputs, "key_attention", "query_states")
    weights = [pair[0] for pair in _layer_weights(inputs, len(inputs.key_states))]
    counted = inputs.mask.bool()
    terms = []
    for layer, keys, native, weight in zip(queries, inputs.key_states, inputs.native_key_states, weights, strict=True):
        kept = counted.to(keys.device)
        native = native.to(keys).detach()
        keys = torch.where(kept[:, None, :, None], keys, native)
        log_probs, wanted = layer.log_attention(keys), layer.log_attention(native)
        # Slots that are not seen have -inf on both sides: nothing of the sum.
        divergence = (wanted.exp() * (wanted - log_probs).nan_to_num(0.0)).sum(-1)  # [batch, heads, seq]
        terms.append((weight, divergence.mean(1)[kept].mean()))
    return _weighted_mean(terms)


LOSSES: dict[str, Callable[[LossInputs], torch.Tensor]] = {
    "cc": context_correction,
    "cc_hidden": hidden_correction,
    "cr": context_reconstruction,
    "pl": prompt_lm,
    "distill": distillation,
    "key_attention": key_attention,
}

ON_PROMPT = ("pl", "distill")  # on the prompt's tokens; all others are on the context's


def check_losses(weights: dict[str, float]) -> None:
    """Refuses weights that name no loss, or are negative, or all 0. Raises `ValueError`."""
    unknown = sorted(set(weights) - set(LOSSES))
    if unknown:
        raise ValueError(f"`losses` names {unknown[0]!r}, which is none of {', '.join(LOSSES)}.")
    if not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
        raise ValueError(
            f"`losses` must have weights of 0 or more, at least one above 0 and all finite, got {weights}."
        )


def weighted_sum(
    inputs: LossInputs,
    weights: dict[str, float],
    layer_weights: Sequence[float | tuple[float, float]] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    The training loss.

    Args:
        inputs ([`LossInputs`]): What is compared.
        weights (`dict[str, float]`): Weight of each loss by its name in `LOSSES`; one with weight 0 is not computed.
        layer_weights (`Sequence`, *optional*): As in [`LossInputs`], whose own are the default.

    Returns:
        `tuple(torch.Tensor, dict[str, torch.Tensor])`: The sum, and each loss by its name, unweighted and detached.

    Raises:
        ValueError: An unknown loss, impossible weights, or inputs without what a loss compares.
    """
    check_losses(weights)
    if layer_weights is not None:
        inputs = replace(inputs, layer_weights=layer_weights)
    parts = {name: LOSSES[name](inputs) for name, weight in weights.items() if weight}
    device = next(iter(parts.values())).device
    total = sum(weights[name] * part.to(device) for name, part in parts.items())
    return total, {name: part.detach() for name, part in parts.items()}


def _state_error(inputs: LossInputs, layers: slice) -> torch.Tensor:
    variances = inputs.variances or native_variances(inputs)
    weights = _layer_weights(inputs, len(inputs.key_states))
    terms = []
    for side, (name, states, native) in enumerate(
        (
            ("keys", inputs.key_states, inputs.native_key_states),
            ("values", inputs.value_states, inputs.native_value_states),
        )
    ):
        each = list(zip(states, native, variances[name], weights, strict=True))
        for ours, wanted, variance, pair in each[layers]:
            terms.append((pair[side], _mean_square(ours, wanted, inputs.mask) / variance))
    return _weighted_mean(terms)


def _mean_square(states: torch.Tensor, native: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(_rows(states, mask), _rows(native, mask).to(states.device))


def _rows(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The tokens that count, in fp32: `[tokens, channels]`."""
    if states.dim() == 4:
        states = states.transpose(1, 2).flatten(2)  # [batch, seq, channels]
    return states[mask.to(states.device).bool()].float()


def _with_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some tokens, and that of all others together."""
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=1e-7)
    return torch.cat([log_probs, rest.log()], dim=-1)


def pairs_of_weights(layer_weights: Sequence[float | tuple[float, float]], layers: int) -> list[tuple[float, float]]:
    """The weights of each layer's keys and values. Raises `ValueError` for another number of them, or for one that
    is negative or not finite."""
    if len(layer_weights) != layers:
        raise ValueError(
            f"`layer_weights` must have a weight for each of the {layers} layers, got {len(layer_weights)}."
        )
    given = layer_weights.tolist() if isinstance(layer_weights, torch.Tensor) else layer_weights
    pairs = [(float(w), float(w)) if isinstance(w, int | float) else (float(w[0]), float(w[1])) for w in given]
    for layer_idx, pair in enumerate(pairs):
        for weight in pair:
            if not 0 <= weight < math.inf:
                raise ValueError(f"`layer_weights` must be finite and 0 or more, got {weight} for layer {layer_idx}.")
    return pairs


def _layer_weights(inputs: LossInputs, layers: int) -> list[tuple[float, float]]:
    return pairs_of_weights([1.0] * layers if inputs.layer_weights is None else inputs.layer_weights, layers)


def _weighted_mean(terms: list[tuple[float, torch.Tensor]]) -> torch.Tensor:
    total = sum(weight for weight, _ in terms)
    if not total > 0:
        raise ValueError(
            "`layer_weights` leave no layer to compare. Give one of the compared layers a weight above 0."
        )
    device = terms[0][1].device
    return sum(weight / total * term.to(device) for weight, term in terms if weight)


def _needed(inputs: LossInputs, loss: str, *names: str) -> list:
    for name in names:
        if getattr(inputs, name) is None:
            raise ValueError(f"The loss {loss!r} needs `{name}`, which is None. Fill it in, or leave the loss out.")
    return [getattr(inputs, name) for name in names]
