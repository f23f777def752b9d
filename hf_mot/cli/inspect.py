"""`hf-mot inspect`: what a translator is, read from its own files; the language models are not loaded."""

import argparse
import itertools
from typing import Any

from hf_mot.cli import check_output_file

HELP = "show what a translator is: pair, layers, sizes, cost and figures"

COST_CONTEXT = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("translator", metavar="TRANSLATOR", help="folder or Hub id of a translator")
    parser.add_argument("--json", metavar="PATH", help="also write it to this file")


def run(args: argparse.Namespace) -> int:
    check_output_file(args.json, "--json")

    from hf_mot.evaluation import save_report
    from hf_mot.hub.resolve import load_translator

    description = describe(load_translator(args.translator))
    if args.json is not None:
        save_report(description, args.json)
    print(format_description(description))
    return 0


def describe(translator) -> dict[str, Any]:
    """What a loaded translator is, ready for JSON; what it does not record is absent."""
    from hf_mot.evaluation.describe import describe_form
    from hf_mot.hub.representation import describe_restored

    config = translator.config
    description = {
        **describe_form(config),
        "parameters": translator.num_parameters(),
        "bytes": sum(weight.nbytes for weight in translator.parameters()),
        "dtype": str(translator.dtype).removeprefix("torch."),
        "flops_share": {
            "replay": str(translator.plan()),
            "context_length": COST_CONTEXT,
            "value": translator.plan().flops_share(config, COST_CONTEXT),
        },
        "source": _describe_side(config.source),
        "target": _describe_side(config.target),
    }
    if config.restored_layers:
        description["restored"] = {"layers": config.restored_layers, "says": describe_restored(config)}
    if config.replay_curve is not None:
        description["replay_curve"] = config.replay_curve
    if translator.fit_report is not None:
        description["fit_report"] = translator.fit_report
    return description


def format_description(description: dict[str, Any]) -> str:
    """The description as lines for a terminal."""
    from hf_mot.evaluation.describe import format_rank

    source, target = description["source"], description["target"]
    layers, written = description["source_layers"], description.get("target_layers")
    share, depth = description["flops_share"], _layer_count(target)
    norms, hidden = description.get("key_norms", []), description.get("target_hidden_layer")
    predicts = description.get("predicts_error", False)
    resumed = description.get("resume_layer")
    rows = [
        ("pair", f"{_name(source)} → {_name(target)}"),
        ("method", f"{description['method']}{format_rank(description)}"),
        ("reads", f"{len(set(layers))} of {_layer_count(source)} source layers ({', '.join(map(str, layers))})"),
        *([("", f"of {description['source_window']} tokens")] if "source_window" in description else []),
        ("", f"embeddings of {description['embedding_window']} target tokens, the own one included"),
        *([("", f"the target's hidden state before its layer {hidden}")] if hidden is not None else []),
        ("writes", f"all {depth} target layers" if written is None else _window(written, depth)),
        *([("", f"what goes into layer {resumed}, from which the target runs itself")] if resumed is not None else []),
        *(("", line) for line in description.get("restored", {}).get("says", [])),
        *([("", f"keys of the weighted length of the target's own in {len(norms)} of them")] if norms else []),
        *([("", "how wrong each token is likely to be (plan uncertain)")] if predicts else []),
        ("weights", f"{description['parameters']:,}, {description['bytes'] / 1e6:.1f} MB in {description['dtype']}"),
        (
            "cost",
            f"{share['value']:.3f} of the target's own prefill FLOPs at {share['context_length']:,} tokens, by the "
            f"plan {share['replay']}",
        ),
    ]
    rows += _curve_rows(description.get("replay_curve"))
    for label, side in (("source", source), ("target", target)):
        variant = " with an adapter" * ("adapter" in side)
        variant += f" quantized by {side['quantization']}" if "quantization" in side else ""
        model = f"{side['model_type']}{variant}"
        rows.append((label, f"{model}, prefix ids {side['prefix_ids']}, fitted in {side['dtype']}"))
        rows += [("", _layers(group)) for group in side["layers"]]
    rows += _fit_rows(description.get("fit_report", {}))
    return "\n".join(f"{label:<18}{text}".rstrip() for label, text in rows)


def _describe_side(contract: dict[str, Any]) -> dict[str, Any]:
    """A model's contract without its fingerprints, equal neighbouring layers together."""
    fields = ("kv_heads", "key_dim", "value_dim", "position")
    groups = itertools.groupby(
        contract["geometry"]["layers"], key=lambda layer: {field: layer[field] for field in fields}
    )
    known = ("id", "revision", "adapter", "quantization", "model_type", "dtype", "prefix_ids")
    return {
        **{key: contract[key] for key in known if contract.get(key) is not None},
        "layers": [{"count": len(list(group)), **geometry} for geometry, group in groups],
    }


def _name(side: dict[str, Any]) -> str:
    name = side.get("id", f"a local {side['model_type']} model")
    return f"{name}@{side['revision'][:8]}" if "revision" in side else name


def _window(layers: list[int], depth: int) -> str:
    return f"{len(layers)} of {depth} target layers ({layers[0]}-{layers[-1]}), the others are the target's own"


def _layer_count(side: dict[str, Any]) -> int:
    return sum(group["count"] for group in side["layers"])


def _layers(group: dict[str, Any]) -> str:
    keys, values = group["key_dim"], group["value_dim"]
    dims = f"{keys}" if keys == values else f"{keys} (keys) and {values} (values)"
    return f"{group['count']} layers of {group['kv_heads']} kv heads × {dims}, positions: {group['position']}"


def _curve_rows(curve: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What each replay plan keeps, as far as it was measured."""
    if curve is None:
        return []
    lines = [f"measured on {curve['n']} documents, {curve['context_length']:,} tokens"]
    for point in curve["points"]:
        own = point["recovery"]
        figure = f"{own['value']:.3f}  [{own['low']:.3f}, {own['high']:.3f}]"
        lines.append(f"{point['replay']}: {point['flops_share']:.3f} of native FLOPs, recovery {figure}")
    return [("plans", lines[0]), *(("", line) for line in lines[1:])]


def _fit_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    if not report:
        return []
    training = report.get("training", {})
    corpus, trained = (", ".join(entry["name"] for entry in own.get("corpus", [])) for own in (report, training))
    rows = [
        ("fitted on", corpus),
        ("", ", ".join(f"{report[key]:,} {key}" for key in ("tokens", "windows", "documents") if key in report)),
        ("", ", ".join(f"{key} {report[key]}" for key in ("ridge", "seed") if key in report)),
    ]
    if training:
        rows.append(("trained on", trained))
        rows.append(("", f"{training['steps']:,} steps, {training['tokens']:,} tokens, plan {training['replay']}"))
    evaluation = report.get("evaluation", {})
    if "n" in evaluation:
        rows.append(("measured on", f"{evaluation['n']} other documents, seed {evaluation['seed']}"))
    for metric in ("recovery", "content_recovery", "source_value"):
        if metric in evaluation:
            figure = evaluation[metric]
            rows.append((metric, f"{figure['value']:.3f}  [{figure['low']:.3f}, {figure['high']:.3f}]"))
    return [(label, text) for label, text in rows if text]
