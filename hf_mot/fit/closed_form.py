"""The closed-form fit: one pass over text, then linear algebra. `fit` is the page to read."""

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..alignment_mot import tokenize_with_spans
from ..configuration_mot import MoTConfig
from ..modeling_mot import MoTModel
from ..rows_mot import left_pad
from ..translators_widths_mot import Widths
from ..versions import versions
from .error import fit_error
from .gathered import Gathered, gather, gathering_settings
from .key_metric import KEY_METRICS, KeyMetric, QueryMoments
from .layers import choose_source_layers
from .pair import SAMPLE_TOKENS, Pair, held_out_rows, pair_windows
from .ranks import Budget
from .solve import LinearMap, choose_ridge, solve, solve_windowed
from .statistics import Moments
from .weights import channel_weights
from .windows import Window, batched

DEFAULT_RANK = 1024
DEFAULT_SOURCE_LAYERS = 10
DEFAULT_SOURCE_WINDOW = 2  # model_cards/results/source_window
DEFAULT_EMBEDDING_WINDOW = 5
DEFAULT_TOKENS = 200_000


@dataclass
class FitResult:
    """
    What a fit gives.

    Args:
        translator ([`MoTModel`]): The translator.
        no_source ([`MoTModel`] or `None`): Its control: the same fit without the source's states; `None` where there
            is neither an embedding window nor the target's hidden state to read instead.
        report (`dict`): How it was fitted; also `translator.fit_report`.
    """

    translator: MoTModel
    no_source: MoTModel | None
    report: dict[str, Any]


