"""What a model's cache looks like, found by running the model once, and the contract that a translator keeps with it.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`.
"""

import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .compat_mot import run_decoder
from .positions_mot import RotaryEncoding, find_rotary_encodings

PROBE_POSITIONS = (0, 7, 23)
_PROBE_TEXT = "The café's  3,141 naïve quotes:\n\t“don't” — 你好, мир! 🙂 <b>x_1=0.5</b> HELLOworld\n\n"
# Same model object, same answer: a probe costs one small forward pass, a handoff should not pay for it twice.
_PROBED: WeakKeyDictionary[PreTrainedModel, "ModelGeometry"] = WeakKeyDictionary()


@dataclass(frozen=True)
class LayerGeometry:
    """
    One cache layer.

    Args:
        kv_heads (`int`): Heads in the cache (not in the config: some families cache expanded heads).
        key_dim (`int`): Channels of a key head.
        value_dim (`int`): Channels of a value head.
        position (`str`): How keys carry positions: `"rope"`, `"free"` (not at all) or `"absolute"` (learned
            embeddings in the residual stream, which cannot be taken off).
        rotary (`int`, *optional*): Index into [`ModelGeometry`]`.rotary` for a `"rope"` layer.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    position: Literal["rope", "free", "absolute"]
    rotary: int | None = None

    @property
    def width(self) -> int:
        """Channels a token, keys and values together."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class ModelGeometry:
    """
    A model's cache, layer by layer, and the few sizes that costs are computed from.

    Args:
        layers (`tuple[LayerGeometry, ...]`): Cache layers, bottom first.
        rotary (`tuple[RotaryEncoding, ...]`): The rotary encodings that the layers use.
        embedding_dim (`int`): Width of the input embeddings.
        attention_dim (`int`): Query channels of a layer (attention heads × head_dim), for costs.
        decoder_parameters (`int`): Weights of the decoder without its embeddings, for costs.
        max_positions (`int`, *optional*): Longest sequence the model was made for.
        sliding (`bool`): Whether any layer attends within a sliding window.
    """

    layers: tuple[LayerGeometry, ...]
    rotary: tuple[RotaryEncoding, ...]
    embedding_dim: int
    attention_dim: int
    decoder_parameters: int
    max_positions: int | None
    sliding: bool

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, "layers": list(values["layers"]), "rotary": [rotary.to_dict() for rotary in self.rotary]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelGeometry":
        layers = tuple(LayerGeometry(**layer) for layer in values["layers"])
        rotary = tuple(RotaryEncoding.from_dict(rotary) for rotary in values["rotary"])
        return cls(**{**values, "layers": layers, "rotary": rotary})


