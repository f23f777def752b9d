"""The closed-form fit: one pass over text, then linear algebra. `fit` is the page to read."""

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..alignment_mot import tokenize_with_spans
from ..modeling_mot import MoTModel
from ..rows_mot import left_pad
from ..translators_widths_mot import Widths
from ..versions import versions
from .build import solve_both
from .gathered import Gathered, gather, gathering_settings
from .key_metric import KEY_METRICS, KeyMetric, QueryMoments
from .layers import choose_source_layers
from .pair import SAMPLE_TOKENS, Pair, held_out_rows, pair_windows
from .ranks import Budget
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
    if source_window is None:
        source_window = 1 if rank is None else DEFAULT_SOURCE_WINDOW
    _check_settings(
        method,
        key_metric,
        rank=(1 if rank is None else rank, 1),
        num_source_layers=(num_source_layers, 1),
        source_window=(source_window, 1),
        embedding_window=(embedding_window, 0),
        max_tokens=(max_tokens, 1),
        batch_tokens=(batch_tokens, 1),
        held_out_documents=(held_out_documents, 1),
    )
    if source_layers is not None and not source_layers:
        source_window = 1  # there is nothing of the tokens before either
    pair = Pair(
        *(source, target, source_tokenizer, target_tokenizer),
        target_hidden_layer=target_hidden_layer,
        restored_layers=sorted(set(restored_layers)),
        resume_layer=resume_layer,
    )
    if target_hidden_layer is not None or restored_layers or resume_layer is not None:
        MoTModel(pair.config(rank=1))  # refuses layers that are not there, or cannot be read
    target_runs = (pair.first_layer, pair.restored_layers, resume_layer)
    budget = Budget.of(pair.target_geometry, max_parameters, flops_share, source_window, *target_runs, rank or 0)
    if budget is not None and rank is None:
        raise ValueError("`rank` is None, but a budget needs the most that it may be. Give a number.")
    if source_window > 1 and rank is None:
        raise ValueError(f"`rank` is None, but a `source_window` of {source_window} needs one. Give a number.")
    weights = None if piece_weights is None else pair.channel_weights(piece_weights)
    depth = len(pair.source_geometry.layers)
    if source_layers is not None:
        reads_beside = embedding_window > 0 or target_hidden_layer is not None
        _check_source_layers(source_layers, depth, reads_beside)
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
    windows_read = {"source_window": source_window, "embedding_window": embedding_window}
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
    translator, no_source, choices = solve_both(pair, moments, held_x, held_y, shell.config, rank, seed, budget)
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


def _check_settings(method: str, key_metric: str, **sizes: tuple[int, int]) -> None:
    """Raises `ValueError` for a setting that no pair can take; `sizes` each with the least that it may be."""
    if method != "reduced_rank":
        raise ValueError(f"`method` must be 'reduced_rank', got {method!r}.")
    if key_metric not in KEY_METRICS:
        raise ValueError(f"`key_metric` must be one of {', '.join(KEY_METRICS)}, got {key_metric!r}.")
    for name, (value, least) in sizes.items():
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}.")


def _check_source_layers(source_layers: list[int], depth: int, reads_beside: bool) -> None:
    """Raises `ValueError` for layers that a source of `depth` layers lacks, or for none where nothing else is read."""
    if not set(source_layers) <= set(range(depth)):
        raise ValueError(f"`source_layers` must lie in 0..{depth - 1}, got {source_layers}.")
    if not source_layers and not reads_beside:
        raise ValueError("`source_layers` and `embedding_window` are both empty: there is nothing to read.")


def query_metric(pair: Pair, sample: Iterable[list[Window]], seed: int) -> KeyMetric:
    """The metric of keys that the target's queries on a sample make."""
    prefix_ids = list(pair.target_contract["prefix_ids"])
    moments = QueryMoments(pair.target_geometry, len(prefix_ids), seed)
    for batch in sample:
        rows = [prefix_ids + tokenize_with_spans(pair.target_tokenizer, window.text)[0] for window in batch]
        moments.add(pair.target, *left_pad(rows))
    return moments.metric(pair.fitted_geometry, pair.first_layer, pair.restored)
