"""Sensitivity: what translating one piece of a target's cache costs, the keys or the values of one layer, while all
other pieces are the target's own. `measure_sensitivity` is the page to read.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, masks `[batch, seq]`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.analysis.pieces import Piece, Unexplained, mix, paired_states, translated_pieces
from hf_mot.cache_mot import TranslatedCache
from hf_mot.data import iterate_documents
from hf_mot.evaluation.answers import continuation_nll, read_on, token_losses
from hf_mot.evaluation.arms import ARMS
from hf_mot.evaluation.batch import Batch, Models
from hf_mot.evaluation.context_nll import CONTEXT_NLL
from hf_mot.evaluation.describe import describe_pair, describe_translator
from hf_mot.evaluation.measure import Item, grouped
from hf_mot.evaluation.metrics import mean_with_interval, ratio_of_means
from hf_mot.evaluation.prompts import Prompter
from hf_mot.evaluation.question_answering import Questions, prepare_questions
from hf_mot.evaluation.settings import check_models, check_pair, check_parts, check_settings
from hf_mot.evaluation.tasks import TASKS, Example
from hf_mot.evaluation.windows import Windows, cut_windows
from hf_mot.modeling_mot import MoTModel
from hf_mot.versions import versions

REFERENCES = ("native", "no_context", "translated")


@dataclass(frozen=True)
class _Measure:
    """What is scored: items, counts of those left out, and the NLL of some items (by their numbers) after a cache."""

    items: Sequence[Item]
    skipped: dict[str, int]
    score: Callable[[TranslatedCache, list[int]], list[float]]


@torch.no_grad()
def measure_sensitivity(
    translator: MoTModel,
    documents: Iterable[str | Mapping[str, str]] | None = None,
    *,
    source: PreTrainedModel | None,
    target: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase,
    tasks: Mapping[str, Sequence[Example]] | None = None,
    context_length: int = 256,
    limit: int | None = None,
    batch_size: int = 4,
    seed: int = 0,
    replay: str | None = None,
    prompt_style: str = "auto",
    reverse: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """
    Measures, per translated layer of the target and for keys and values apart, what the translation of this piece
    alone costs: the target goes on after its own cache, in which the piece is replaced by its translation.

    The cost is one of recall: *lost* = (NLL_piece - NLL_native) / (NLL_no_context - NLL_native), the share of the
    context's worth that goes with the piece, by the NLL of a document's continuation and by that of the right answer
    to a question. Contexts are read once a batch; each piece then costs a run over the continuation or prompt.

    Args:
        translator (`MoTModel`): The translator to analyse.
        documents (`Iterable[str]` or a `datasets` dataset, *optional*): Documents that it was not fitted on; one
            window each, at the start.
        source (`PreTrainedModel`, *optional*): The model that reads; `None` only if the translator uses no source.
        target (`PreTrainedModel`): The model that goes on.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*): The source's tokenizer.
        target_tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        tasks (`Mapping[str, Sequence[Example]]`, *optional*): Examples by task, as `load_examples` gives them.
        context_length (`int`, *optional*, defaults to 256): Target tokens of a document's context, prefix included.
        limit (`int`, *optional*): Number of windows, and of questions a task; all that fit by default.
        batch_size (`int`, *optional*, defaults to 4): Contexts per forward; changes nothing but speed and memory.
        seed (`int`, *optional*, defaults to 0): Seed of the order of documents and questions and of the bootstrap.
        replay (`str`, *optional*): What the target recomputes; by default what the translator was made for. With
            `"full:6-11"` the pieces are those of layers 6 to 11, and all others are native.
        prompt_style (`str`, *optional*, defaults to `"auto"`): `"chat"`, `"plain"`, or chat where the tokenizer has a
            chat template.
        reverse (`bool`, *optional*, defaults to `False`): Whether to measure the reverse too, at twice the time: what
            is won back if, of all pieces, this one alone is native.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

    Returns:
        `dict`: Ready for JSON. `measures` has, by name (`"context_nll"`, or the task's), `n`, the NLL in nats a token
        of `native`, `no_context` and `translated` (all pieces), `lost` of the latter, and `pieces`: dicts with
        `layer`, `states` (`"keys"` or `"values"`), `nll`, `cost` (nats above native), `lost` and, in reverse,
        `restored`; each figure as `{"value", "low", "high"}`, with a paired bootstrap 95 % interval over documents.
        `lost` is absent where the context is not clearly worth something (`notes` says so). `unexplained` lists per
        piece the squared error of the translated, position-free states as a share of the native ones' variance.

    Raises:
        ValueError: On an unknown task or plan, a plan that resumes from a translated state, a bad `context_length`,
            `limit` or `batch_size`, a missing source, a model in training mode, nothing to measure on, or a loss that
            is not finite.
    """
    tasks = dict(tasks or {})
    check_parts(documents, tasks)
    check_settings(
        translator,
        arms=REFERENCES,
        tasks=tasks,
        context_length=context_length,
        limit=limit,
        batch_size=batch_size,
        replay=replay,
    )
    replay = str(translator.plan(replay, context_length))
    check_models(REFERENCES, translator, None, source, target, {})
    check_pair(translator, None, source, target, source_tokenizer, target_tokenizer)
    prefix_ids = list(translator.config.target["prefix_ids"])
    models = Models(
        source=source,
        target=target,
        source_tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        translator=translator,
        no_source=None,
        identity=None,
        prefix_ids=prefix_ids,
        replay=replay,
        prompters={"target": Prompter.of(target_tokenizer, prefix_ids, prompt_style)} if tasks else {},
    )
    pieces = translated_pieces(translator, replay)
    measures = {}
    if documents is not None:
        found = cut_windows(
            iterate_documents(documents),
            target_tokenizer,
            prefix_ids=prefix_ids,
            context_length=context_length,
            limit=limit,
            seed=seed,
        )
        measures[CONTEXT_NLL] = _documents(models, found)
    for name, examples in tasks.items():
        questions = prepare_questions(TASKS[name], examples, models, limit=limit, seed=seed)
        measures[name] = _questions(models, questions)

    caches = 3 + len(pieces) * (2 if reverse else 1)
    errors = {piece: Unexplained() for piece in pieces}
    figures = {}
    with tqdm(
        total=caches * sum(len(own.items) for own in measures.values()), unit="run", disable=not progress
    ) as bar:
        for name, own in measures.items():
            bar.set_description(name)
            losses = _losses(models, own, pieces, errors, reverse, batch_size, bar)
            skipped = {reason: count for reason, count in own.skipped.items() if count}
            figures[name] = {
                "n": len(own.items),
                **({"skipped": skipped} if skipped else {}),
                **summarise(losses, pieces, seed, [item.group for item in own.items]),
            }
    return {
        "pair": describe_pair(translator),
        "translator": describe_translator(translator),
        "target_fingerprint": translator.config.target["fingerprint"],
        "replay": replay,
        "dtype": str(target.dtype).removeprefix("torch."),
        "context_length": context_length,
        "seed": seed,
        "measures": figures,
        "unexplained": [
            {"layer": layer_idx, "states": states, "value": errors[layer_idx, states].share}
            for layer_idx, states in pieces
        ],
        "versions": versions(),
    }


def _documents(models: Models, found: Windows) -> _Measure:
    windows = grouped(found.windows)
    right = torch.tensor([window.continuation_ids for window in windows])

    def score(cache: TranslatedCache, rows: list[int]) -> list[float]:
        return continuation_nll(models.target, cache.fork(), right[rows]).tolist()

    return _Measure(windows, {"too_short": found.too_short, "split_character": found.split_character}, score)


def _questions(models: Models, questions: Questions) -> _Measure:
    items = questions.items

    def score(cache: TranslatedCache, rows: list[int]) -> list[float]:
        asked = [items[row] for row in rows]
        # The prompt without LM head, which costs more than all layers of a small model.
        cache = read_on(models.target, cache, [question.prompt_ids[:-1] for question in asked])
        ends = [[question.prompt_ids[-1], *question.answer_ids[question.gold]] for question in asked]
        return [losses.mean().item() for losses in token_losses(models.target, cache, ends)]

    return _Measure(items, {"too_long": questions.too_long}, score)


def _losses(models, measure: _Measure, pieces, errors, reverse, batch_size, bar) -> dict[Any, torch.Tensor]:
    """NLL of each item, `[items]`, by reference, by piece, and in reverse by `("restored", piece)`."""
    found: dict[Any, list[float]] = {}
    for start in range(0, len(measure.items), batch_size):
        rows = list(range(start, min(start + batch_size, len(measure.items))))
        batch = Batch(models, [measure.items[row] for row in rows])
        for piece, native, translated in paired_states(batch, pieces):
            errors[piece].add(native, translated)
        for name, cache in _caches(batch, pieces, reverse):
            losses = measure.score(cache, rows)
            if not all(map(math.isfinite, losses)):
                raise ValueError(
                    f"The NLL after {_spell(name)} is {losses}. Check the dtypes of both models and the translator's "
                    "weights."
                )
            found.setdefault(name, []).extend(losses)
            bar.update(len(rows))
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def _caches(batch: Batch, pieces: Sequence[Piece], reverse: bool) -> Iterator[tuple[Any, TranslatedCache]]:
    native, translated = batch.native_cache, batch.translated_cache
    yield "native", native
    yield "no_context", ARMS["no_context"].cache(batch)
    yield "translated", mix(native, translated, pieces)
    for piece in pieces:
        yield piece, mix(native, translated, [piece])
        if reverse:
            yield ("restored", piece), mix(native, translated, [other for other in pieces if other != piece])


def summarise(losses: dict[Any, torch.Tensor], pieces: Sequence[Piece], seed: int, clusters) -> dict[str, Any]:
    """The report's part on one measure, of the NLL of its items by reference and by piece."""
    native, worth = losses["native"], losses["no_context"] - losses["native"]
    figures: dict[str, Any] = {}
    if len(set(clusters)) < len(native):
        figures["n_documents"] = len(set(clusters))
    figures |= {name: losses[name].mean().item() for name in REFERENCES}

    def share(name: str, difference: torch.Tensor) -> dict[str, Any]:
        if "notes" in figures:
            return {}
        return {name: ratio_of_means(difference, worth, seed=seed, clusters=clusters)}

    try:
        figures |= share("lost", losses["translated"] - native)
    except ValueError as error:  # true of one is true of all: they share the denominator
        figures["notes"] = [f"what is lost is given in nats alone: {error}."]
    figures["pieces"] = []
    for piece in pieces:
        own = {
            "layer": piece[0],
            "states": piece[1],
            "nll": losses[piece].mean().item(),
            "cost": mean_with_interval(losses[piece] - native, seed, clusters),
            **share("lost", losses[piece] - native),
        }
        if ("restored", piece) in losses:
            own |= share("restored", losses["translated"] - losses["restored", piece])
        figures["pieces"].append(own)
    return figures


def _spell(name: Any) -> str:
    """A cache in words."""
    if isinstance(name, str):
        return f"the {name} cache"
    if name[0] == "restored":
        return f"translating all but {_spell(name[1])}"
    return f"the {name[1]} of layer {name[0]}"
