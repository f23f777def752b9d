"""What was measured: how reports and cards name a translator and its pair, and by what its results are known."""

import hashlib
import json
import os
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_mot.configuration_mot import MoTConfig
from hf_mot.contract_mot import identity
from hf_mot.evaluation.cost import translator_bytes
from hf_mot.modeling_mot import MoTModel


def format_number(value: float | None, digits: int) -> str:
    """A figure in a table, empty where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def format_interval(figure: dict[str, float] | None) -> str:
    """A figure with its interval in a table, empty where there is none."""
    return "" if figure is None else f"{figure['value']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def describe_pair(translator: MoTModel) -> dict[str, str]:
    """Hub id and revision of both models, or the model type of one that has no id."""
    pair = {}
    for side in ("source", "target"):
        contract = getattr(translator.config, side)
        if contract is not None:
            pair[side] = contract["id"] or contract["model_type"]
            if contract["revision"]:
                pair[f"{side}_revision"] = contract["revision"]
    return pair


def describe_form(config: MoTConfig) -> dict[str, Any]:
    """What a translator reads, computes and writes, as reports and cards name it; what it has not is absent."""
    form: dict[str, Any] = {"method": config.method}
    if config.method == "reduced_rank" or config.linear_path or config.trunk:
        form["rank"] = "full" if config.rank is None else config.rank
    if config.piece_ranks is not None:
        form["piece_ranks"] = config.piece_ranks
    if config.key_norms:
        form["key_norms"] = list(config.key_norms)
    if config.method == "mot":
        form |= {"num_translators": config.num_translators, "hidden_size": config.hidden_size}
    form |= {"source_layers": list(config.source_layers), "embedding_window": config.embedding_window}
    if config.source_window > 1:
        form["source_window"] = config.source_window
    if config.predicts_error:
        form["predicts_error"] = True
    if config.target_hidden_layer is not None:
        form["target_hidden_layer"] = config.target_hidden_layer
    if config.restored_layers:
        form["restored_layers"] = list(config.restored_layers)
    if config.resume_layer is not None:
        form["resume_layer"] = config.resume_layer
    return form if config.target_layers is None else {**form, "target_layers": list(config.target_layers)}


def format_rank(form: dict[str, Any]) -> str:
    """The rank in a [`describe_form`], to go on a sentence with; empty where there is none."""
    if "rank" not in form:
        return ""
    ranks = sum(form.get("piece_ranks", []), [])
    return f", rank {form['rank']}" + (f" ({min(ranks)} to {max(ranks)} a piece)" if ranks else "")


def format_form(form: dict[str, Any]) -> str:
    """A [`describe_form`], or a [`describe_translator`], as one line to read."""
    parts = [f"{form['method']}{format_rank(form)}"]
    if "num_translators" in form:
        parts.append(f"{form['num_translators']} translators of width {form['hidden_size']}")
    for name in ("source_layers", "target_layers"):
        if name in form:
            parts.append(f"{name.replace('_', ' ')} {', '.join(map(str, form[name])) or 'none'}")
    if "key_norms" in form:
        parts.append(f"keys of native length in {len(form['key_norms'])} layers")
    if "embedding_window" in form:
        parts.append(f"embedding window {form['embedding_window']}")
    if "source_window" in form:
        parts.append(f"source window {form['source_window']}")
    if "target_hidden_layer" in form:
        parts.append(f"hidden state that goes into target layer {form['target_hidden_layer']}")
    if "restored_layers" in form:
        parts.append(f"one state for keys and values of {len(form['restored_layers'])} layers")
    if "resume_layer" in form:
        parts.append(f"what goes into target layer {form['resume_layer']}")
    parts += [f"{form['bytes'] / 1e6:.1f} MB"] if "bytes" in form else []
    parts += [form["id"]] if "id" in form else []
    return ", ".join(parts)


def describe_translator(translator: MoTModel) -> dict[str, Any]:
    """What was measured, as a report names it."""
    name = translator.name_or_path
    fields = {
        # A Hub id, never a path of the machine at hand.
        "id": None if not name or os.path.exists(name) or os.path.isabs(name) else name,
        **describe_form(translator.config),
        "bytes": translator_bytes(translator),
    }
    return {key: value for key, value in fields.items() if value is not None}


def describe_dtype(source: PreTrainedModel | None, target: PreTrainedModel) -> str:
    """The dtype of both models, or of each where they differ."""
    own, other = (None if model is None else str(model.dtype).removeprefix("torch.") for model in (target, source))
    return own if other in (None, own) else f"{own}, source {other}"


def pair_fingerprint(translator: MoTModel) -> str:
    """A short hash of the two models and tokenizers, by which results of other pairs are told from theirs."""
    own = [identity(side) for side in (translator.config.source, translator.config.target)]
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]


def fingerprint(translator: MoTModel) -> str:
    """A short hash of a translator's settings and weights, by which its results are known."""
    # The curve is one of its results. What is left at its default may be unknown to the release that measured.
    config, default = translator.config, MoTConfig()
    own = type(config).__annotations__.keys() - {"source", "target", "model_type", "replay_curve"}
    settings = {name: getattr(config, name) for name in sorted(own) if getattr(config, name) != getattr(default, name)}
    digest = hashlib.sha256(json.dumps(settings).encode())
    for name, tensor in sorted(translator.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
