"""What a model's cache looks like, found by running the model, not by a table of families.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from .compat_mot import decoder_of, hides_by_itself, layer_windows, run_decoder, shares_last_layers, unsupported_cache
from .layers_mot import input_device, probe_hidden_dim
from .positions_mot import RotaryEncoding, find_rotary_encodings
from .rows_mot import positions_from_mask

PROBE_POSITIONS = (0, 7, 23)
# Same model object, same answer: a probe costs one small forward pass, a handoff should not pay for it twice.
_PROBED: WeakKeyDictionary[PreTrainedModel, "ModelGeometry"] = WeakKeyDictionary()


DAMAGED = "The translator's config is damaged, or of a later release. Download or save it again."


def require(holds: Any, field: str, rule: str, came: Any) -> None:
    """Raises `ValueError` for a stored `field` that does not hold what it must."""
    if not holds:
        name = " of ".join(f"`{part}`" for part in reversed(field.split(".")))
        raise ValueError(f"{name} must be {rule}, got {repr(came)[:200]}. {DAMAGED}")


def _require_fields(values: Any, cls: type, field: str) -> None:
    require(isinstance(values, dict), field, "an object", values)
    for missing in [f.name for f in fields(cls) if f.name not in (*values, "rotated", "windows", "hidden_dim")]:
        raise ValueError(f"`{field}` lacks the field `{missing}`. {DAMAGED}")
    unknown = sorted(set(values) - {f.name for f in fields(cls)})
    require(not unknown, field, "without unknown fields", unknown)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**48


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


@dataclass(frozen=True)
class LayerGeometry:
    """
    One cache layer.

    Args:
        kv_heads (`int`): Heads in the cache (not in the config: some families cache expanded heads).
        key_dim (`int`): Channels of a key head.
        value_dim (`int`): Channels of a value head.
        position (`str`): How the layer carries positions: `"rope"`, `"free"` (not at all) or `"absolute"` (learned
            embeddings in the residual stream, which cannot be taken off).
        rotary (`int`, *optional*): Index into [`ModelGeometry`]`.rotary` for a `"rope"` layer.
        rotated (`str`, *optional*, defaults to `"keys"`): What a `"rope"` layer rotates. `"values"` for multi-head
            latent attention, whose cache keeps its rotary key part in the value slot.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    position: Literal["rope", "free", "absolute"]
    rotary: int | None = None
    rotated: Literal["keys", "values"] = "keys"

    @property
    def width(self) -> int:
        """Channels a token, keys and values together."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class ModelGeometry:
    """
    A model's cache, layer by layer, and the few sizes that costs are computed from.

    Args:
        layers (`tuple[LayerGeometry, ...]`): Cache layers, bottom first. Fewer than the model's where its last ones
            read the keys and values of lower ones.
        rotary (`tuple[RotaryEncoding, ...]`): The rotary encodings that the layers use.
        embedding_dim (`int`): Width of the input embeddings.
        attention_dim (`int`): Query channels of a layer (attention heads × head_dim), for costs.
        decoder_parameters (`int`): Weights of the decoder without its embeddings of tokens and positions, for
            costs.
        max_positions (`int`, *optional*): Longest sequence the model was made for.
        sliding (`bool`): Whether any layer attends within a sliding window.
        windows (`tuple[int | None, ...]`, *optional*): How many tokens the sliding window of each layer holds, `None`
            for full attention, for costs. Contracts of earlier days do not tell.
        hidden_dim (`int`, *optional*): Width of the hidden state that goes into each decoder layer, `None` where that
            is not one state a token. Contracts of earlier days do not tell.
    """

    layers: tuple[LayerGeometry, ...]
    rotary: tuple[RotaryEncoding, ...]
    embedding_dim: int
    attention_dim: int
    decoder_parameters: int
    max_positions: int | None
    sliding: bool
    windows: tuple[int | None, ...] | None = None
    hidden_dim: int | None = None

    def strip_positions(self, layer_idx: int, key_states, value_states, position_ids):
        """Keys and values of a layer without their rotary position encoding; learned positions stay."""
        return self._rotate("strip", layer_idx, key_states, value_states, position_ids)

    def apply_positions(self, layer_idx: int, key_states, value_states, position_ids):
        """Undoes [`strip_positions`], at any `position_ids` `[batch, seq]`."""
        return self._rotate("apply", layer_idx, key_states, value_states, position_ids)

    def _rotate(self, operation, layer_idx, key_states, value_states, position_ids):
        layer = self.layers[layer_idx]
        if layer.position != "rope":
            return key_states, value_states
        rotate = getattr(self.rotary[layer.rotary], operation)
        if layer.rotated == "values":
            return key_states, rotate(value_states, position_ids)
        return rotate(key_states, position_ids), value_states

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        lists = {name: None if values[name] is None else list(values[name]) for name in ("layers", "windows")}
        return {**values, **lists, "rotary": [rotary.to_dict() for rotary in self.rotary]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelGeometry":
        """Raises `ValueError` for what [`to_dict`] cannot have written."""
        _require_fields(values, cls, "geometry")
        for field in ("layers", "rotary"):
            require(isinstance(values[field], list | tuple), f"geometry.{field}", "a list", values[field])
        rotary = []
        for entry in values["rotary"]:
            _require_fields(entry, RotaryEncoding, "rotary")
            frequencies, scaling = entry["inv_freq"], entry["scaling"]
            require(isinstance(frequencies, list | tuple), "rotary.inv_freq", "a list", frequencies)
            numbers = [*frequencies, scaling]
            require(all(_is_number(part) for part in numbers) and scaling, "rotary.scaling", "finite", numbers)
            require(isinstance(entry["interleaved"], bool), "rotary.interleaved", "a bool", entry["interleaved"])
            rotary.append(RotaryEncoding.from_dict(entry))
        layers = []
        for entry in values["layers"]:
            _require_fields(entry, LayerGeometry, "layers")
            layer = LayerGeometry(**entry)
            for field in ("kv_heads", "key_dim", "value_dim"):
                require(_is_size(entry[field]), f"layers.{field}", "a size", entry[field])
            require(layer.position in ("rope", "free", "absolute"), "layers.position", "a known kind", layer.position)
            require(layer.rotated in ("keys", "values"), "layers.rotated", "keys or values", layer.rotated)
            known = layer.rotary is None if layer.position != "rope" else layer.rotary in range(len(rotary))
            require(known and not isinstance(layer.rotary, bool), "layers.rotary", "an index", layer.rotary)
            width = layer.key_dim if layer.rotated == "keys" else layer.value_dim
            fits = layer.rotary is None or 2 * len(rotary[layer.rotary].inv_freq) <= width
            require(fits, "layers.key_dim", "as wide as what is rotated", width)
            layers.append(layer)
        require(layers, "geometry.layers", "not empty", layers)
        for field in ("embedding_dim", "attention_dim", "decoder_parameters"):
            require(_is_size(values[field]), f"geometry.{field}", "a size", values[field])
        longest = values["max_positions"]
        require(longest is None or _is_size(longest), "geometry.max_positions", "a size or null", longest)
        require(isinstance(values["sliding"], bool), "geometry.sliding", "a bool", values["sliding"])
        windows = values.get("windows")
        if windows is not None:
            fits = isinstance(windows, list | tuple) and len(windows) == len(layers)
            fits = fits and all(window is None or _is_size(window) for window in windows)
            require(fits, "geometry.windows", "a size or null for each layer", windows)
            windows = tuple(windows)
        hidden_dim = values.get("hidden_dim")
        require(hidden_dim is None or _is_size(hidden_dim), "geometry.hidden_dim", "a size or null", hidden_dim)
        return cls(**{**values, "layers": tuple(layers), "rotary": tuple(rotary), "windows": windows})


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
    _refuse_by_config(model, name)
    device = input_device(model)
    positions = torch.tensor(PROBE_POSITIONS, device=device)[:, None]  # [3, 1]
    cache = DynamicCache()
    run_decoder(model, torch.full_like(positions, config.vocab_size // 2), cache, position_ids=positions)
    candidates = find_rotary_encodings(decoder_of(model))
    layers, used = [], []
    for layer_idx, layer in enumerate(cache.layers):
        if not isinstance(getattr(layer, "keys", None), torch.Tensor) or layer.keys.dim() != 4:
            raise ValueError(f"Layer {layer_idx} of {name} keeps no keys and values in its cache. Not supported.")
        kind, encoding, rotated = _position_kind(layer.keys, layer.values, candidates)
        if kind == "unknown":
            raise ValueError(
                f"The keys of layer {layer_idx} of {name} depend on the position in a way that is neither rotary nor "
                "a learned embedding. Not supported."
            )
        if encoding is not None and encoding not in used:
            used.append(encoding)
        kv_heads, key_dim, value_dim = layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1]
        rotary = None if encoding is None else used.index(encoding)
        layers.append(LayerGeometry(kv_heads, key_dim, value_dim, kind, rotary, rotated))
    if len(layers) != config.num_hidden_layers and not shares_last_layers(config, len(layers)):
        raise ValueError(
            f"{name} has {config.num_hidden_layers} layers but caches keys and values for {len(layers)}. "
            "Models that skip caches between layers are not supported."
        )
    _refuse_broken_continuation(model, name)
    _PROBED[model] = ModelGeometry(
        layers=tuple(layers),
        rotary=tuple(used),
        embedding_dim=model.get_input_embeddings().weight.shape[-1],
        attention_dim=config.num_attention_heads * layers[0].key_dim,
        decoder_parameters=decoder_parameters(model),
        max_positions=getattr(config, "max_position_embeddings", None),
        sliding=any(DynamicCache(config=config).is_sliding) or hides_by_itself(config) or _counts_pads(model),
        windows=tuple(layer_windows(config)[: len(layers)]),
        hidden_dim=probe_hidden_dim(model),
    )
    return _PROBED[model]


def decoder_parameters(model: PreTrainedModel) -> int:
    """Weights of the decoder, without what is looked up and never multiplied: embeddings of tokens and positions."""
    decoder = decoder_of(model)
    tables = [module for module in decoder.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(weight) for module in (model.get_input_embeddings(), *tables) for weight in module.parameters()}
    return sum(weight.numel() for weight in decoder.parameters() if id(weight) not in looked_up)


def _rope_types(config) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {entry.get("rope_type", "default") for entry in nested or [parameters]}


def _refuse_by_config(model: PreTrainedModel, name: str) -> None:
    """What is known not to be translatable before anything runs. Raises `ValueError`."""
    config = model.config.get_text_config()
    for rope_type in _rope_types(config):
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"{name} uses {rope_type} rope: the position encoding of its cached keys depends on the length of the "
                "call that made them, so it cannot be taken off. Use a model (or config) with a static rope type."
            )
    adapters = (getattr(model, "peft_config", None) or {}).values()
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters):
        raise ValueError(
            f"{name} carries a prompt-learning adapter, whose virtual tokens stand before every context. Not "
            "supported; adapters on the weights (LoRA and its kin) are."
        )
    state = "a recurrent state" if getattr(model, "_is_stateful", False) else unsupported_cache(config)
    if state is not None:
        raise ValueError(
            f"{name} keeps {state} in its cache beside or instead of keys and values, which cannot be translated "
            "token by token. Not supported."
        )


def _refuse_broken_continuation(model: PreTrainedModel, name: str) -> None:
    """A model that does not continue from its own cache as if it had read the whole would not from a translated one,
    in silence. Rows of nine tokens, read at once, and as 6 + 2 + 1."""
    vocab_size = model.config.get_text_config().vocab_size
    device = input_device(model)
    ids = (torch.arange(36, device=device) * 7919 % vocab_size).view(4, 9)
    whole = run_decoder(model, ids, DynamicCache())[:, -1].float()
    nothing = run_decoder(model, ids[:, -1:], DynamicCache())[:, -1].float()
    cache = DynamicCache()
    for piece in (ids[:, :6], ids[:, 6:8], ids[:, 8:]):
        continued = run_decoder(model, piece, cache)[:, -1].float()
    # Rounding, or another choice of experts after rounding, may move single rows: the median row decides.
    error = ((continued - whole).norm(dim=-1) / (nothing - whole).norm(dim=-1).clamp(min=1e-12)).median()
    if error > 0.25:
        raise ValueError(
            f"{name} does not continue from its own cache as if it had read the whole text (deviation {error:.2f} of "
            "what the context changes), so it cannot from a translated one. Not supported."
        )


def _counts_pads(model: PreTrainedModel) -> bool:
    """Whether a pad between what is cached and what follows changes the result: MPT's biases count it as a token."""
    device = input_device(model)
    ids = (torch.arange(36, device=device) * 7919 % model.config.get_text_config().vocab_size).view(4, 9)
    ends = []
    for pads in (0, 1):
        cache = DynamicCache()
        run_decoder(model, ids[:, :6], cache)
        rest = torch.cat([ids[:, :pads], ids[:, 6:]], dim=1)
        mask = torch.ones(4, 9 + pads, dtype=torch.long, device=device)
        mask[:, 6 : 6 + pads] = 0
        positions = positions_from_mask(mask)[:, 6:]
        ends.append(run_decoder(model, rest, cache, mask, positions)[:, -1].float())
    error = ((ends[1] - ends[0]).norm(dim=-1) / ends[0].norm(dim=-1).clamp(min=1e-12)).median()
    return bool(error > max(1e-3, 2 * torch.finfo(model.dtype).eps))


