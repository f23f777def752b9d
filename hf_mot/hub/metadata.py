"""What a translator tells the Hub: the front matter of its card, and the figures that the Hub shows and compares."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml
from huggingface_hub.repocard_data import eval_results_to_model_index
from huggingface_hub.utils import yaml_dump

from hf_mot.configuration_mot import METHODS, MoTConfig

TAG = "hf_mot"  # what a search for translators looks for
SOURCE_TAG, TARGET_TAG = "source:", "target:"
METRICS = {
    "recovery": "what of the context's worth the translation keeps: 1 as if read natively, 0 as if not at all",
    "content_recovery": "the same, measured from the translation of another document",
    "source_value": "what the source adds to the target's own token embeddings",
}
EVAL_RESULTS, EVAL_PREFIX = ".eval_results", "hf_mot_"

# Front matter that a rendering sets or removes. Any other key is left to whoever writes the card.
OWNED_KEYS = ("library_name", "base_model", "base_model_relation", "model-index")


def owns_tag(tag: str) -> bool:
    """Whether a tag says what the translator is, so that it goes when it is no longer true."""
    return tag in METHODS or tag.startswith((SOURCE_TAG, TARGET_TAG))


def front_matter(config: MoTConfig, fit_report: dict[str, Any], name: str) -> dict[str, Any]:
    """
    The metadata of the card.

    Args:
        config ([`MoTConfig`]): The translator's configuration.
        fit_report (`dict`): Its `fit_report.json`.
        name (`str`): Its name in `model-index`.

    Returns:
        `dict`: What is not known (a model's Hub id, a licence, figures) is absent.
    """
    data = plain_front_matter(config)
    sides = (config.source or {}, config.target or {})
    base_models = list(dict.fromkeys(side["id"] for side in sides if is_on_hub(side)))
    if base_models:
        data["base_model"] = base_models
        # Small weights beside frozen models. Without it the Hub guesses, and takes two base models for a merge.
        data["base_model_relation"] = "adapter"
    if "license" in fit_report:
        data["license"] = fit_report["license"]
    figures = [_model_index_entry(figure) for figure in _figures(fit_report.get("evaluation", {}))]
    if figures:
        data["model-index"] = eval_results_to_model_index(name, figures)
    return data


def plain_front_matter(config: MoTConfig) -> dict[str, Any]:
    """The metadata by which a translator is found, and nothing that could be refused."""
    tags = [TAG, "kv-cache", "kv-cache-translation", config.method]
    for prefix, side in ((SOURCE_TAG, config.source), (TARGET_TAG, config.target)):
        if side and side.get("id"):
            tags.append(f"{prefix}{side['id']}")
    return {"library_name": TAG, "tags": tags}


def is_on_hub(side: dict[str, Any]) -> bool:
    """Whether a model's contract names it by its Hub id."""
    return bool(side.get("id")) and not side["id"].startswith("demo/")


def eval_results(fit_report: dict[str, Any]) -> dict[str, str]:
    """
    The figures that the Hub compares across models: those whose `dataset` (`id` and `task_id`, a benchmark of the Hub)
    the report records. One on text of one's own belongs to no benchmark, and stands in the card alone.

    Args:
        fit_report (`dict`): A translator's `fit_report.json`.

    Returns:
        `dict[str, str]`: File in the repository → YAML, in the form of https://huggingface.co/docs/hub/eval-results.
    """
    files = {}
    for figure in _figures(fit_report.get("evaluation", {})):
        if not figure.counts or "task_id" not in figure.dataset:
            continue
        entry = EvalResultEntry(
            dataset_id=figure.dataset["id"],
            task_id=figure.dataset["task_id"],
            dataset_revision=figure.dataset.get("revision"),
            value=figure.value,
            notes=", ".join([figure.metric, *(f"{key} {value}" for key, value in figure.settings.items())]),
        )
        name = f"{EVAL_PREFIX}{re.sub(r'[^A-Za-z0-9-]+', '_', figure.task)}.yaml"
        files[f"{EVAL_RESULTS}/{name}"] = yaml_dump(eval_result_entries_to_yaml([entry]), sort_keys=False)
    return files


@dataclass(frozen=True)
class _Figure:
    """A measured figure; `counts` marks the one figure of its task that a leaderboard may show."""

    task: str
    metric: str
    value: float
    settings: dict[str, Any]
    dataset: dict[str, str]
    corpus: str
    counts: bool = True


def _figures(evaluation: dict[str, Any]) -> Iterator[_Figure]:
    settings = {key: evaluation[key] for key in ("replay", "context_length", "n", "seed") if key in evaluation}
    corpus = ", ".join(entry["name"] for entry in evaluation.get("corpus", []))
    for metric in METRICS:
        if metric in evaluation:
            value, interval = _split(evaluation[metric])
            dataset = evaluation.get("dataset", {})
            counts = metric == "recovery"
            yield _Figure("context", metric, value, {**settings, **interval}, dataset, corpus, counts)
    for task, figures in evaluation.get("tasks", {}).items():
        if "translated" in figures:
            value, interval = _split(figures["translated"])
            own = {key: figures[key] for key in ("n", "seed") if key in figures}
            dataset = figures.get("dataset", {})
            yield _Figure(task, figures["metric"], value, {**settings, **own, **interval}, dataset, task)


def _split(figure: float | dict[str, float]) -> tuple[float, dict[str, float]]:
    """A figure and its interval, in four digits."""
    if not isinstance(figure, dict):
        return round(figure, 4), {}
    return round(figure["value"], 4), {bound: round(figure[bound], 4) for bound in ("low", "high") if bound in figure}


def _model_index_entry(figure: _Figure) -> EvalResult:
    of_context = figure.task == "context"
    return EvalResult(
        task_type="text-generation" if of_context else "question-answering",
        task_name="Going on with a text whose start only the source has read" if of_context else figure.task,
        # "text" is the name by which `datasets` loads text files.
        dataset_type=figure.dataset.get("id", "text" if of_context else figure.task),
        dataset_name=figure.corpus or "held-out documents",
        dataset_revision=figure.dataset.get("revision"),
        metric_type=figure.metric,
        metric_name=figure.metric.replace("_", " "),
        metric_value=figure.value,
        metric_args=figure.settings,
    )
