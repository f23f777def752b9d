"""One evaluation: context-NLL and tasks, arms, metrics, verdict and cost, as the JSON that `evaluate` writes."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.data import iterate_documents
from hf_mot.evaluation.arms import find_arm
from hf_mot.evaluation.batch import Baseline, Models
from hf_mot.evaluation.curve import check_plans
from hf_mot.evaluation.gate import Gate
from hf_mot.evaluation.prompts import Prompter
from hf_mot.evaluation.question_answering import prepare_questions
from hf_mot.evaluation.run import Run
from hf_mot.evaluation.settings import (
    DEFAULT_ARMS,
    check_models,
    check_pair,
    check_parts,
    check_replay,
    check_settings,
)
from hf_mot.evaluation.store import ResultStore
from hf_mot.evaluation.tasks import TASKS, Example
from hf_mot.modeling_mot import MoTModel


@torch.no_grad()
def evaluate(
    translator: MoTModel,
    documents: Iterable[str | Mapping[str, str]] | None = None,
    *,
    source: PreTrainedModel | None,
    target: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase,
    no_source: MoTModel | None = None,
    baselines: Mapping[str, Baseline] | None = None,
    tasks: Mapping[str, Sequence[Example]] | None = None,
    arms: Sequence[str] = DEFAULT_ARMS,
    context_length: int = 256,
    limit: int | None = None,
    batch_size: int = 4,
    seed: int = 0,
    replay: str | None = None,
    curve: Sequence[str] | None = None,
    prompt_style: str = "auto",
    closed_sets: str = "likelihood",
    truncate: bool = False,
    gate: Gate | None = None,
    fit_corpus: Iterable[str] | None = None,
    results: str | os.PathLike | ResultStore | None = None,
    cost: bool = True,
    cost_context_length: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """
    Measures a translator: by context-NLL, how well the target goes on with a document whose start it has in its cache;
    and on tasks, how well it answers questions about such a context. The context is got in several ways (the arms).

    Args:
        translator (`MoTModel`): The translator to judge.
        documents (`Iterable[str]` or a `datasets` dataset, *optional*): Documents that it was not fitted on. One
            window each, at the start; up to 4 disjoint ones from 1,024 tokens of context on.
        source (`PreTrainedModel`, *optional*): The model that reads; `None` only if the translator uses no source.
        target (`PreTrainedModel`): The model that goes on.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*): The source's tokenizer.
        target_tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        no_source (`MoTModel`, *optional*): The translator's twin without source; needed by the arm of that name, and
            by target_layers_only.
        baselines (`Mapping[str, Baseline]`, *optional*): Rivals, by the name of their arm, as `hf_mot.baselines` makes
            them; needed by these arms.
        tasks (`Mapping[str, Sequence[Example]]`, *optional*): Examples by task, as `load_examples` gives them.
        arms (`Sequence[str]`, *optional*): Names from `ARMS`; native, no_context, translated and wrong_document by
            default.
        context_length (`int`, *optional*, defaults to 256): Target tokens of a document's context, its prefix
            included.
        limit (`int`, *optional*): Number of windows, and of questions a task; all that fit by default.
        batch_size (`int`, *optional*, defaults to 4): Contexts per forward; changes nothing but speed and memory.
        seed (`int`, *optional*, defaults to 0): Seed of the order of documents and questions and of the bootstrap.
        replay (`str`, *optional*): What the target recomputes; by default what the translator was made for. `"auto"`
            is one plan for all contexts, the one for `context_length`.
        curve (`Sequence[str]`, *optional*): Replay plans that are measured too, as `default_plans` gives them: the
            translation by each, and its wrong document and its twin where these are among `arms`. All else is measured
            once for all of them, and each context read once by the source.
        prompt_style (`str`, *optional*, defaults to `"auto"`): `"chat"`, `"plain"`, or chat where a tokenizer has a
            chat template.
        closed_sets (`str`, *optional*, defaults to `"likelihood"`): How a choice is made: the likeliest one, or the
            one that the model's own answer names (`"generate"`).
        truncate (`bool`, *optional*, defaults to `False`): Cut a task's contexts that are longer than the models
            allow, instead of skipping them; either is counted.
        gate ([`Gate`], *optional*): Adds the arms that a verdict needs, and the verdict.
        fit_corpus (`Iterable[str]`, *optional*): The documents of the fit: test documents that share a run of 13 words
            with them are counted and named.
        results (`str`, `os.PathLike` or [`ResultStore`], *optional*): A file for the results of each example as they
            come. What it holds already is not computed again.
        cost (`bool`, *optional*, defaults to `True`): Whether to measure times and sizes too.
        cost_context_length (`int`, *optional*, defaults to `context_length`): Tokens of context that cost is measured
            on; the text is then taken from all documents, joined.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

    Returns:
        `dict`: Ready for JSON. What was not measured is absent; `notes` says why where it could be expected, and
        `missing` what an arm crashed with. `curve` is as [`curve_points`] says, by cost.

    Raises:
        ValueError: On an unknown arm, task or plan, a bad `context_length`, `limit` or `batch_size`, a missing twin or
            source, models, tokenizers or a twin of another pair, a model in training mode, target_layers_only for a
            translator that reads no hidden state of the target, too few long documents, results of other settings in
            the file, or where no arm goes through.
    """
    tasks, baselines = dict(tasks or {}), baselines or {}
    check_parts(documents, tasks, closed_sets, cost_context_length)
    arms = check_settings(
        translator,
        arms=arms,
        tasks=tasks,
        context_length=context_length,
        limit=limit,
        batch_size=batch_size,
        replay=replay,
        cost_context_length=cost_context_length,
        gate=gate,
        curve=curve,
    )
    replay = str(translator.plan(replay, context_length))
    if documents is not None:
        check_replay(translator, replay, context_length)
    plans = [] if curve is None else check_plans(translator, curve, context_length, replay)
    check_models(arms, translator, no_source, source, target, baselines, (replay, *plans))
    check_pair(translator, no_source, source, target, source_tokenizer, target_tokenizer)
    needs_identity = any(find_arm(arm).needs == "identity" for arm in arms)
    models = Models(
        source=source,
        target=target,
        source_tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        translator=translator,
        no_source=no_source,
        identity=MoTModel.identity(target, target_tokenizer).eval() if needs_identity else None,
        prefix_ids=list(translator.config.target["prefix_ids"]),
        replay=replay,
        baselines=baselines,
        prompters=_prompters(translator, arms, source_tokenizer, target_tokenizer, prompt_style) if tasks else {},
    )
    # What cannot be asked must not cost the measuring of what comes before it.
    prepared = {
        name: prepare_questions(TASKS[name], examples, models, limit=limit, seed=seed, truncate=truncate)
        for name, examples in tasks.items()
    }
    store = results if isinstance(results, ResultStore) else ResultStore(results)
    run = Run(models, arms, plans, store, seed, batch_size, progress)
    if documents is not None:
        documents = list(iterate_documents(documents))
        run.measure_documents(documents, context_length, limit, cost_context_length if cost else None)
    for name, questions in prepared.items():
        run.measure_task(name, questions, closed_sets)
    if fit_corpus is not None:
        run.count_overlap(fit_corpus)
    if gate is not None:
        run.judge(gate)
    run.count_flops()
    if cost:
        run.measure_cost()
    if plans:
        run.add_curve()
    return run.finish()


def _prompters(translator, arms, source_tokenizer, target_tokenizer, style: str) -> dict[str, Prompter]:
    """The target's, and the source's where an arm asks it something."""
    found = {"target": Prompter.of(target_tokenizer, translator.config.target["prefix_ids"], style)}
    if source_tokenizer is not None and any(find_arm(arm).tasks_only for arm in arms):
        found["source"] = Prompter.of_source(source_tokenizer, translator.config.source["prefix_ids"], style)
    return found