def _position_kind(keys: torch.Tensor, values: torch.Tensor, candidates: list[RotaryEncoding]):
    """(kind, encoding, what it rotates) of a layer from the states of one token at `PROBE_POSITIONS`."""
    tolerance = min(64 * torch.finfo(keys.dtype).eps, 0.02)
    positions = torch.tensor(PROBE_POSITIONS)[:, None]

    def spread(states: torch.Tensor) -> float:
        """How much the states of the three positions differ, as a share of the largest."""
        return ((states - states[:1]).abs().max() / states.abs().max()).item()

    def encoding_of(states: torch.Tensor) -> RotaryEncoding | None:
        fitting = [encoding for encoding in candidates if 2 * len(encoding.inv_freq) <= states.shape[-1]]
        spreads = [spread(encoding.strip(states, positions)) for encoding in fitting]
        return fitting[spreads.index(min(spreads))] if spreads and min(spreads) <= tolerance else None

    keys_move, values_move = spread(keys) > tolerance, spread(values) > tolerance
    if not keys_move and not values_move:
        return "free", None, "keys"
    if keys_move and values_move:  # learned positions change both
        return "absolute", None, "keys"
    encoding = encoding_of(keys if keys_move else values)
    return "unknown" if encoding is None else "rope", encoding, "keys" if keys_move else "values"
