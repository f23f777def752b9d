"""The closed-form fit: one pass over text, then linear algebra. `fit` is the page to read."""

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..alignment_mot import tokenize_with_spans
from ..capture_mot import prefill, source_states
from ..configuration_mot import MoTConfig
from ..contract_mot import describe_model
from ..data import iterate_documents
from ..geometry_mot import ModelGeometry
from ..modeling_mot import MoTModel
from ..rows_mot import left_pad, positions_from_mask
from ..translators_mot import Widths
from ..versions import versions
from .key_metric import KEY_METRICS, KeyMetric, QueryMoments
from .norms import KeyLengths
from .ranks import Budget
from .solve import LinearMap, choose_layers, choose_ridge, output_sketch, solve
from .statistics import Moments, Statistics
from .weights import channel_weights, output_blocks
from .windows import SHUFFLE_BUFFER, Window, batched, calibration_windows, characters_per_token, shuffled

logger = logging.get_logger(__name__)

DEFAULT_RANK = 1024
DEFAULT_SOURCE_LAYERS = 10
DEFAULT_EMBEDDING_WINDOW = 5
DEFAULT_TOKENS = 200_000
SAMPLE_TOKENS = 8_192  # for the choice of layers, and again, held out, for the ridge strength
_LAYER_SKETCH = 96  # random channels that stand for one source layer while layers are chosen


@dataclass
class FitResult:
    """
    What a fit gives.

    Args:
        translator ([`MoTModel`]): The translator.
        no_source ([`MoTModel`] or `None`): Its control: the same fit without the source's states; `None` where there
            is no embedding window to read instead.
        report (`dict`): How it was fitted; also `translator.fit_report`.
    """

    translator: MoTModel
    no_source: MoTModel | None
    report: dict[str, Any]


