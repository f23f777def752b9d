"""One evaluation: context-NLL and tasks, arms, metrics, verdict and cost, as the JSON that `evaluate` writes."""

import difflib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.alignment_mot import tokenize_with_spans
from hf_mot.baselines import BASELINES
from hf_mot.data import iterate_documents
from hf_mot.evaluation.arms import ARMS, find_arm
from hf_mot.evaluation.batch import Baseline, Models
from hf_mot.evaluation.context_nll import CONTEXT_NLL, measure_documents
from hf_mot.evaluation.cost import measure_cost
from hf_mot.evaluation.curve import NEEDED_ARMS, check_plans, columns_of, curve_points, planned_arms
from hf_mot.evaluation.describe import describe_pair, describe_translator, fingerprint, pair_fingerprint
from hf_mot.evaluation.gate import GATE_ARMS, Gate, judge
from hf_mot.evaluation.measure import CRASHES, describe_crash, digest, grouped, measure, own_settings
from hf_mot.evaluation.overlap import RUN_WORDS, shared_runs
from hf_mot.evaluation.prompts import Prompter
from hf_mot.evaluation.question_answering import CLOSED_SETS, Scorer, prepare_questions, task_figures
from hf_mot.evaluation.store import ResultStore
from hf_mot.evaluation.tasks import TASKS, Example, find_task
from hf_mot.evaluation.windows import Window, check_context_length, cut_windows
from hf_mot.guidance_mot import check_guide
from hf_mot.modeling_mot import MoTModel
from hf_mot.replay_mot import ReplayPlan
from hf_mot.sparse_mot import sparse_way
from hf_mot.versions import versions

DEFAULT_ARMS = ("native", "no_context", "translated", "wrong_document")
# From this length on, documents are few, and each gives several windows.
LONG_CONTEXT, WINDOWS_OF_LONG_CONTEXT = 1024, 4


