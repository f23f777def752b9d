"""The model card of a translator, rendered from its config and its fit report: no figure that is not in them."""

from typing import Any

from hf_mot.configuration_mot import MoTConfig
from hf_mot.evaluation.curve_report import curve_table
from hf_mot.evaluation.describe import describe_form, format_interval, format_rank
from hf_mot.evaluation.gate import CONTROLS
from hf_mot.evaluation.report import render_table
from hf_mot.hub.handwriting import compose
from hf_mot.hub.metadata import METRICS, front_matter, plain_front_matter
from hf_mot.hub.representation import describe_restored

ARMS = {
    "native": "the context itself",
    "translated": "**the translated cache**",
    "identity": "its own cache, through the same path (check)",
    "no_source": "a cache made without any source: its own embeddings alone, refitted (control)",
    "target_layers_only": "a cache made of its own first layers alone, refitted (control)",
    "wrong_document": "the translated cache of another document (control)",
    "no_context": "nothing",
}
LICENCES = {
    "demo/smollm2-135m-instruct": "SmolLM2-135M-Instruct is under Apache-2.0",
    "demo/gemma-3-270m": "Gemma-3-270m is under the Gemma terms of use, which also cover what is derived from it",
}

SNIPPET = """\
```python
import hf_mot
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer{imports}

source = {source_model}
target = {target_model}
source_tokenizer = {source_tokenizer}
target_tokenizer = {target_tokenizer}
pair = dict(source=source, target=target, source_tokenizer=source_tokenizer, target_tokenizer=target_tokenizer)

mot = AutoModel.from_pretrained("{repo}")
translated = mot.handoff("The keys are in the blue drawer.", **pair)
prompt = target_tokenizer("\\nQuestion: Where are the keys?\\nAnswer:", return_tensors="pt")
output = target.generate(**prompt, past_key_values=translated, max_new_tokens=64)
print(target_tokenizer.decode(output[0], skip_special_tokens=True))
```

A cache that the source already has, in mid-conversation, is translated by
`mot.translate(source_cache, source_input_ids, target=target, source_tokenizer=source_tokenizer,
target_tokenizer=target_tokenizer)`. Without the package installed, leave out `import hf_mot`: the code comes with the
translator.

```python
from transformers import AutoModel

mot = AutoModel.from_pretrained("{repo}", trust_remote_code=True)
```"""

LIMITS = """\
- It fits this pair alone. Another model, revision, adapter or tokenizer is refused.
- A good NLL can hide a loss of exact recall: names, numbers and quotations suffer first. Try your own questions.
- On text unlike its corpus it does worse; a fit on your own text is the cure."""


def render_card(config: MoTConfig, fit_report: dict[str, Any], repo_id: str = ".") -> str:
    """
    Renders the card. What the report does not hold is left out.

    Args:
        config ([`MoTConfig`]): The translator's configuration.
        fit_report (`dict`): The translator's `fit_report.json`.
        repo_id (`str`, *optional*, defaults to `"."`): The Hub id in the use snippet; by default the snippet runs in
            the translator's own folder.

    Returns:
        `str`: Markdown with a YAML front matter, between the markers of `hf_mot.hub.handwriting`.
    """
    source, target = config.source or {}, config.target or {}
    evaluation = fit_report.get("evaluation", {})
    parts = [
        *_opening(source, target, repo_id),
        *_figures(evaluation),
        *_curve(config, evaluation),
        *_tasks(evaluation),
        *_gate(evaluation),
        *_cost(evaluation),
        *_making(config, fit_report),
        "## Limits",
        LIMITS,
        "## Licences",
        _licences(source, target, fit_report.get("license")),
    ]
    return compose(front_matter(config, fit_report, _short_name(source, target, repo_id)), "\n\n".join(parts))


def minimal_card(config: MoTConfig, repo_id: str = ".") -> str:
    """The card of a translator whose fit report cannot be rendered: no figures. Arguments as in [`render_card`]."""
    source, target = config.source or {}, config.target or {}
    parts = [*_opening(source, target, repo_id), "## Limits", LIMITS, "## Licences", _licences(source, target, None)]
    return compose(plain_front_matter(config), "\n\n".join(parts))


def _opening(source: dict[str, Any], target: dict[str, Any], repo_id: str) -> list[str]:
    return [
        f"# {_name(source)} → {_name(target)}",
        f"This translator (made with hf_mot) turns the KV cache of {_name(source)} into one that {_name(target)} "
        "continues from: the target answers about a context that only the source has read.",
        "## Use",
        _snippet(source, target, repo_id),
    ]


def _name(side: dict[str, Any]) -> str:
    return side.get("id") or f"a local {side.get('model_type', 'model')}"


