"""Context-NLL: how well the target goes on with a document whose start it has in its cache."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from hf_mot.evaluation.answers import continuation_nll
from hf_mot.evaluation.arms import find_arm
from hf_mot.evaluation.batch import Batch, Models
from hf_mot.evaluation.measure import digest, measure, own_settings
from hf_mot.evaluation.metrics import METRICS, better_by, compare
from hf_mot.evaluation.similarity import (
    attention_outputs,
    attention_similarity,
    cache_similarity,
    first_layer,
)
from hf_mot.evaluation.store import ResultStore
from hf_mot.evaluation.windows import CONTINUATION_TOKENS, Windows

CONTEXT_NLL = "context_nll"
# Changes with anything that changes a result, as a task's does.
VERSION = "1"
COSINES = ("keys", "values", "attention")


def measure_documents(
    models: Models,
    found: Windows,
    arms: list[str],
    store: ResultStore,
    settings: dict[str, Any],
    batch_size: int,
    progress: bool,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The report's part on documents, and the arms that crashed."""
    windows = found.windows
    right = torch.tensor([window.continuation_ids for window in windows])
    own = {"version": VERSION, "items": digest(windows)}
    store.open(CONTEXT_NLL, {**settings, **own}, own_settings(models, arms))

    arms = sorted(arms, key=lambda arm: arm != "native")  # others are compared with it
    has_native = "native" in arms
    native: dict[tuple[int, ...], list[torch.Tensor]] = {}  # attention outputs of the batch at hand

    def score(arm: str, batch: Batch, rows: list[int]) -> list[dict[str, Any]]:
        cache = find_arm(arm).cache(batch)
        with attention_outputs(models.target) as outputs:
            losses = continuation_nll(models.target, cache.fork(), right[rows]).tolist()
        for row, loss in zip(rows, losses, strict=True):
            if not math.isfinite(loss):
                raise ValueError(
                    f"The arm {arm} gave an NLL of {loss} for document {windows[row].document} of `documents`. Check "
                    "the dtypes of both models and the translator's weights."
                )
        results: list[dict[str, Any]] = [{"nll": loss} for loss in losses]
        if arm == "native":
            native.clear()
            native[tuple(rows)] = outputs
        elif find_arm(arm).similar and has_native and outputs:
            if tuple(rows) not in native:  # scored by an earlier run
                native.clear()
                own_cache = batch.native_cache.fork()  # before anything is watched: its prefill runs attention too
                with attention_outputs(models.target) as native[tuple(rows)]:
                    continuation_nll(models.target, own_cache, right[rows])
            cosines = attention_similarity(models, outputs, native[tuple(rows)])
            for result, own, cosine in zip(
                results, cache_similarity(models, cache, batch.native_cache), cosines, strict=True
            ):
                by_layer = {**own, "attention": cosine}
                result |= {name: sum(layers) / len(layers) for name, layers in by_layer.items()}
                result["by_layer"] = by_layer
        return results

    failed = measure(CONTEXT_NLL, windows, arms, models, score, store, batch_size=batch_size, progress=progress)
    results = {arm: store.results(CONTEXT_NLL, arm) for arm in arms if arm not in failed}
    nll = {
        arm: torch.tensor([rows[window.id]["nll"] for window in windows], dtype=torch.float64)
        for arm, rows in results.items()
    }
    skipped = {name: getattr(found, name) for name in ("too_short", "split_character", "too_long_for_source")}
    clusters = [window.document for window in windows]
    figures = {
        "context_nll_version": VERSION,
        "context_length": settings["context_length"],
        "scored_tokens": CONTINUATION_TOKENS - 1,
        "n": len(windows),
        "skipped": {reason: count for reason, count in skipped.items() if count},
        **compare_arms({arm: nll[arm] for arm in nll if find_arm(arm).plan is None}, settings["seed"], clusters),
    }
    if len(set(clusters)) < len(windows):
        figures["n_documents"] = len(set(clusters))
    similar = {
        arm: {key: sum(rows[w.id][key] for w in windows) / len(windows) for key in COSINES}
        for arm, rows in results.items()
        if all(COSINES[0] in rows[window.id] for window in windows)
    }
    for arm, own in similar.items():
        found = [results[arm][window.id].get("by_layer") for window in windows]
        if None not in found:  # rows of an earlier release have means alone
            own["by_layer"] = {key: torch.tensor([row[key] for row in found]).mean(dim=0).tolist() for key in COSINES}
            own["first_layer"] = first_layer(models)
    figures |= {"similarity": similar} if similar else {}
    figures["documents"] = [
        {"document": window.document, **{arm: column[row].item() for arm, column in nll.items()}}
        for row, window in enumerate(windows)
    ]
    return figures, failed


def compare_arms(nll: dict[str, torch.Tensor], seed: int, clusters: Sequence[int] | None = None) -> dict[str, Any]:
    """Arms and metrics of the report, and notes on the metrics that the arms would allow but the data do not."""
    figures: dict[str, Any] = {"arms": {arm: {"nll": losses.mean().item()} for arm, losses in nll.items()}}
    notes = []
    for metric in METRICS:
        figure, note = compare(nll, metric, seed=seed, clusters=clusters)
        figures |= {metric: figure} if figure else {}
        notes += [note] if note else []
    for arm in nll:
        if arm not in METRICS["recovery"][1]:
            figure, _ = compare(nll, "recovery", arm, seed=seed, clusters=clusters)
            figures["arms"][arm] |= {"recovery": figure} if figure else {}
    figures |= better_by(nll, seed, clusters, sign=-1)
    return figures | ({"notes": notes} if notes else {})