@dataclass
class Pair:
    """The two frozen models of a fit and their tokenizers, the metric of errors, and the lengths of native keys."""

    source: PreTrainedModel
    target: PreTrainedModel
    source_tokenizer: PreTrainedTokenizerBase
    target_tokenizer: PreTrainedTokenizerBase
    seconds: dict[str, float] = field(default_factory=lambda: {"forward": 0.0})
    key_metric: KeyMetric | None = None
    key_lengths: tuple[KeyLengths, list[torch.Tensor]] | None = None

    def __post_init__(self):
        self.source_contract = describe_model(self.source, self.source_tokenizer)
        self.target_contract = describe_model(self.target, self.target_tokenizer)
        self.source_geometry = ModelGeometry.from_dict(self.source_contract["geometry"])
        self.target_geometry = ModelGeometry.from_dict(self.target_contract["geometry"])

    def config(self, **kwargs: Any) -> MoTConfig:
        return MoTConfig(source=self.source_contract, target=self.target_contract, **kwargs)

    def fits(self, text: str) -> bool:
        """Whether both models have enough positions for a text, prefix included."""
        sides = (
            (self.source_tokenizer, self.source_contract, self.source_geometry),
            (self.target_tokenizer, self.target_contract, self.target_geometry),
        )
        return all(
            geometry.max_positions is None
            or len(tokenize_with_spans(tokenizer, text)[0]) + len(contract["prefix_ids"]) <= geometry.max_positions
            for tokenizer, contract, geometry in sides
        )

    @torch.no_grad()
    def rows(self, shell: MoTModel, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (source states, then the embedding window) and outputs (the target's own position-free states) of
        every context token: `[tokens, features]`, `[tokens, outputs]`, on the CPU in fp32."""
        started = time.perf_counter()
        cache, source_ids, source_mask = shell.read_source(texts, self.source, self.source_tokenizer)
        self.seconds["forward"] += time.perf_counter() - started
        inputs = shell.prepare(
            cache,
            source_ids,
            source_attention_mask=source_mask,
            source_tokenizer=self.source_tokenizer,
            target=self.target,
            target_tokenizer=self.target_tokenizer,
            text=texts,
        )
        started = time.perf_counter()
        target_cache = prefill(self.target, inputs.target_ids, inputs.target_mask)
        self.seconds["forward"] += time.perf_counter() - started
        positions = positions_from_mask(inputs.target_mask)
        outputs = source_states(target_cache, self.target_geometry, range(len(self.target_geometry.layers)), positions)
        # Pads and the natively run prefix are not translated.
        kept = inputs.target_mask.bool() & (positions >= len(self.target_contract["prefix_ids"]))
        features = [part for part in (inputs.source_states, inputs.embeddings) if part is not None]
        x = torch.cat([part.cpu()[kept] for part in features], dim=-1)
        return x.float(), outputs.cpu()[kept].float()

    def in_metric(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs `[tokens, outputs]` in the coordinates that errors are measured in."""
        return outputs if self.key_metric is None else self.key_metric.apply(outputs)


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
    embedding_window: int = DEFAULT_EMBEDDING_WINDOW,
    piece_weights: Sequence[Sequence[float]] | None = None,
    key_metric: str = "plain",
    key_norms: bool = True,
    max_parameters: int | None = None,
    flops_share: float | None = None,
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
        embedding_window (`int`, *optional*, defaults to 5): Target token embeddings read beside the source, in tokens.
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
            tokens. Of two budgets the tighter holds.
        max_tokens (`int`, *optional*, defaults to 200,000): Target tokens to fit on; fewer if the text ends earlier.
        batch_tokens (`int`, *optional*, defaults to 2048): Tokens a forward pass; does not change the fit.
        held_out_documents (`int`, *optional*, defaults to 32): Documents set apart to choose the ridge strength.
        seed (`int`, *optional*, defaults to 0): Order, windows and random projections.
        progress (`bool`, *optional*, defaults to `True`): Shows a progress bar.

    Returns:
        [`FitResult`]

    Raises:
        `ValueError`: an unknown method or metric, an impossible size, weight or budget, too little text, models that
            cannot be translated.
    """
    if method != "reduced_rank":
        raise ValueError(f"`method` must be 'reduced_rank', got {method!r}.")
    if key_metric not in KEY_METRICS:
        raise ValueError(f"`key_metric` must be one of {', '.join(KEY_METRICS)}, got {key_metric!r}.")
    for name, value, least in (
        ("rank", 1 if rank is None else rank, 1),
        ("num_source_layers", num_source_layers, 1),
        ("embedding_window", embedding_window, 0),
        ("max_tokens", max_tokens, 1),
        ("batch_tokens", batch_tokens, 1),
        ("held_out_documents", held_out_documents, 1),
    ):
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    pair = Pair(source, target, source_tokenizer, target_tokenizer)
    budget = Budget.of(pair.target_geometry, max_parameters, flops_share)
    if budget is not None and rank is None:
        raise ValueError("`rank` is None, but a budget needs the most that it may be. Give a number.")
    weights = None if piece_weights is None else channel_weights(piece_weights, pair.target_geometry)
    depth = len(pair.source_geometry.layers)
    if source_layers is not None:
        if not set(source_layers) <= set(range(depth)):
            raise ValueError(f"`source_layers` must lie in 0..{depth - 1}, got {source_layers}.")
        if not source_layers and not embedding_window:
            raise ValueError("`source_layers` and `embedding_window` are both empty: there is nothing to read.")
        source_layers = sorted(set(source_layers))
    started = time.perf_counter()
    windows, held_out, counter = pair_windows(pair, documents, held_out_documents, max_tokens, seed)
    bar = tqdm(total=max_tokens, unit="token", desc="Choosing source layers", disable=not progress)
    sample = []  # the first windows choose the layers, and are then fitted on like all others
    for window in windows:
        sample.append(window)
        if sum(window.tokens for window in sample) >= SAMPLE_TOKENS:
            break
    if key_metric == "query":
        pair.key_metric = query_metric(pair, batched(sample, 2048), seed)
    if source_layers is None:
        source_layers = choose_source_layers(
            pair, batched(sample, 2048), num_source_layers, embedding_window, seed, weights
        )
    seconds = {"choice_of_layers": time.perf_counter() - started}
    shell = MoTModel(pair.config(source_layers=source_layers, rank=1, embedding_window=embedding_window))
    if budget is not None:  # too little must not cost the pass over the text
        read = Widths.of(shell.config)
        budget.check(rank, read.source_dim + read.embeddings)
    bar.set_description("Fitting")
    statistics, lengths = Statistics(output_blocks(pair.target_geometry)), KeyLengths(pair.target_geometry)
    num_windows, forward_before = 0, pair.seconds["forward"]
    for batch in batched(itertools.chain(sample, windows), batch_tokens):
        x, y = pair.rows(shell, [window.text for window in batch])
        statistics.add(x, pair.in_metric(y))
        if key_norms:
            lengths.add(y)
        num_windows += len(batch)
        bar.update(len(x))
    seconds["calibration_forward"] = pair.seconds["forward"] - forward_before
    bar.set_description("Solving")
    moments = statistics.moments()
    if weights is not None:
        moments = moments.weighted(weights)
    held_x, held_y = held_out_rows(pair, shell, held_out)
    key_weights = lengths.weights() if key_norms else []
    shell.config.key_norms = lengths.constant_layers(key_weights, held_y) if key_norms else []
    pair.key_lengths = (lengths, key_weights) if key_norms else None
    translator, no_source, choices = _solve_both(pair, moments, held_x, held_y, shell.config, rank, seed, budget)
    for model in (translator, no_source):
        if model is not None:
            set_key_norms(model, key_weights)
    seconds |= {"forward": pair.seconds["forward"], "total": time.perf_counter() - started}
    bar.close()
    report = {
        "method": method,
        "source_layers": source_layers,
        "embedding_window": embedding_window,
        **({"key_norms": translator.config.key_norms} if key_norms else {}),
        **choices,
        **({} if piece_weights is None else {"piece_weights": [list(map(float, own)) for own in piece_weights]}),
        **({} if key_metric == "plain" else {"key_metric": key_metric}),
        **({} if budget is None else {"max_rank": rank}),
        **({} if max_parameters is None else {"max_parameters": max_parameters}),
        **({} if flops_share is None else {"flops_share": flops_share}),
        "tokens": moments.count,
        "windows": num_windows,
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


def pair_windows(
    pair: Pair, documents: Iterable[str], held_out_documents: int, max_tokens: int, seed: int
) -> tuple[Iterator[Window], list[str], dict[str, int]]:
    """Windows that both models have positions for, the documents held out from them, and a counter of those read."""
    stream, held_out, counter = split(documents, held_out_documents, seed)
    limits = [g.max_positions for g in (pair.source_geometry, pair.target_geometry) if g.max_positions is not None]
    windows = calibration_windows(
        stream,
        pair.target_tokenizer,
        characters_per_token(held_out, pair.target_tokenizer),
        # Tokens of the source may be shorter than the target's; half leaves room for that.
        min(limits, default=2**31) // 2,
        max_tokens,
        random.Random(seed),
    )
    return (window for window in windows if pair.fits(window.text)), held_out, counter


def split(documents: Iterable[str], held_out: int, seed: int) -> tuple[Iterator[str], list[str], dict[str, int]]:
    """Sets the first documents of the shuffled stream apart; counts those that are read later."""
    counter = {"documents": 0}
    stream = shuffled(iterate_documents(documents), SHUFFLE_BUFFER, random.Random(seed))
    held = list(itertools.islice(stream, held_out))
    following = next(stream, None)
    if following is None and len(held) > 1:  # a small corpus: a quarter of it is held out
        cut = max(1, len(held) // 4)
        held, stream = held[:cut], iter(held[cut:])
        following = next(stream)
    if following is None:
        raise ValueError(
            "`documents` holds a single document, but one is held out to choose the ridge strength. Pass more text; "
            "in a file, separate documents by lines <|endoftext|>, or take each line for one (--lines)."
        )

    def counted() -> Iterator[str]:
        for document in itertools.chain([following], stream):
            counter["documents"] += 1
            yield document

    return counted(), held, counter


def query_metric(pair: Pair, sample: Iterable[list[Window]], seed: int) -> KeyMetric:
    """The metric of keys that the target's queries on a sample make."""
    prefix_ids = list(pair.target_contract["prefix_ids"])
    moments = QueryMoments(pair.target_geometry, len(prefix_ids), seed)
    for batch in sample:
        rows = [prefix_ids + tokenize_with_spans(pair.target_tokenizer, window.text)[0] for window in batch]
        moments.add(pair.target, *left_pad(rows))
    return moments.metric()


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
    embedding_width = embedding_window * pair.target_geometry.embedding_dim
    generator = torch.Generator().manual_seed(seed)

    def projection(width: int, to: int) -> torch.Tensor:
        return torch.randn(width, min(width, to), generator=generator) / math.sqrt(width)

    projections = [projection(width, _LAYER_SKETCH) for width in widths]
    embedding_projection = projection(embedding_width, 4 * _LAYER_SKETCH)
    outputs = output_blocks(pair.target_geometry)
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
        pieces = x.split([*widths, embedding_width], dim=1)
        layers = [piece @ p for piece, p in zip(pieces, projections, strict=False)]
        sketched.append((layers, pieces[-1] @ embedding_projection, (y / scale) @ sketch))
    if sum(len(y) for _, _, y in sketched) < 8:
        raise ValueError("`documents` gave fewer than 8 tokens to choose source layers on. Pass more text.")
    blocks = [torch.cat([layers[layer_idx] for layers, _, _ in sketched]) for layer_idx in range(depth)]
    return choose_layers(
        blocks, torch.cat([base for _, base, _ in sketched]), torch.cat([y for _, _, y in sketched]), count
    )


def held_out_rows(pair: Pair, shell: MoTModel, held_out: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the held-out documents' beginnings, about `SAMPLE_TOKENS` in all."""
    budget = max(32, SAMPLE_TOKENS // len(held_out))
    chars = int(budget * characters_per_token(held_out, pair.target_tokenizer))
    texts = [document[:chars] for document in held_out]
    for index, text in enumerate(texts):
        while not pair.fits(text):
            text = text[: len(text) // 2]
        texts[index] = text
    rows = [pair.rows(shell, [text]) for text in texts]
    return torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])


def _solve_both(
    pair: Pair, moments: Moments, held_x, held_y, config: MoTConfig, rank: int | None, seed: int, budget: Budget | None
):
    """The translator, and from the same moments its control that reads the embeddings alone."""
    translator, choices = _solve_one(pair, moments, held_x, held_y, config, rank, seed, budget)
    if not config.embedding_window:
        return translator, None, choices
    columns = torch.arange(
        len(moments.xx) - config.embedding_window * pair.target_geometry.embedding_dim, len(moments.xx)
    )
    config = pair.config(source_layers=[], embedding_window=config.embedding_window, key_norms=config.key_norms)
    no_source, own = _solve_one(pair, moments.select(columns), held_x[:, columns], held_y, config, rank, seed, budget)
    return translator, no_source, {**choices, "no_source": own}


def _solve_one(pair, moments: Moments, held_x, held_y, config: MoTConfig, rank, seed: int, budget: Budget | None):
    ridge, curve = choose_ridge(moments, held_x, pair.in_metric(held_y), seed)
    rank = None if rank is None else min(rank, *moments.xy.shape)
    solution = solve(moments, ridge, rank, seed, budget)
    solution = solution if pair.key_metric is None else pair.key_metric.undo(solution)
    if pair.key_lengths is not None:
        lengths, key_weights = pair.key_lengths
        solution = lengths.lengthened(solution, key_weights, held_x, held_y)
    form: dict[str, Any] = {"rank": None if solution.up is None else len(solution.up)}
    if solution.piece_ranks is not None:
        form["piece_ranks"] = torch.tensor(solution.piece_ranks).view(-1, 2).tolist()
    shared = {name: getattr(config, name) for name in ("source_layers", "embedding_window", "key_norms")}
    own = pair.config(**shared, **form)
    return build_translator(own, solution), {**form, "ridge": ridge, "ridge_curve": curve}


def build_translator(config: MoTConfig, solution: LinearMap) -> MoTModel:
    """A translator with the weights of a closed-form solution."""
    model = MoTModel(config)
    module = model.translator
    source_dim = 0 if module.source_in is None else module.source_in.in_features
    with torch.no_grad():
        if module.source_in is not None:
            module.source_in.weight.copy_(solution.down[:source_dim].T)
        if module.embedding_in is not None:
            module.embedding_in.weight.copy_(solution.down[source_dim:].T)
        if solution.piece_ranks is not None:
            module.up.load(solution.up.T)
        elif solution.up is not None:
            module.up.weight.copy_(solution.up.T)
        module.bias.copy_(solution.bias)
    return model.eval()


def set_key_norms(model: MoTModel, key_weights: Sequence[torch.Tensor]) -> None:
    """Sets the weighted lengths of a translator's keys, from weights `[kv_heads, key_dim]` a target layer."""
    with torch.no_grad():
        for layer_idx, norm in model.key_norms.items():
            norm.weight.copy_(key_weights[int(layer_idx)])