def _short_name(source: dict[str, Any], target: dict[str, Any], repo_id: str) -> str:
    if repo_id != ".":
        return repo_id.split("/")[-1]
    return "-to-".join(_name(side).split("/")[-1] for side in (source, target))


def _snippet(source: dict[str, Any], target: dict[str, Any], repo_id: str) -> str:
    fields = {"repo": repo_id, "imports": ""}
    for side, contract in (("source", source), ("target", target)):
        name = contract.get("id") or f"path/to/the/{side}"
        if name.startswith("demo/"):
            fields["imports"] = "\n\nfrom hf_mot.hub.resolve import load_model, load_tokenizer"
            loaders = ("load_model", "load_tokenizer")
        else:
            loaders = ("AutoModelForCausalLM.from_pretrained", "AutoTokenizer.from_pretrained")
        fields[f"{side}_model"], fields[f"{side}_tokenizer"] = (f'{loader}("{name}")' for loader in loaders)
    return SNIPPET.format(**fields)


def _figures(evaluation: dict[str, Any]) -> list[str]:
    """What the target makes of the context in each arm, the controls beside the translation."""
    if "arms" not in evaluation:
        return []
    corpus = [entry["name"] for entry in evaluation.get("corpus", [])]
    counted = f"{evaluation['n']} documents"
    if "n_documents" in evaluation:
        counted = f"{evaluation['n']} windows of {evaluation['n_documents']} documents"
    facts = [f"{counted} that it was not fitted on{' from ' if corpus else ''}{' and '.join(corpus)}"]
    facts += [f"{evaluation['context_length']} tokens of context"] if "context_length" in evaluation else []
    facts += [f"replay plan `{evaluation['replay']}`", f"seed {evaluation['seed']}"]
    facts += [evaluation["dtype"]] if "dtype" in evaluation else []
    rows = ["| the target has read | NLL of what follows | recovery |", "| --- | --- | --- |"]
    for arm, label in ARMS.items():
        if arm in evaluation["arms"]:
            figures = evaluation["arms"][arm]
            rows.append(f"| {label} | {figures['nll']:.3f} | {format_interval(figures.get('recovery'))} |")
    meanings = [
        f"- **{metric.replace('_', ' ')} {format_interval(evaluation[metric])}**: {meaning}"
        for metric, meaning in METRICS.items()
        if metric in evaluation
    ]
    notes = [f"- {note}" for note in evaluation.get("notes", [])]
    return [
        "## What a translated cache is worth",
        f"Measured on {', '.join(facts)}. In brackets: bootstrap 95 % intervals over documents.",
        "\n".join(rows),
        "\n".join(meanings + notes),
    ]


def _curve(config: MoTConfig, evaluation: dict[str, Any]) -> list[str]:
    """What is kept by each replay plan: all that the last evaluation says of it, or what the config has kept."""
    kept = config.replay_curve or {}
    points, facts = evaluation.get("curve"), evaluation
    if points is None:
        points, facts = kept.get("points", []), kept
    if not points:
        return []
    head, rows = curve_table(points)
    measured = [f"{facts['n']} documents"] if "n" in facts else []
    measured += [f"{facts['context_length']} tokens of context"] if "context_length" in facts else []
    said = [
        "What the target computes itself of the context, as a share of its own prefill's FLOPs (the translator "
        f"included), and what is kept{' (' + ', '.join(measured) + ')' if measured else ''}."
    ]
    if kept:
        said.append('`replay="auto:0.25"` takes the best plan within that share of FLOPs.')
    table = render_table(head, [[f"`{plan}`", *cells] for plan, *cells in rows])
    return ["## Replay plans", " ".join(said), "\n".join(table)]