def fit(
    documents: Iterable[str],
    *,
    source: PreTrainedModel,
    target: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    method: str = "reduced_rank",
    rank: int | None = DEFAULT_RANK,
    num_source_layers: int = DEFAULT_SOURCE_LAYERS,
    source_layers: list[int] | None = None,
    source_window: int | None = None,
    embedding_window: int = DEFAULT_EMBEDDING_WINDOW,
    target_hidden_layer: int | None = None,
    restored_layers: Sequence[int] = (),
    resume_layer: int | None = None,
    piece_weights: Sequence[Sequence[float]] | None = None,
    key_metric: str = "plain",
    key_norms: bool = True,
    max_parameters: int | None = None,
    flops_share: float | None = None,
    statistics: str | os.PathLike | None = None,
    max_tokens: int = DEFAULT_TOKENS,
    batch_tokens: int = 2048,
    held_out_documents: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> FitResult:
    """
    Fits a closed-form translator for a pair of models on text.

    Args:
        documents (`Iterable[str]` or a `datasets` dataset with a column `text`): Streamed, shuffled within a buffer of
            10,000 documents.
        source, target (`PreTrainedModel`): The frozen models.
        source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`): Their fast tokenizers.
        method (`str`, *optional*, defaults to `"reduced_rank"`): The only closed form so far.
        rank (`int`, *optional*, defaults to 1024): Width of the shared down-projection; `None` for full rank. Within a
            budget, the most that it may be.
        num_source_layers (`int`, *optional*, defaults to 10): Source layers to read, chosen on a first sample.
        source_layers (`list[int]`, *optional*): Reads these layers instead of choosing.
        source_window (`int`, *optional*): Tokens whose source states are read, the own one and those before it; these
            through the own one's channels, so that little is added to what a handoff costs, and only where there is a
            `rank`. By default 2, and 1 for a full rank.
        embedding_window (`int`, *optional*, defaults to 5): Target token embeddings read beside the source, in tokens.
        target_hidden_layer (`int`, *optional*): Reads the target's own hidden state too, what goes into this layer of
            it; the layers above alone are fitted, for the plan `bottom` of the others. The control then reads that
            state without the source, which is what the target's own layers can do alone.
        restored_layers (`Sequence[int]`, *optional*, defaults to `()`): Target layers of which the input of the
            attention is fitted in place of keys and values, which the target then makes of it (paper C.5, MoT-h).
        resume_layer (`int`, *optional*): Fits the input of this target layer, a hidden state, beside the layers below
            it, for the plan `resume` of these: the target runs the others itself.
        piece_weights (`Sequence[Sequence[float]]`, *optional*): What squared errors of keys and of values count,
            `[keys, values]` for each target layer, as [`piece_weights`] makes them of a measured sensitivity: a low
            rank, the choice of layers and that of the ridge strength then follow them. By default all count alike.
        key_metric (`str`, *optional*, defaults to `"plain"`): In what metric errors of keys are measured: `"plain"`,
            or `"query"`, by what the target's own queries make of them.
        key_norms (`bool`, *optional*, defaults to `True`): Give translated keys the length that the target's own have:
            each the weighted length that all keys of a head share, in the layers where they share one (targets with
            QK-norm), and elsewhere the same mean length. A regression shrinks what it is unsure of, which flattens
            attention.
        max_parameters (`int`, *optional*): Budget: parameters that the translator, and its control, may have. The
            rank, and how much of it each layer's keys and values read, are then chosen for the least (weighted) error.
        flops_share (`float`, *optional*): Budget: FLOPs of a handoff as a share of the target's own prefill, at 1,024
            tokens, what the plan `bottom` of a `target_hidden_layer` takes included. Of two budgets the tighter holds.
        statistics (`str` or `os.PathLike`, *optional*): File for what the pass over the text gathers, kept every ten
            minutes: a fit that was killed goes on there, one of more tokens goes on from there, and fits of another
            rank, budget or weights need no pass of their own (they read the source layers that the first one chose).
        max_tokens (`int`, *optional*, defaults to 200,000): Target tokens to fit on; fewer if the text ends earlier.
        batch_tokens (`int`, *optional*, defaults to 2048): Tokens a forward pass; does not change the fit.
        held_out_documents (`int`, *optional*, defaults to 32): Documents set apart to choose the ridge strength.
        seed (`int`, *optional*, defaults to 0): Order, windows and random projections.
        progress (`bool`, *optional*, defaults to `True`): Shows a progress bar.

    Returns:
        [`FitResult`]

    Raises:
        `ValueError`: an unknown method or metric, an impossible size, weight or budget, too little text, models that
            cannot be translated, statistics of something else or of more tokens.
    """
    if method != "reduced_rank":
        raise ValueError(f"`method` must be 'reduced_rank', got {method!r}.")
    if key_metric not in KEY_METRICS:
        raise ValueError(f"`key_metric` must be one of {', '.join(KEY_METRICS)}, got {key_metric!r}.")
    if source_window is None:
        source_window = 1 if rank is None else DEFAULT_SOURCE_WINDOW
    for name, value, least in (
        ("rank", 1 if rank is None else rank, 1),
        ("num_source_layers", num_source_layers, 1),
        ("source_window", source_window, 1),
        ("embedding_window", embedding_window, 0),
        ("max_tokens", max_tokens, 1),
        ("batch_tokens", batch_tokens, 1),
        ("held_out_documents", held_out_documents, 1),
    ):
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    pair = Pair(
        *(source, target, source_tokenizer, target_tokenizer),
        target_hidden_layer=target_hidden_layer,
        restored_layers=sorted(set(restored_layers)),
        resume_layer=resume_layer,
    )
    if (
        target_hidden_layer is not None or restored_layers or resume_layer is not None
    ):  # refuses layers that are not there, or cannot be read
        MoTModel(pair.config(rank=1))
    target_runs = (pair.first_layer, pair.restored_layers, resume_layer)
    budget = Budget.of(pair.target_geometry, max_parameters, flops_share, source_window, *target_runs, rank or 0)
    if budget is not None and rank is None:
        raise ValueError("`rank` is None, but a budget needs the most that it may be. Give a number.")
    if source_window > 1 and rank is None:
        raise ValueError(f"`rank` is None, but a `source_window` of {source_window} needs one. Give a number.")
    weights = None
    if piece_weights is not None:
        weights = channel_weights(
            piece_weights, pair.target_geometry, [place + pair.first_layer for place in pair.restored]
        )
        below = sum(layer.width for layer in pair.target_geometry.layers[: pair.first_layer])
        weights = weights[below : below + sum(pair.output_blocks)]
    depth = len(pair.source_geometry.layers)
    if source_layers is not None:
        if not set(source_layers) <= set(range(depth)):
            raise ValueError(f"`source_layers` must lie in 0..{depth - 1}, got {source_layers}.")
        if not source_layers and not embedding_window and target_hidden_layer is None:
            raise ValueError("`source_layers` and `embedding_window` are both empty: there is nothing to read.")
        source_layers = sorted(set(source_layers))
    started = time.perf_counter()
    windows, held_out, counter = pair_windows(pair, documents, held_out_documents, max_tokens, seed)
    contracts = (pair.source_contract, pair.target_contract)
    settings = gathering_settings(
        contracts,
        held_out,
        source_window=source_window,
        embedding_window=embedding_window,
        target_hidden_layer=target_hidden_layer,
        restored_layers=pair.restored_layers,
        resume_layer=resume_layer,
        key_metric=key_metric,
        seed=seed,
    )
    gathered = None
    if statistics is not None and os.path.exists(statistics):
        gathered = Gathered.load(statistics, pair.fitted_geometry, settings, pair.restored)
    bar = tqdm(total=max_tokens, unit="token", desc="Choosing source layers", disable=not progress)
    sample = []  # the first windows choose the layers, and are then fitted on like all others
    for window in windows:
        sample.append(window)
        if sum(window.tokens for window in sample) >= SAMPLE_TOKENS:
            break
    if gathered is not None:
        gathered.check(statistics, sample, source_layers, min(num_source_layers, depth))
        source_layers = gathered.source_layers
    if key_metric == "query":
        pair.key_metric = query_metric(pair, batched(sample, 2048), seed)
    if source_layers is None:
        source_layers = choose_source_layers(
            pair, batched(sample, 2048), num_source_layers, embedding_window, seed, weights
        )
    seconds = {"choice_of_layers": time.perf_counter() - started}
    windows_read = {"source_window": source_window if source_layers else 1, "embedding_window": embedding_window}
    shell = MoTModel(pair.config(source_layers=source_layers, rank=1, **windows_read))
    if budget is not None:  # too little must not cost the pass over the text
        budget.check(rank, Widths.of(shell.config).read_dim)
    bar.set_description("Fitting")
    if gathered is None:
        gathered = Gathered(pair.fitted_geometry, settings, source_layers, restored=pair.restored)
    forward_before = pair.seconds["forward"]
    gather(pair, shell, itertools.chain(sample, windows), gathered, statistics, batch_tokens, bar)
    seconds["calibration_forward"] = pair.seconds["forward"] - forward_before
    bar.set_description("Solving")
    moments, lengths = gathered.statistics.moments(), gathered.lengths
    if weights is not None:
        moments = moments.weighted(weights)
    held_x, held_y = held_out_rows(pair, shell, held_out)
    key_weights = lengths.weights() if key_norms else []
    constant = lengths.constant_layers(key_weights, held_y) if key_norms else []
    shell.config.key_norms = [pair.first_layer + place for place in constant]
    pair.key_lengths = (lengths, key_weights) if key_norms else None
    translator, no_source, choices = _solve_both(pair, moments, held_x, held_y, shell.config, rank, seed, budget)
    seconds |= {"forward": pair.seconds["forward"], "total": time.perf_counter() - started}
    bar.close()
    report = {
        "method": method,
        "source_layers": source_layers,
        **({} if source_window == 1 else {"source_window": source_window}),
        "embedding_window": embedding_window,
        **({} if target_hidden_layer is None else {"target_hidden_layer": target_hidden_layer}),
        **({} if resume_layer is None else {"resume_layer": resume_layer}),
        **({"restored_layers": pair.restored_layers} if pair.restored_layers else {}),
        **({"key_norms": translator.config.key_norms} if key_norms else {}),
        **choices,
        **({} if piece_weights is None else {"piece_weights": [list(map(float, own)) for own in piece_weights]}),
        **({} if key_metric == "plain" else {"key_metric": key_metric}),
        **({} if budget is None else {"max_rank": rank}),
        **({} if max_parameters is None else {"max_parameters": max_parameters}),
        **({} if flops_share is None else {"flops_share": flops_share}),
        "tokens": moments.count,
        "windows": len(gathered.windows),
        "documents": counter["documents"],
        "held_out_documents": len(held_out),
        "seed": seed,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "versions": versions(),
    }
    translator.fit_report = report
    if no_source is not None:
        own = {key: value for key, value in report.items() if key != "no_source"}
        no_source.fit_report = {**own, **report["no_source"], "source_layers": []}
    return FitResult(translator, no_source, report)


def query_metric(pair: Pair, sample: Iterable[list[Window]], seed: int) -> KeyMetric:
    """The metric of keys that the target's queries on a sample make."""
    prefix_ids = list(pair.target_contract["prefix_ids"])
    moments = QueryMoments(pair.target_geometry, len(prefix_ids), seed)
    for batch in sample:
        rows = [prefix_ids + tokenize_with_spans(pair.target_tokenizer, window.text)[0] for window in batch]
        moments.add(pair.target, *left_pad(rows))
    return moments.metric(pair.fitted_geometry, pair.first_layer, pair.restored)


def _solve_both(
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
