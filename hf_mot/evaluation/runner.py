"""One evaluation: windows, arms, metrics and cost, as the JSON that `evaluate` and `demo` write."""

import difflib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.data import iterate_documents
from hf_mot.evaluation.arms import ARMS, Batch, Models, continuation_nll
from hf_mot.evaluation.cost import measure_cost, translator_bytes
from hf_mot.evaluation.metrics import METRICS, compare
from hf_mot.evaluation.windows import CONTINUATION_TOKENS, Window, check_context_length, cut_windows
from hf_mot.modeling_mot import MoTModel
from hf_mot.replay_mot import ReplayPlan
from hf_mot.versions import versions

DEFAULT_ARMS = ("native", "no_context", "translated", "identity", "wrong_document", "no_source")


def check_settings(
    translator: MoTModel,
    *,
    arms: Sequence[str] = DEFAULT_ARMS,
    context_length: int = 256,
    limit: int | None = None,
    batch_size: int = 4,
    replay: str = "none",
    cost_context_length: int | None = None,
) -> list[str]:
    """
    What can be checked before a model is loaded. Arguments as in [`evaluate`].

    Returns:
        `list[str]`: The arms to run, each once, and the helper arm that content recovery needs.

    Raises:
        ValueError: On an unknown arm or plan, or a bad `context_length`, `limit` or `batch_size`.
    """
    if not arms:
        raise ValueError(f"`arms` is empty. Choose from {', '.join(ARMS)}.")
    for arm in arms:
        if arm not in ARMS:
            close = difflib.get_close_matches(str(arm), ARMS, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise ValueError(f"`arms` holds {arm!r}, which is no arm. {hint}Choose from {', '.join(ARMS)}.")
    ReplayPlan.parse(replay)
    for length in (context_length, cost_context_length):
        if length is not None:
            check_context_length(length, translator.target_geometry.max_positions)
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be at least 1 document, or None for all, got {limit}.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1 document, got {batch_size}.")
    helper = ["native_wrong_document"] if "wrong_document" in arms else []
    return list(dict.fromkeys([*arms, *helper]))


@torch.no_grad()
def evaluate(
    translator: MoTModel,
    documents: Iterable[str | Mapping[str, str]],
    *,
    source: PreTrainedModel | None,
    target: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase,
    no_source: MoTModel | None = None,
    arms: Sequence[str] = DEFAULT_ARMS,
    context_length: int = 256,
    limit: int | None = None,
    batch_size: int = 4,
    seed: int = 0,
    replay: str = "none",
    cost: bool = True,
    cost_context_length: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """
    Measures a translator by context-NLL: how well the target goes on with a document whose start it has in its cache,
    got in several ways (the arms).

    Args:
        translator (`MoTModel`): The translator to judge.
        documents (`Iterable[str]` or a `datasets` dataset): Documents that it was not fitted on. One window each, at
            the start.
        source (`PreTrainedModel`, *optional*): The model that reads; `None` only if the translator uses no source.
        target (`PreTrainedModel`): The model that goes on.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*): The source's tokenizer.
        target_tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        no_source (`MoTModel`, *optional*): The translator's twin without source; needed by the arm of that name.
        arms (`Sequence[str]`, *optional*): Names from `ARMS`; the six of context-NLL by default.
        context_length (`int`, *optional*, defaults to 256): Target tokens of context, its prefix included.
        limit (`int`, *optional*): Number of documents to measure; all that are long enough by default.
        batch_size (`int`, *optional*, defaults to 4): Documents per forward; changes nothing but speed and memory.
        seed (`int`, *optional*, defaults to 0): Seed of the order of documents and of the bootstrap.
        replay (`str`, *optional*, defaults to `"none"`): What the target recomputes.
        cost (`bool`, *optional*, defaults to `True`): Whether to measure times and sizes too.
        cost_context_length (`int`, *optional*, defaults to `context_length`): Tokens of context that cost is measured
            on; the text is then taken from all documents, joined.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

    Returns:
        `dict`: Ready for JSON. What was not measured is absent; `notes` says why where it could be expected.

    Raises:
        ValueError: On an unknown arm or plan, a bad `context_length`, `limit` or `batch_size`, a missing twin or
            source, a model in training mode, too few long documents, or an NLL that is not finite.
    """
    arms = check_settings(
        translator,
        arms=arms,
        context_length=context_length,
        limit=limit,
        batch_size=batch_size,
        replay=replay,
        cost_context_length=cost_context_length,
    )
    _check_models(arms, translator, no_source, source, target)
    documents = list(iterate_documents(documents))
    prefix_ids = list(translator.config.target["prefix_ids"])
    found = cut_windows(
        documents, target_tokenizer, prefix_ids=prefix_ids, context_length=context_length, limit=limit, seed=seed
    )
    windows = found.windows
    if "wrong_document" in arms and len(windows) < 2:
        raise ValueError(
            f"`arms` holds wrong_document, which needs at least 2 documents, got {len(windows)} of sufficient length. "
            "Give more documents, or leave the arm out."
        )
    models = Models(
        source=source,
        target=target,
        source_tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        translator=translator,
        no_source=no_source,
        identity=MoTModel.identity(target, target_tokenizer).eval() if "identity" in arms else None,
        prefix_ids=prefix_ids,
        replay=replay,
    )
    cost_window = windows[0]
    if cost and cost_context_length not in (None, context_length):
        cost_window = _joined_window(documents, target_tokenizer, prefix_ids, cost_context_length)
    nll = _measure(models, windows, arms, batch_size, progress)

    skipped = {"too_short": found.too_short, "split_character": found.split_character}
    report = {
        "pair": _pair(translator),
        "translator": _describe(translator),
        "replay": replay,
        "context_length": context_length,
        "scored_tokens": CONTINUATION_TOKENS - 1,
        "dtype": str(target.dtype).removeprefix("torch."),
        "n": len(windows),
        "skipped": {reason: count for reason, count in skipped.items() if count},
        "seed": seed,
        **_figures(nll, seed),
    }
    if cost:
        report["cost"] = measure_cost(models, cost_window)
    report["versions"] = versions()
    report["documents"] = [
        {"document": window.document, **{arm: nll[arm][row].item() for arm in arms}}
        for row, window in enumerate(windows)
    ]
    return report


def _check_models(arms, translator, no_source, source, target) -> None:
    if "no_source" in arms and no_source is None:
        raise ValueError(
            "`no_source` is None, but the arm no_source needs the translator's twin. Pass the one that the fit saved "
            "in OUT/no_source, or leave the arm out of `arms`."
        )
    if source is None and translator.config.source_layers:
        raise ValueError("`source` is None, but this translator reads a source. Pass the source and its tokenizer.")
    for name, model in (("source", source), ("target", target), ("translator", translator), ("no_source", no_source)):
        if model is not None and model.training:
            raise ValueError(f"`{name}` is in training mode, where dropout blurs the figures. Call {name}.eval().")


def _joined_window(documents, tokenizer, prefix_ids, context_length) -> Window:
    """A window of any length, over documents that may each be shorter."""
    text = "\n\n".join(documents)[: 64 * context_length]  # no need to tokenise a whole corpus
    # From four places, since the cut may fall within a character.
    starts = [text[start:] for start in range(4)]
    try:
        found = cut_windows(starts, tokenizer, prefix_ids=prefix_ids, context_length=context_length, limit=1)
    except ValueError as error:
        raise ValueError(
            f"`cost_context_length` is {context_length} tokens, more than all documents hold together. Give more text "
            "or a smaller length."
        ) from error
    return found.windows[0]


def _measure(models, windows, arms, batch_size, progress) -> dict[str, torch.Tensor]:
    """NLL per arm, `[documents]` in the order of the windows, fp64."""
    right = torch.tensor([window.continuation_ids for window in windows])
    nll = {arm: [] for arm in arms}
    with tqdm(total=len(windows) * len(arms), disable=not progress, unit="window") as bar:
        for start in range(0, len(windows), batch_size):
            rows = slice(start, start + batch_size)
            batch = Batch(models, windows[rows])
            for arm in arms:
                bar.set_description(arm, refresh=False)
                continuation_ids = right.roll(1, dims=0) if ARMS[arm].wrong else right
                losses = continuation_nll(models.target, ARMS[arm].cache(batch), continuation_ids[rows])
                for row, loss in enumerate(losses.tolist(), start):
                    if not math.isfinite(loss):
                        document = windows[row - ARMS[arm].wrong].document
                        raise ValueError(
                            f"The arm {arm} gave an NLL of {loss} for document {document} of `documents`. Check the "
                            "dtypes of both models and the translator's weights."
                        )
                nll[arm].append(losses.double())
                bar.update(len(losses))
    # A wrong arm's row was judged on the document before it, and belongs to that one.
    return {arm: torch.cat(nll[arm]).roll(-1 if ARMS[arm].wrong else 0) for arm in arms}


def _figures(nll: dict[str, torch.Tensor], seed: int) -> dict[str, Any]:
    """Arms and metrics of the report, and notes on the metrics that the arms would allow but the data do not."""
    figures: dict[str, Any] = {"arms": {arm: {"nll": losses.mean().item()} for arm, losses in nll.items()}}
    notes = []
    for metric in METRICS:
        figure, note = compare(nll, metric, seed=seed)
        figures |= {metric: figure} if figure else {}
        notes += [note] if note else []
    for arm in nll:
        if arm not in METRICS["recovery"][1]:
            figure, _ = compare(nll, "recovery", arm, seed=seed)
            figures["arms"][arm] |= {"recovery": figure} if figure else {}
    return figures | ({"notes": notes} if notes else {})


def _pair(translator: MoTModel) -> dict[str, str]:
    """Hub id and revision of both models, or the model type of one that has no id."""
    pair = {}
    for side in ("source", "target"):
        contract = getattr(translator.config, side)
        if contract is not None:
            pair[side] = contract["id"] or contract["model_type"]
            if contract["revision"]:
                pair[f"{side}_revision"] = contract["revision"]
    return pair


def _describe(translator: MoTModel) -> dict[str, Any]:
    config = translator.config
    name = translator.name_or_path
    fields = {
        # A Hub id, never a path of the machine at hand.
        "id": None if not name or os.path.exists(name) or os.path.isabs(name) else name,
        "method": config.method,
        "rank": "full" if config.rank is None else config.rank,
        "source_layers": list(config.source_layers),
        "embedding_window": config.embedding_window,
        "bytes": translator_bytes(translator),
    }
    return {key: value for key, value in fields.items() if value is not None}


def save_report(report: dict[str, Any], path: str | os.PathLike) -> None:
    """
    Writes a report as JSON, whole or not at all.

    Args:
        report (`dict`): What `evaluate` returned.
        path (`str` or `os.PathLike`): The file to write; its folder must exist.
    """
    path = Path(path)
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
