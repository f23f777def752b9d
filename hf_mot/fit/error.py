"""The prediction of a translator's error: which tokens it is likely to get wrong."""

from collections.abc import Sequence

import torch

from ..modeling_mot import MoTModel
from ..translators_output_mot import MoTOutput
from ..translators_widths_mot import Widths
from .pair import Pair
from .solve import RIDGES
from .statistics import Moments

_ROWS = 512  # at a time
_LEAST = 1e-12  # squared error; below, a token is simply right


@torch.no_grad()
def fit_error(
    model: MoTModel, pair: Pair, moments: Moments, x: torch.Tensor, y: torch.Tensor
) -> dict[str, float | None]:
    """
    Sets the weights of a translator's [`ErrorPrediction`]: ridge regression of the log of each row's mean squared
    error, in the units that the translator was fitted in (weights and metric included), on what is made of its inner
    channels.

    Args:
        model ([`MoTModel`]): A translator with the weights of a closed form.
        pair ([`Pair`]): Its models.
        moments ([`Moments`]): What it was solved from.
        x, y (`torch.Tensor`): Features and native states of rows that it was not fitted on (of those that it was, the
            errors are too small). The last quarter chooses the ridge strength.

    Returns:
        `dict`: `ridge`, and the `rank_correlation` of prediction and error on that last quarter, `None` where nothing
        varies.
    """
    module, features, log_error = model.translator, [], []
    for rows, native in zip(x.split(_ROWS), y.split(_ROWS), strict=True):
        read = _as_sequences(model, rows)
        translated = _as_rows(model, model(**read))
        error = pair.in_metric(translated - native).double() / moments.y_scale
        log_error.append(error.square().mean(1).clamp(min=_LEAST).log())
        features.append(module.error.features(module.inner(**read))[:, -1].double())
    features, log_error = torch.cat(features), torch.cat(log_error)
    cut = max(1, len(features) * 3 // 4)
    tried = _regressions(features[:cut], log_error[:cut], RIDGES)
    held = features[cut:], log_error[cut:]
    lost = {ridge: (held[0] @ weight + bias - held[1]).square().sum() for ridge, (weight, bias) in tried.items()}
    ridge = min(lost, key=lambda strength: lost[strength].item())
    correlation = _rank_correlation(held[0] @ tried[ridge][0], held[1])
    weight, bias = _regressions(features, log_error, [ridge])[ridge]
    module.error.weight.copy_(weight[None])
    module.error.bias.copy_(bias)
    return {"ridge": ridge, "rank_correlation": correlation}


def _as_sequences(model: MoTModel, rows: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Features of single tokens, `[rows, features]`, as what a translator reads of sequences that end with them: as
    long as its `source_window`, since of the tokens before it reads the source's states alone."""
    widths, window = Widths.of(model.config), model.config.source_window if model.config.source_layers else 1
    source, *beside = rows.split([window * widths.source_dim, widths.embeddings, widths.hidden], dim=1)
    read = {"source_states": source.unflatten(1, (window, -1)).flip(1) if widths.source_dim else None}
    for name, part in zip(("embeddings", "target_hidden_states"), beside, strict=True):
        states = torch.zeros(len(rows), window, part.shape[1])
        states[:, -1] = part
        read[name] = states if part.shape[1] else None
    return read


def _as_rows(model: MoTModel, output: MoTOutput) -> torch.Tensor:
    """What a translator makes of the last token of each sequence, `[rows, channels]`, ordered as a fit's outputs."""
    layers = output.by_layer(model.target_layers, model.config.restored_layers)
    parts = []
    for layer_idx in model.target_layers:
        if layer_idx in layers.attention_inputs:
            parts.append(layers.attention_inputs[layer_idx][:, -1])
        else:
            both = layers.key_states[layer_idx], layers.value_states[layer_idx]
            parts += [states[:, :, -1].flatten(1) for states in both]
    if output.hidden_states is not None:
        parts.append(output.hidden_states[:, -1])
    return torch.cat(parts, dim=1)


def _regressions(
    x: torch.Tensor, y: torch.Tensor, ridges: Sequence[float]
) -> dict[float, tuple[torch.Tensor, torch.Tensor]]:
    """Weights and bias of ridge regressions, by their strength relative to features of unit variance."""
    mean, scale = x.mean(0), x.std(0, correction=0)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    own = (x - mean) / scale
    covariance, right, found = own.T @ own / len(own), own.T @ (y - y.mean()) / len(own), {}
    for ridge in ridges:
        factor = torch.linalg.cholesky(covariance + ridge * torch.eye(len(covariance), dtype=own.dtype))
        weight = torch.cholesky_solve(right[:, None], factor)[:, 0] / scale
        found[ridge] = weight, y.mean() - mean @ weight
    return found


def _rank_correlation(one: torch.Tensor, other: torch.Tensor) -> float | None:
    ranks = torch.stack([values.argsort().argsort().double() for values in (one, other)])
    varied = one.numel() > 2 and one.min() < one.max() and other.min() < other.max()
    return round(torch.corrcoef(ranks)[0, 1].item(), 4) if varied else None
