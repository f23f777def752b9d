"""The contract of a translator: the two models and tokenizers that it was made for, and refuses to do without."""

import hashlib
import re
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .compat_mot import decoder_of
from .geometry_mot import DAMAGED, ModelGeometry, probe, require
from .positions_mot import RotaryEncoding

# A hash per dtype that the weights may be loaded in: a bf16 load of fp32 weights has the bf16 hash of the original.
Fingerprint = dict[str, str]

_HUB_ID = r"[\w-][\w.-]*/[\w.-]+"
_PRECISION = ("bfloat16", "float16", "float32", "float64")
_PROBE_TEXT = "The café's  3,141 naïve quotes:\n\t“don't” — 你好, мир! 🙂 <b>x_1=0.5</b> HELLOworld\n\n"


def describe_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The contract of a model: what a translator must find again when it is used, as a JSON-ready `dict`."""
    prefix_ids, adds_prefix = special_prefix(tokenizer)
    base, adapter = _fingerprints(model)
    return {
        "id": _hub_id(model),
        "revision": getattr(model.config, "_commit_hash", None),
        "adapter": adapter,
        "quantization": _quantization(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model_type": model.config.model_type,
        "fingerprint": base,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "prefix_ids": prefix_ids,
        "adds_prefix": adds_prefix,
        "geometry": probe(model).to_dict(),
    }


# What makes a model and its tokenizer this one and no other, wherever its files lie, whatever its dtype.
IDENTITY = ("fingerprint", "adapter", "quantization", "tokenizer_fingerprint", "prefix_ids")


def identity(contract: dict[str, Any] | None) -> list[Any]:
    """The values of `IDENTITY` in a contract, by which files that belong to a pair of models are known."""
    return [(contract or {}).get(name) for name in IDENTITY]


_TEXT, _TEXT_OR_NONE, _HASHES = (str,), (str, type(None)), (dict,)
_FIELDS: dict[str, tuple[type, ...]] = {
    "id": _TEXT_OR_NONE,
    "revision": _TEXT_OR_NONE,
    "adapter": (dict, type(None)),
    "dtype": _TEXT,
    "model_type": _TEXT,
    "fingerprint": _HASHES,
    "tokenizer_fingerprint": _TEXT,
    "prefix_ids": (list,),
    "adds_prefix": (bool,),
    "geometry": (dict,),
}


def check_contract(contract: dict[str, Any], side: str) -> None:
    """Refuses a contract (`config.source` or `config.target`) that [`describe_model`] cannot have written.

    Raises:
        `ValueError`: names the field and what came.
    """
    for field, types in {**_FIELDS, "quantization": _TEXT_OR_NONE}.items():
        if field not in contract and field in _FIELDS:
            raise ValueError(f"`{side}` lacks the field `{field}`. {DAMAGED}")
        rule = " or ".join("null" if kind is type(None) else f"a {kind.__name__}" for kind in types)
        require(isinstance(contract.get(field), types), f"{side}.{field}", rule, contract.get(field))
    hashes = [*contract["fingerprint"].items(), *(contract["adapter"] or {}).items()]
    require(all(isinstance(part, str) for pair in hashes for part in pair), f"{side}.fingerprint", "hashes", hashes)
    require(contract["dtype"] in _PRECISION, f"{side}.dtype", f"one of {', '.join(_PRECISION)}", contract["dtype"])
    for field, pattern in (("id", _HUB_ID), ("model_type", r"[\w-]+"), ("revision", r"[\w./-]+")):
        value = contract[field]
        require(value is None or re.fullmatch(pattern, value), f"{side}.{field}", f"like {pattern}", value)
    prefix = contract["prefix_ids"]
    require(all(type(part) is int and part >= 0 for part in prefix), f"{side}.prefix_ids", "token ids", prefix)
    try:
        ModelGeometry.from_dict(contract["geometry"])
    except ValueError as error:
        raise ValueError(f"`{side}`: {error}") from error


def check_model(contract: dict[str, Any], model: PreTrainedModel, argument: str, allow_variant: bool = False) -> None:
    """
    Refuses a model that is not the one in `contract`. Identity is Hub id and commit where both sides have a commit,
    else the stored fingerprint of a few weights. The dtype is not compared.

    Args:
        contract (`dict`): What [`describe_model`] wrote.
        model (`PreTrainedModel`): The model that came.
        argument (`str`): Its name in error messages.
        allow_variant (`bool`, *optional*, defaults to `False`): Accepts another adapter or quantization on it.

    Raises:
        `ValueError`: names the field, what was expected and what came.
    """
    _refuse_unless(contract, "model_type", model.config.model_type, argument)
    fingerprint, adapter = _fingerprints(model)
    quantization = _quantization(model)
    if not allow_variant:
        way_out = "Pass allow_variant=True to use the translator on this variant of the model all the same."
        if not _same_weights(contract["adapter"], adapter):
            raise ValueError(
                f"`{argument}` does not match the translator's contract: `adapter` is {_short(adapter)}, expected "
                f"{_short(contract['adapter'])} ({_name(contract)}). {way_out}"
            )
        _refuse_unless({"quantization": None, **contract}, "quantization", quantization, argument, way_out)
    revision = getattr(model.config, "_commit_hash", None)
    if contract["revision"] is not None and revision is not None:
        _refuse_unless(contract, "id", _hub_id(model), argument)
        way_out = f"Load it with revision={contract['revision']!r}, or the translator of your pair."
        _refuse_unless(contract, "revision", revision, argument, way_out)
    # Other parameters are left to compare in a quantized model.
    elif contract.get("quantization") == quantization and not _same_weights(contract["fingerprint"], fingerprint):
        raise ValueError(
            f"`{argument}` has other weights (`fingerprint` {_short(fingerprint)}) than the model this translator was "
            f"made for ({_name(contract)}, {_short(contract['fingerprint'])}). Load that model, or the translator of "
            "your pair."
        )
    expected, came = ModelGeometry.from_dict(contract["geometry"]), probe(model)
    for field in ("layers", "rotary", "embedding_dim"):
        if not _close(getattr(expected, field), getattr(came, field)):
            raise ValueError(
                f"`{argument}` has another cache geometry than the model this translator was made for: `{field}` is "
                f"{_short(getattr(came, field))}, expected {_short(getattr(expected, field))}. Load the translator of "
                "your pair, or undo the change in the model's config. (model.to(dtype) rounds the rotary frequencies "
                "too; from_pretrained(..., dtype=...) does not.)"
            )


def check_tokenizer(contract: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, argument: str) -> None:
    """Refuses a missing, slow or different tokenizer. Raises `ValueError`."""
    if tokenizer is None:
        raise ValueError(f"`{argument}` is required: the alignment needs it. Pass the tokenizer of {_name(contract)}.")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"`{argument}` must be a fast tokenizer (character offsets), got {type(tokenizer).__name__}. "
            "Load it with AutoTokenizer.from_pretrained(..., use_fast=True)."
        )
    _refuse_unless(contract, "tokenizer_fingerprint", tokenizer_fingerprint(tokenizer), argument)
    prefix_ids, adds_prefix = special_prefix(tokenizer)
    _refuse_unless(contract, "prefix_ids", prefix_ids, argument)
    _refuse_unless(contract, "adds_prefix", adds_prefix, argument)


def _refuse_unless(contract: dict[str, Any], field: str, came: Any, argument: str, way_out: str | None = None) -> None:
    if contract[field] != came:
        raise ValueError(
            f"`{argument}` does not match the translator's contract: `{field}` is {came!r}, expected "
            f"{contract[field]!r} ({_name(contract)}). {way_out or 'Load the translator of your pair.'}"
        )


def special_prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], bool]:
    """The special ids that a context starts with, and whether the tokenizer adds them itself: the leading ones that
    it adds, else its BOS (without an attention sink the first word would become one), else none."""
    added = []
    for token_id in tokenizer("a")["input_ids"]:
        if token_id not in tokenizer.all_special_ids:
            break
        added.append(token_id)
    if added or tokenizer.bos_token_id is None:
        return added, bool(added)
    return [tokenizer.bos_token_id], False


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary size, of every 1/256th of the vocabulary, of the special tokens and of the ids of one
    awkward text: it tells tokenizers apart in a millisecond, on every handoff."""
    size = len(tokenizer)
    sample = tokenizer.convert_ids_to_tokens(range(0, size, max(1, size // 256)))
    ids = tokenizer(_PROBE_TEXT, add_special_tokens=False)["input_ids"]
    named = tokenizer.special_tokens_map.items()  # which token pads plays no part here
    special = sorted((str(name), str(token)) for name, token in named if name != "pad_token")
    return _digest(repr((size, sample, ids, special)).encode())


def _fingerprints(model: PreTrainedModel) -> tuple[Fingerprint, Fingerprint | None]:
    """Hashes of 64 values from each of 16 weight matrices spread over the decoder, and the same of all parameters of
    its PEFT adapter, if it has one. The names and values of the base model are the same with and without adapter."""
    decoder = decoder_of(model)
    tuned = [name.removesuffix("base_layer") for name, _ in decoder.named_modules() if name.endswith(".base_layer")]
    base, adapter = [], []
    # Quantized matrices hold no plain floats; norms and embeddings are left.
    least_dim = 2 if _quantization(model) is None else 1
    for name, weight in decoder.named_parameters():
        added = any(name.startswith(part) and not name.startswith(f"{part}base_layer.") for part in tuned)
        if added or ".modules_to_save." in name:
            adapter.append((name, weight))
        elif weight.dim() >= least_dim and weight.is_floating_point() and type(weight.data) is torch.Tensor:
            base.append((name.replace(".base_layer.", ".").replace(".original_module.", "."), weight))
    base.sort(key=lambda named: named[0])
    chosen = [base[index] for index in _spread(len(base), 16).tolist()]
    return _hash_weights(chosen), _hash_weights(sorted(adapter, key=lambda named: named[0])) if adapter else None


def _hash_weights(named: list[tuple[str, torch.Tensor]]) -> Fingerprint:
    sampled = []
    for name, weight in named:
        if weight.is_meta:
            raise ValueError(
                f"The weight {name} is offloaded, so that the model cannot be told from others. Load it without "
                "offloading to disk or CPU (a smaller dtype, or another `device_map`)."
            )
        flat = weight.detach().flatten()
        sampled.append(flat[_spread(flat.numel(), 64).to(flat.device)].cpu())
    values = torch.cat(sampled)
    dtypes = [getattr(torch, name) for name in _PRECISION[: _PRECISION.index(str(values.dtype)[6:]) + 1]]
    return {str(dtype)[6:]: _digest(values.to(dtype).float().numpy().tobytes()) for dtype in dtypes}


def _same_weights(expected: Fingerprint | None, came: Fingerprint | None) -> bool:
    """Compares in the finest dtype that both have: a coarser one rounds the weights."""
    if expected is None or came is None:
        return expected is came
    common = [dtype for dtype in _PRECISION if dtype in expected and dtype in came]
    return bool(common) and expected[common[-1]] == came[common[-1]]


def _spread(size: int, count: int) -> torch.Tensor:
    """`count` indices from 0 to `size - 1`, evenly spaced."""
    return torch.arange(count) * (size - 1) // (count - 1)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _hub_id(model: PreTrainedModel) -> str | None:
    """`org/name`, or None for a local path, which is never stored."""
    name = model.name_or_path or ""
    return name if re.fullmatch(_HUB_ID, name) and not Path(name).exists() else None


def _quantization(model: PreTrainedModel) -> str | None:
    """The quantization method of a model that is still quantized, as transformers names it."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    return str(getattr(method, "value", method))


def _name(contract: dict[str, Any]) -> str:
    return contract["id"] or contract["model_type"]


def _close(expected: Any, came: Any) -> bool:
    if isinstance(expected, tuple) and expected and isinstance(expected[0], RotaryEncoding):
        return len(expected) == len(came) and all(
            (a.interleaved, len(a.inv_freq)) == (b.interleaved, len(b.inv_freq))
            and torch.allclose(torch.tensor([*a.inv_freq, a.scaling]), torch.tensor([*b.inv_freq, b.scaling]), 1e-5)
            for a, b in zip(expected, came, strict=True)
        )
    return expected == came


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