@torch.no_grad()
def probe(model: PreTrainedModel) -> ModelGeometry:
    """
    Runs one token at positions 0, 7 and 23 and reads geometry and position kind of every cache layer from the result.
    A token that sees only itself has the same keys everywhere but for the position encoding, so a layer whose keys
    become equal when a rotary encoding is stripped is a rope layer; no table of families is needed.

    Raises:
        `ValueError`: a model whose cache cannot be translated, with the reason.
    """
    if model in _PROBED:
        return _PROBED[model]
    config = model.config.get_text_config()
    name = type(model).__name__
    for rope_type in _rope_types(config):
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"{name} uses {rope_type} rope: the position encoding of its cached keys depends on the length of the "
                "call that made them, so it cannot be taken off. Use a model (or config) with a static rope type."
            )
    device = model.get_input_embeddings().weight.device
    positions = torch.tensor(PROBE_POSITIONS, device=device)[:, None]  # [3, 1]
    cache = DynamicCache()
    run_decoder(model, torch.full_like(positions, config.vocab_size // 2), cache, position_ids=positions)
    candidates = find_rotary_encodings(model.get_decoder())
    layers, used = [], []
    for layer_idx, layer in enumerate(cache.layers):
        if not isinstance(getattr(layer, "keys", None), torch.Tensor) or layer.keys.dim() != 4:
            raise ValueError(f"Layer {layer_idx} of {name} keeps no keys and values in its cache. Not supported yet.")
        kind, encoding = _position_kind(layer.keys, layer.values, candidates)
        if kind == "unknown":
            raise ValueError(
                f"The keys of layer {layer_idx} of {name} depend on the position in a way that is neither rotary nor "
                "a learned embedding. Not supported."
            )
        if encoding is not None and encoding not in used:
            used.append(encoding)
        kv_heads, key_dim, value_dim = layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1]
        rotary = None if encoding is None else used.index(encoding)
        layers.append(LayerGeometry(kv_heads, key_dim, value_dim, kind, rotary))
    if len(layers) != config.num_hidden_layers:
        raise ValueError(
            f"{name} has {config.num_hidden_layers} layers but caches keys and values for {len(layers)}. "
            "Models that share or skip caches between layers are not supported yet."
        )
    embeddings = {id(weight) for module in (model.get_input_embeddings(),) for weight in module.parameters()}
    _PROBED[model] = ModelGeometry(
        layers=tuple(layers),
        rotary=tuple(used),
        embedding_dim=model.get_input_embeddings().weight.shape[-1],
        attention_dim=config.num_attention_heads * layers[0].key_dim,
        decoder_parameters=sum(w.numel() for w in model.get_decoder().parameters() if id(w) not in embeddings),
        max_positions=getattr(config, "max_position_embeddings", None),
        sliding=any(DynamicCache(config=config).is_sliding),
    )
    return _PROBED[model]


def _rope_types(config) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {entry.get("rope_type", "default") for entry in nested or [parameters]}


def _position_kind(keys: torch.Tensor, values: torch.Tensor, candidates: list[RotaryEncoding]):
    tolerance = min(64 * torch.finfo(keys.dtype).eps, 0.02)

    def spread(states: torch.Tensor) -> float:
        """How much the states of the three positions differ, as a share of the largest."""
        return ((states - states[:1]).abs().max() / states.abs().max()).item()

    if spread(values) > tolerance:
        # Learned positions change keys and values; values alone are turned by MLA.
        return ("unknown" if spread(keys) <= tolerance else "absolute"), None
    if spread(keys) <= tolerance:
        return "free", None
    positions = torch.tensor(PROBE_POSITIONS)[:, None]
    fitting = [encoding for encoding in candidates if 2 * len(encoding.inv_freq) <= keys.shape[-1]]
    spreads = [spread(encoding.strip(keys, positions)) for encoding in fitting]
    if not spreads or min(spreads) > tolerance:
        return "unknown", None
    return "rope", fitting[spreads.index(min(spreads))]


def describe_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The contract of a model: what a translator must find again when it is used, as a JSON-ready `dict`."""
    prefix_ids, adds_prefix = special_prefix(tokenizer)
    return {
        "id": _hub_id(model),
        "revision": getattr(model.config, "_commit_hash", None),
        "adapter": _adapter(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model_type": model.config.model_type,
        "fingerprint": _weight_fingerprint(model),
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "prefix_ids": prefix_ids,
        "adds_prefix": adds_prefix,
        "geometry": probe(model).to_dict(),
    }


def check_model(contract: dict[str, Any], model: PreTrainedModel, argument: str) -> None:
    """
    Refuses a model that is not the one in `contract`. Identity is Hub id and commit where both sides have a commit,
    else the stored fingerprint of a few weights. The dtype is not compared.

    Raises:
        `ValueError`: names the field, what was expected and what came.
    """
    _refuse_unless(contract, "adapter", _adapter(model), argument)
    _refuse_unless(contract, "model_type", model.config.model_type, argument)
    revision = getattr(model.config, "_commit_hash", None)
    # A commit says nothing about an adapter's weights.
    if contract["revision"] is not None and revision is not None and contract["adapter"] is None:
        _refuse_unless(contract, "id", _hub_id(model), argument)
        _refuse_unless(contract, "revision", revision, argument)
    else:
        # A coarser dtype rounds the weights: compare in the coarser of the two.
        dtype = min(contract["dtype"], str(model.dtype).removeprefix("torch."), key=_PRECISION.index)
        expected, came = contract["fingerprint"].get(dtype), _weight_fingerprint(model).get(dtype)
        if expected != came:
            raise ValueError(
                f"`{argument}` has other weights (fingerprint {came}) than the model this translator was made for "
                f"({contract['id'] or contract['model_type']}, fingerprint {expected}). Load that model, or the "
                "translator of your pair."
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
    """Refuses a missing, slow or different tokenizer."""
    if tokenizer is None:
        raise ValueError(f"`{argument}` is required: the alignment needs it. Pass the tokenizer of {contract['id']}.")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"`{argument}` must be a fast tokenizer (character offsets), got {type(tokenizer).__name__}. "
            "Load it with AutoTokenizer.from_pretrained(..., use_fast=True)."
        )
    _refuse_unless(contract, "tokenizer_fingerprint", tokenizer_fingerprint(tokenizer), argument)


def _refuse_unless(contract: dict[str, Any], field: str, came: Any, argument: str) -> None:
    if contract[field] != came:
        raise ValueError(
            f"`{argument}` does not match the translator's contract: `{field}` is {came!r}, expected "
            f"{contract[field]!r} ({contract['id'] or contract['model_type']}). Load the translator of your pair."
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


_PRECISION = ("bfloat16", "float16", "float32", "float64")


def _weight_fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """Hash of 64 values from each of 16 weight matrices spread over the decoder, per dtype that they may be loaded in
    (a bf16 load of fp32 weights has the bf16 hash of the original)."""
    named = [(name, weight) for name, weight in sorted(model.get_decoder().named_parameters()) if weight.dim() >= 2]
    matrices = [weight for _, weight in named]
    chosen = [matrices[index] for index in _spread(len(matrices), 16).tolist()]
    sampled = []
    for weight in chosen + [weight for name, weight in named if ".lora_" in name]:
        flat = weight.detach().flatten()
        sampled.append(flat[_spread(flat.numel(), 64).to(flat.device)].cpu())
    values = torch.cat(sampled)
    dtypes = [getattr(torch, name) for name in _PRECISION[: _PRECISION.index(str(values.dtype)[6:]) + 1]]
    return {str(dtype)[6:]: _digest(values.to(dtype).float().numpy().tobytes()) for dtype in dtypes}


def _spread(size: int, count: int) -> torch.Tensor:
    """`count` indices from 0 to `size - 1`, evenly spaced."""
    return torch.arange(count) * (size - 1) // (count - 1)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _hub_id(model: PreTrainedModel) -> str | None:
    """`org/name`, or None for a local path, which is never stored."""
    name = model.name_or_path or ""
    return name if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not Path(name).exists() else None


def _adapter(model: PreTrainedModel) -> str | None:
    adapters = getattr(model, "peft_config", None)
    return None if not adapters else ",".join(sorted(adapters))


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