def _tasks(evaluation: dict[str, Any]) -> list[str]:
    """What the target answers to questions about a context, by what it has read of it."""
    if not evaluation.get("tasks"):
        return []
    rows = [
        "| task | figure | questions | the context itself | **translated** | nothing | recovery of the answer's NLL |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, task in evaluation["tasks"].items():
        figures = [task.get(arm) for arm in ("native", "translated", "no_context")]
        figures.append(task.get("answer_nll", {}).get("recovery"))
        rows.append(f"| {' | '.join([name, task['metric'], str(task.get('n', '')), *map(_figure, figures)])} |")
    return ["## Questions about a context", f"Drawn by seed {evaluation['seed']}.", "\n".join(rows)]


def _figure(figure: float | dict[str, float] | None) -> str:
    if figure is None:
        return ""
    return format_interval(figure) if isinstance(figure, dict) else f"{figure:.3f}"


def _gate(evaluation: dict[str, Any]) -> list[str]:
    """The verdict by the controls, where one was asked for."""
    if "gate" not in evaluation:
        return []
    gate = evaluation["gate"]
    verdict = "**Passed**" if gate["passed"] else "**Not passed**"
    rule = (
        f"A recovery of at least {gate['recovery']:g}, and better than each control ({', '.join(CONTROLS)}) by more "
        f"than {gate['margin']:g} nats a token with the whole paired interval."
    ).replace("_", " ")
    reasons = [f"- {reason}" for reason in gate["reasons"]]
    judged = f"{verdict}, judged on {', '.join(gate['judged_on']) or 'nothing'}."
    return ["## Gate", rule, judged, *(["\n".join(reasons)] if reasons else [])]


def _cost(evaluation: dict[str, Any]) -> list[str]:
    cost = evaluation.get("cost", {})
    lines = []
    if "time_ratio" in cost:
        length = f" at {cost['context_length']} tokens" if "context_length" in cost else ""
        lines.append(f"- time of a handoff over the target's own prefill{length}: {cost['time_ratio']:.3f}")
    if "flops_ratio" in cost:
        lines.append(f"- the same in FLOPs: {cost['flops_ratio']:.3f}")
    if "translator_bytes" in cost:
        lines.append(f"- weights of the translator: {cost['translator_bytes'] / 1e6:.1f} MB as loaded")
    if not lines:
        return []
    return ["## Cost", "The source's own reading of the context is not counted.", "\n".join(lines)]


def _making(config: MoTConfig, report: dict[str, Any]) -> list[str]:
    form = describe_form(config)
    layers = ", ".join(map(str, config.source_layers)) or "none"
    written = form.get("target_layers")
    reads_target = config.target_hidden_layer is not None
    window = f", target layers {written[0]}-{written[-1]}" if written else ""
    lines = [
        f"- method: {config.method}{format_rank(form)}, source layers {layers}"
        + (f" of {form['source_window']} tokens" if "source_window" in form else "")
        + f"{window}, embeddings of {config.embedding_window} target tokens"
        + (f", the target's hidden state before layer {config.target_hidden_layer}" if reads_target else "")
    ]
    if config.key_norms:
        lines.append(f"- keys get the weighted length of the target's own in {len(config.key_norms)} of its layers")
    if config.resume_layer is not None:
        lines.append(
            f"- translated is what goes into target layer {config.resume_layer} too, from which the target runs"
        )
    restored = describe_restored(config)
    lines += [f"- translated is {'; '.join(restored)}"] if restored else []
    lines += [f"- corpus: {_corpus(corpus)}" for corpus in report.get("corpus", [])]
    counts = [f"{report[key]} {key}" for key in ("tokens", "windows", "documents") if key in report]
    lines += [f"- fitted on {', '.join(counts)}"] if counts else []
    lines += [f"- {key}: {report[key]}" for key in ("ridge", "seed") if key in report]
    lines += _training(report["training"]) if "training" in report else []
    versions = ", ".join(f"{package} {version}" for package, version in report.get("versions", {}).items())
    lines += [f"- versions: {versions}"] if versions else []
    lines += [f"- command: `{report['command']}`"] if "command" in report else []
    return ["## How it was made", "\n".join(lines)]


def _corpus(corpus: dict[str, Any]) -> str:
    documents = f", {corpus['documents']} documents" if "documents" in corpus else ""
    return f"{corpus['name']}{documents}" + "".join(
        f", {key} {corpus[key]}" for key in ("sha256", "digest") if key in corpus
    )


def _training(training: dict[str, Any]) -> list[str]:
    settings = training["settings"]
    losses = " + ".join(f"{weight:g} × {name}" for name, weight in settings["losses"].items())
    rows = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] * training["processes"]
    lines = [
        f"- trained: {training['steps']} steps of {rows} sequences, {training['tokens']} tokens in all, for the plan "
        f"`{training['replay']}`; losses {losses}; learning rate {settings['learning_rate']:g}, {training['schedule']}"
    ]
    lines += [f"- trained on: {_corpus(corpus)}" for corpus in training.get("corpus", [])]
    versions = ", ".join(f"{package} {version}" for package, version in training["versions"].items())
    lines.append(f"- trained with: {versions}")
    return lines + ([f"- command of the training: `{training['command']}`"] if "command" in training else [])


def _licences(source: dict[str, Any], target: dict[str, Any], own: str | None) -> str:
    weights = f", its weights under {own}" if own else ""
    models = [LICENCES.get(side.get("id"), f"for {_name(side)} see the model's own card") for side in (source, target)]
    return (
        f"The code that comes with the translator is under Apache-2.0{weights}. The weights hold none of either "
        "model, but were fitted on states of both, whose licences stay in force: "
        f"{'; '.join(models)}."
    )