def check_settings(
    translator: MoTModel,
    *,
    arms: Sequence[str] = DEFAULT_ARMS,
    tasks: Iterable[str] = (),
    context_length: int = 256,
    limit: int | None = None,
    batch_size: int = 4,
    replay: str | None = None,
    cost_context_length: int | None = None,
    gate: Gate | None = None,
    curve: Sequence[str] | None = None,
) -> list[str]:
    """
    What can be checked before a model is loaded. Arguments as in [`evaluate`].

    Returns:
        `list[str]`: The arms to run, each once, and those that content recovery, the gate and the curve need.

    Raises:
        ValueError: On an unknown arm, task or plan, or a bad `context_length`, `limit` or `batch_size`.
    """
    if not arms:
        raise ValueError(f"`arms` is empty. Choose from {', '.join(ARMS)}.")
    for arm in arms:
        if arm not in ARMS:
            close = difflib.get_close_matches(str(arm), ARMS, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise ValueError(f"`arms` holds {arm!r}, which is no arm. {hint}Choose from {', '.join(ARMS)}.")
    for name in tasks:
        find_task(name)
    for length in (context_length, cost_context_length):
        if length is not None:
            check_context_length(length, translator.target_geometry.max_positions)
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be at least 1 document, or None for all, got {limit}.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1 document, got {batch_size}.")
    replay = str(translator.plan(replay, context_length))
    if "target_layers_only" in arms and translator.config.target_hidden_layer is None:
        raise ValueError(
            "`arms` holds target_layers_only, but this translator reads no hidden state of the target, so that its "
            "twin does not tell what the target's own layers do alone. Fit one that does, with `target_hidden_layer` "
            "(hf-mot fit --target-hidden-layer N), or leave the arm out."
        )
    arms = [*arms, *(GATE_ARMS if gate is not None else ()), *(NEEDED_ARMS if curve is not None else ())]
    helper = ["native_wrong_document"] if "wrong_document" in arms else []
    arms = list(dict.fromkeys([*arms, *helper]))
    if curve is not None:
        arms += planned_arms(arms, check_plans(translator, curve, context_length, replay), replay)
    return arms


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
            source, target_layers_only for a translator that reads no hidden state of the target, a model in training
            mode, too few long documents, results of other settings in the file, or where
            no arm goes through.
    """
    tasks = dict(tasks or {})
    if documents is None and not tasks:
        raise ValueError("`documents` and `tasks` are both missing: there is nothing to measure on. Give one of them.")
    if cost_context_length is not None and documents is None:
        raise ValueError(
            "`cost_context_length` needs documents to take so many tokens from. Give some, or leave it out: cost is "
            "measured on the longest context of the first task then."
        )
    if closed_sets not in CLOSED_SETS:
        raise ValueError(f"`closed_sets` must be one of {', '.join(CLOSED_SETS)}, got {closed_sets!r}.")
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
    own = context_length - len(translator.config.target["prefix_ids"])
    if documents is not None and ReplayPlan.parse(replay).tokens > own:
        raise ValueError(
            f"`replay` is {replay}, but a context of {context_length} target tokens has {own} besides its special "
            "prefix. Choose fewer tokens, or a longer context."
        )
    plans = [] if curve is None else check_plans(translator, curve, context_length, replay)
    check_models(arms, translator, no_source, source, target, baselines or {})
    if any(ReplayPlan.parse(plan).sparse for plan in (replay, *plans)):
        check_guide(source)
        sparse_way(target)
    prefix_ids = list(translator.config.target["prefix_ids"])
    prompters = {}
    if tasks:
        prompters["target"] = Prompter.of(target_tokenizer, prefix_ids, prompt_style)
        if source is not None and any(find_arm(arm).tasks_only for arm in arms):
            own_prefix = translator.config.source["prefix_ids"]
            style = "plain" if source_tokenizer.chat_template is None else prompt_style
            prompters["source"] = Prompter.of(source_tokenizer, own_prefix, style)
    models = Models(
        source=source,
        target=target,
        source_tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        translator=translator,
        no_source=no_source,
        identity=MoTModel.identity(target, target_tokenizer).eval()
        if any(find_arm(arm).needs == "identity" for arm in arms)
        else None,
        prefix_ids=prefix_ids,
        replay=replay,
        baselines=baselines or {},
        prompters=prompters,
    )
    store = results if isinstance(results, ResultStore) else ResultStore(results)
    settings = {
        "pair": pair_fingerprint(translator),
        "translator": fingerprint(translator),
        "replay": replay,
        "dtype": _dtype(source, target),
        "seed": seed,
    }
    report = {
        "pair": describe_pair(translator),
        "translator": describe_translator(translator),
        "replay": replay,
        "dtype": settings["dtype"],
        "seed": seed,
    }
    made = {name: baseline.report for name, baseline in models.baselines.items() if baseline.report}
    report |= {"baselines": made} if made else {}
    tested: dict[str, dict[str, str]] = {}
    missing: dict[str, dict[str, str]] = {}
    by_plan: dict[str, dict[str, dict[str, Any]]] = {}  # the figures of tasks, by task and plan
    cost_window = None
    # What cannot be asked must not cost the measuring of what comes before it.
    prepared = {
        name: prepare_questions(TASKS[name], examples, models, limit=limit, seed=seed, truncate=truncate)
        for name, examples in tasks.items()
    }
    if documents is not None:
        documents = list(iterate_documents(documents))
        most = None if source is None else translator.source_geometry.max_positions
        found = cut_windows(
            documents,
            target_tokenizer,
            prefix_ids=prefix_ids,
            context_length=context_length,
            limit=limit,
            seed=seed,
            per_document=1 if context_length < LONG_CONTEXT else WINDOWS_OF_LONG_CONTEXT,
            fits=lambda text: most is None or _source_tokens(models, text) <= most,
        )
        found.windows = grouped(found.windows)
        cost_window = found.windows[0]
        if cost and cost_context_length not in (None, context_length):
            cost_window = _joined_window(documents, target_tokenizer, prefix_ids, cost_context_length)
        tested[CONTEXT_NLL] = {str(window.document): documents[window.document] for window in found.windows}
        own_arms = [arm for arm in arms if not find_arm(arm).tasks_only]
        figures, failed = measure_documents(
            models, found, own_arms, store, {**settings, "context_length": context_length}, batch_size, progress
        )
        report |= figures
        missing |= {CONTEXT_NLL: failed} if failed else {}
    for name, questions in prepared.items():
        # Only what concerns the wrong document in general is of no use for questions.
        own_arms = [arm for arm in arms if arm != "native_wrong_document"]
        tested[name] = {question.id: question.example.context for question in questions.items}
        cost_window = cost_window or _window(questions.items[0])
        figures, failed = _task(models, name, questions, own_arms, store, settings, closed_sets, batch_size, progress)
        report.setdefault("tasks", {})[name] = figures[replay]
        by_plan[name] = figures
        missing |= {name: failed} if failed else {}
    if fit_corpus is not None:
        report["overlap"] = _overlap(tested, fit_corpus)
    if gate is not None:
        report["gate"] = judge({**report, "missing": missing}, gate)
    cost_length = len(cost_window.context_ids)
    length = report.get("context_length", cost_length)  # that of the recovery beside them
    native = ARMS["native"].flops(models, length)
    report["flops_ratios"] = {
        arm: ARMS[arm].flops(models, length) / native for arm in arms if arm in ARMS and ARMS[arm].flops is not None
    }
    costs: dict[str, dict[str, float]] = {}
    if cost:
        own = [plan for plan in plans if ReplayPlan.parse(plan).tokens <= cost_length - len(prefix_ids)]
        try:
            report["cost"] = measure_cost(models, cost_window, plans=own)
            costs = report["cost"].pop("by_plan", {})
        except CRASHES as error:
            missing["cost"] = {"translated": describe_crash(error)}
    if plans:
        shares = {plan: ReplayPlan.parse(plan).flops_share(translator.config, length) for plan in plans}
        report["curve"] = curve_points(report, shares, by_plan, costs)
    if missing:
        report["missing"] = missing
    report["versions"] = versions()
    return report


def _task(models, name, questions, arms, store, settings, closed_sets, batch_size, progress):
    """The report's part on one task by each plan, the evaluation's own first, and the arms that crashed."""
    task, style = TASKS[name], models.prompters["target"].style
    own = {"version": task.version, "prompt": style, "items": digest(questions.items)}
    own |= {"closed_sets": closed_sets} if task.closed else {}
    # A plan of more tokens than the shortest context has would crash at it, when all others are done.
    shortest = min(len(question.context_ids) for question in questions.items) - len(models.prefix_ids)
    plans = {arm: find_arm(arm).plan for arm in arms}
    short = {
        arm: f"`replay` {plan} runs more tokens than the {shortest} of the shortest context"
        for arm, plan in plans.items()
        if plan and plan.tokens > shortest
    }
    arms = [arm for arm in arms if arm not in short]
    store.open(name, {**settings, **own}, own_settings(models, arms))
    scorer = Scorer(task, models, questions, closed_sets)
    failed = measure(name, questions.items, arms, models, scorer, store, batch_size=batch_size, progress=progress)
    results = {arm: store.results(name, arm) for arm in arms if arm not in failed}
    replay = settings["replay"]
    by_plan = {replay: {arm: rows for arm, rows in results.items() if plans[arm] is None}}
    for plan in filter(None, plans.values()):
        if "translated" in (rows := columns_of(results, str(plan), replay)):
            by_plan[str(plan)] = rows
    figures = {
        plan: {"prompt": style, **task_figures(task, questions, rows, settings["seed"])}
        for plan, rows in by_plan.items()
    }
    return figures, failed | short


def _overlap(tested: dict[str, dict[str, str]], fit_corpus: Iterable[str]) -> dict[str, Any]:
    """Test documents that share runs of words with the fit's corpus, counted and named."""
    texts = {f"{part}\n{name}": text for part, own in tested.items() for name, text in own.items()}
    named: dict[str, list[str]] = {}
    for key in shared_runs(texts, fit_corpus):
        part, _, name = key.partition("\n")
        named.setdefault(part, []).append(name)
    return {
        "run_words": RUN_WORDS,
        "tested": len(texts),
        "shared": sum(map(len, named.values())),
        "documents": named,
    }


def check_models(arms, translator, no_source, source, target, baselines) -> None:
    """Refuses arms that lack what they need, a missing source, and models in training mode."""
    for arm in arms:
        needs = find_arm(arm).needs
        if needs == "no_source" and no_source is None:
            raise ValueError(
                f"`no_source` is None, but the arm {arm} needs the translator's twin. Pass the one that the fit "
                "saved in OUT/no_source, or leave the arm out of `arms`."
            )
        if needs == "source" and not translator.config.source_layers:
            raise ValueError(f"`arms` holds {arm}, but this translator reads no source. Leave the arm out.")
        if needs in BASELINES and needs not in baselines:
            raise ValueError(
                f"`arms` holds {arm}, but `baselines` holds none of that name. Make it with hf_mot.baselines, or "
                "leave the arm out."
            )
    if source is None and translator.config.source_layers:
        raise ValueError("`source` is None, but this translator reads a source. Pass the source and its tokenizer.")
    for name, model in (("source", source), ("target", target), ("translator", translator), ("no_source", no_source)):
        if model is not None and model.training:
            raise ValueError(f"`{name}` is in training mode, where dropout blurs the figures. Call {name}.eval().")


def _source_tokens(models: Models, text: str) -> int:
    """Tokens of a context that the source reads."""
    prefix_ids = models.translator.config.source["prefix_ids"]
    return len(prefix_ids) + len(tokenize_with_spans(models.source_tokenizer, text)[0])


def _dtype(source: PreTrainedModel | None, target: PreTrainedModel) -> str:
    """The dtype of both models, or of each where they differ."""
    own, other = (None if model is None else str(model.dtype).removeprefix("torch.") for model in (target, source))
    return own if other in (None, own) else f"{own}, source {other}"


def _window(question) -> Window:
    """A question in the form that cost is measured on."""
    return Window(0, question.text, question.context_ids, question.prompt_ids)


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


def save_report(report: dict[str, Any], path: str | os.PathLike) -> None:
    """
    Writes a report as JSON, whole or not at all.

    Args:
        report (`dict`): What `evaluate` returned.
        path (`str` or `os.PathLike`): The file to write; its folder must exist.
    """
    write_whole(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n", Path(path))


def write_whole(text: str, path: Path) -> None:
    """Writes a file whole or not at all."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
