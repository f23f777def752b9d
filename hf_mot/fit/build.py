"""From moments to translators: what is solved becomes weights, of a translator and of its control."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..configuration_mot import MoTConfig
from ..modeling_mot import MoTModel
from ..translators_widths_mot import Widths
from .error import fit_error
from .pair import Pair
from .ranks import Budget
from .solve import LinearMap, choose_ridge, solve, solve_windowed
from .statistics import Moments


def solve_both(
    pair: Pair, moments: Moments, held_x, held_y, config: MoTConfig, rank: int | None, seed: int, budget: Budget | None
):
    """The translator, and from the same moments its control that reads all but the source: the target's token
    embeddings, and its hidden state where the translator does."""
    translator, choices = _solve_one(pair, moments, held_x, held_y, config, rank, seed, budget)
    embedding_dim, hidden_dim = pair.beside_dims
    beside = config.embedding_window * embedding_dim + hidden_dim
    if not beside:
        return translator, None, choices
    columns = torch.arange(len(moments.xx) - beside, len(moments.xx))
    config = pair.config(source_layers=[], embedding_window=config.embedding_window, key_norms=config.key_norms)
    budget = None if budget is None else replace(budget, source_window=1)
    no_source, own = _solve_one(pair, moments.select(columns), held_x[:, columns], held_y, config, rank, seed, budget)
    return translator, no_source, {**choices, "no_source": own}


def _solve_one(pair, moments: Moments, held_x, held_y, config: MoTConfig, rank, seed: int, budget: Budget | None):
    ridge, curve = choose_ridge(moments, held_x, pair.in_metric(held_y), seed)
    read = Widths.of(config)
    rank = None if rank is None else min(rank, read.read_dim, read.output_dim)
    if config.source_window == 1:
        solution = solve(moments, ridge, rank, seed, budget)
    else:
        solution = solve_windowed(moments, read.source_dim, config.source_window, ridge, rank, seed, budget)
    solution = solution if pair.key_metric is None else pair.key_metric.undo(solution)
    if pair.key_lengths is not None:
        lengths, key_weights = pair.key_lengths
        solution = lengths.lengthened(solution, key_weights, held_x, held_y)
    form: dict[str, Any] = {"rank": None if solution.up is None else len(solution.up)}
    if solution.piece_ranks is not None:
        ranks = iter(solution.piece_ranks)
        form["piece_ranks"] = [[next(ranks) for _ in dims] for dims in read.target]
    shared = {
        name: getattr(config, name) for name in ("source_layers", "source_window", "embedding_window", "key_norms")
    }
    own = pair.config(**shared, **form, predicts_error=form["rank"] is not None)
    model, choices = build_translator(own, solution), {**form, "ridge": ridge, "ridge_curve": curve}
    if pair.key_lengths is not None:
        set_key_norms(model, pair.key_lengths[1])
    if own.predicts_error:
        choices["error_prediction"] = fit_error(model, pair, moments, held_x, held_y)
    return model, choices


def build_translator(config: MoTConfig, solution: LinearMap) -> MoTModel:
    """A translator with the weights of a closed-form solution; of a low rank, each piece in units of how much of it
    varies with what is read."""
    model = MoTModel(config)
    module = model.translator
    up, bias = solution.up, solution.bias
    if up is not None:
        pieces = up.square().sum(0).split([*sum(Widths.of(config).target, ())])
        scale = torch.cat([piece.mean().sqrt().clamp(min=1e-6).expand_as(piece) for piece in pieces])
        up, bias = up / scale, (bias + solution.center @ up) / scale
    source_dim = 0 if module.source_in is None else module.source_in.in_features
    with torch.no_grad():
        if module.source_in is not None:
            module.source_in.weight.copy_(solution.down[:source_dim].T)
        beside = solution.down[config.source_window * source_dim :]
        embedding_dim = 0 if module.embedding_in is None else module.embedding_in.in_features
        for project, own in (
            (module.embedding_in, beside[:embedding_dim]),
            (module.hidden_in, beside[embedding_dim:]),
        ):
            if project is not None:
                project.weight.copy_(own.T)
        if module.source_before is not None:  # those of the tokens before are in the span of the own one's
            own, *before = solution.down[: config.source_window * source_dim].split(source_dim)
            through = torch.linalg.lstsq(own, torch.cat(before, dim=1)).solution  # [rank, (window - 1) * rank]
            module.source_before.weight.copy_(torch.cat(through.split(len(through), dim=1)).T)
        if up is not None:
            module.center.copy_(solution.center)
            module.scale.copy_(scale)
        if solution.piece_ranks is not None:
            module.up.load(up.T)
        elif up is not None:
            module.up.weight.copy_(up.T)
        module.bias.copy_(bias)
    return model.eval()


def set_key_norms(model: MoTModel, key_weights: Sequence[torch.Tensor]) -> None:
    """Sets the weighted lengths of a translator's keys, from weights `[kv_heads, key_dim]` a layer that it writes keys
    of."""
    written = [layer_idx for layer_idx in model.target_layers if layer_idx not in model.config.restored_layers]
    with torch.no_grad():
        for layer_idx, norm in model.key_norms.items():
            norm.scale.copy_(key_weights[written.index(int(layer_idx))].sqrt())
