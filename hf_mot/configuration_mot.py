"""Configuration of a translator: what it computes, and which two models it was made for."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_layers_mot import check_layers, check_piece_ranks

FORMAT_VERSION = 1
METHODS = ("reduced_rank", "mot", "mlp", "identity")
ROUTINGS = ("renormalized", "switch", "straight_through", "uniform")
EXPERTS = ("translator", "ffn")
# The paper's literal form; what it leaves open (width, heads) keeps the defaults.
PAPER = {
    "method": "mot",
    "num_translators": 2,
    "top_k": 1,
    "routing": "renormalized",
    "output_activation": "gelu",
    "position_free": False,
    "embedding_window": 0,
    "linear_path": False,
    "replay": "full",
}
_DTYPES = ("float64", "float32", "float16", "bfloat16")

# What transformers itself writes into a config.json or sets at loading, besides the fields of `PreTrainedConfig`.
_WRITTEN_BY_TRANSFORMERS = (
    *("auto_map", "model_type", "torch_dtype", "name_or_path", "_name_or_path", "_commit_hash"),
    *("attn_implementation", "experts_implementation"),
)


@strict
class MoTConfig(PreTrainedConfig):
    r"""
    Configuration of a [`MoTModel`], the translator from one source model's KV cache to one target model's.

    Args:
        format_version (`int`, *optional*, defaults to 1):
            Version of the saved form. A translator of a later format is refused.
        method (`str`, *optional*, defaults to `"reduced_rank"`):
            What the translator computes: `"reduced_rank"` (a closed-form linear map through one shared
            down-projection), `"mot"` (Mixture-of-Translators, paper 3.1 and C.2), `"mlp"` (a GELU MLP on each token)
            or `"identity"` (the oracle: source and target are the same model).
        source (`dict`, *optional*):
            Contract of the source model, as `geometry_mot.describe_model` writes it: `id`, `revision`, `adapter`,
            `dtype`, `model_type`, `fingerprint`, `tokenizer_fingerprint`, `prefix_ids`, `geometry`.
        target (`dict`, *optional*):
            Contract of the target model, in the same form.
        source_layers (`list[int]`, *optional*, defaults to `[]`):
            Source layers whose keys and values are read, one slot each. Empty: the translator reads no source at all.
        target_layers (`list[int]`, *optional*):
            The channel window: the target layers that are translated, contiguous. `None`: all. A translator of fewer
            needs a plan in which the target computes the others: `"full"`, or `"bottom:6"` where layers 0 to 5 are all
            that it lacks.
        target_hidden_layer (`int`, *optional*):
            The target layer whose input, the target's own hidden state, is read beside the source states. The target
            must then run as far: a translator with 5 needs the plan `"bottom:6"`, where that state is there for free,
            or a higher one, and translates `target_layers` from 6 to the last. `None`: none is read.
        resume_layer (`int`, *optional*):
            The target layer whose input is translated beside the layers below it, which are all of `target_layers`,
            and from which the target runs itself: a translator with 6 translates layers 0 to 5 and that state, for the
            plan `"resume:5"`. `None`: none is.
        restored_layers (`list[int]`, *optional*, defaults to `[]`):
            Those of the target layers that are translated for which one state is translated in place of keys and
            values: the input of the layer's attention (paper C.5, MoT-h), which the target then makes both of by its
            own projections, norms and position encoding. Smaller than keys and values only where the target's hidden
            state is narrower than both together, which with grouped-query attention it seldom is.
        replay (`str`, *optional*, defaults to `"none"`):
            The replay plan that the translator was made for, and takes where none is given.
        replay_curve (`dict`, *optional*):
            What this translator keeps by which plan, as `hf-mot evaluate … --curve --card` measures it, for
            `replay="auto"` to choose by: `context_length` (target tokens), `n` (windows), and `points`, a list of
            `replay` (`str`), `flops_share` (of the target's own prefill, at that length) and `recovery`, a dict of
            `value` and the ends of its 95 % interval, `low` and `high`. It is of these very weights: training drops
            it.
        rank (`int`, *optional*):
            Width of the shared down-projection. `None`: a full-rank map.
        piece_ranks (`list[list[int]]`, *optional*):
            How many of the `rank` inner channels, the leading ones, each piece reads: `[keys, values]` for each target
            layer that is translated, `[state]` for one of `restored_layers`, and one more
            for the input of a `resume_layer`. `None`: all read all.
        source_window (`int`, *optional*, defaults to 1):
            Number of tokens whose source states are read in the linear path of a `rank`: the token's own and those of
            the `source_window - 1` tokens before it, these through the same `rank` channels.
        embedding_window (`int`, *optional*, defaults to 5):
            Number of target token embeddings read beside the source states: the token's own and those of the
            `embedding_window - 1` tokens before it. 0: none.
        position_free (`bool`, *optional*, defaults to `True`):
            Whether keys are translated without their rotary positions, and get the target's own afterwards. The paper
            does not mention positions, which means `False`.
        key_norms (`list[int]`, *optional*, defaults to `[]`):
            Target layers whose translated keys get the weighted length that the target's own have ([`KeyNorm`]).
        predicts_error (`bool`, *optional*, defaults to `False`):
            Whether the linear map of a `rank` tells of each token how wrong its translation is likely to be, by which
            the plan `"uncertain:32"` chooses. Fitted with the map; training leaves it as it is.
        linear_path (`bool`, *optional*, defaults to `False`):
            Whether `"mot"` and `"mlp"` add to a linear map of `rank`, which a closed-form fit can initialise.
        trunk (`bool`, *optional*, defaults to `False`):
            Whether the translators of `"mot"` work within the `rank` inner channels of such a map, keys and values
            together, instead of beside it: cheap where all layers are translated.
        hidden_size (`int`, *optional*, defaults to 128):
            Hidden width of `"mot"` and `"mlp"`.
        num_attention_heads (`int`, *optional*, defaults to 4):
            Heads of the translators' cross-attention.
        num_stages (`int`, *optional*, defaults to 1):
            Scans over the slots.
        causal (`bool`, *optional*, defaults to `True`):
            Whether the cross-attention is causal, so that an appended turn changes no earlier token.
        output_activation (`str`, *optional*):
            `"gelu"`: the paper's formula, which bounds keys and values below by -0.17. `None`: linear.
        num_translators (`int`, *optional*, defaults to 1):
            Translators in the mixture (N_Tr). 1: a single backbone.
        top_k (`int`, *optional*, defaults to 1):
            Translators a token (Top-K).
        routing (`str`, *optional*, defaults to `"straight_through"`):
            `"renormalized"` (Eq. 5: no gradient reaches the gate at `top_k=1`), `"switch"`, `"straight_through"` or
            `"uniform"` (MoT-Uni); see [`Router`].
        experts (`str`, *optional*, defaults to `"translator"`):
            What is mixed: whole translators, or with `"ffn"` the feed-forward layers within one (MoE).

    Raises:
        `ValueError`: an unknown field or method, a size out of range, fields that exclude each other, or a
            `format_version` this release cannot read.
    """

    model_type = "mot"

    format_version: int = FORMAT_VERSION
    method: str = "reduced_rank"
    source: dict | None = None
    target: dict | None = None
    source_layers: list[int] | tuple[int, ...] = ()
    target_layers: list[int] | tuple[int, ...] | None = None
    target_hidden_layer: int | None = None
    resume_layer: int | None = None
    restored_layers: list[int] | tuple[int, ...] = ()
    replay: str = "none"
    replay_curve: dict | None = None
    rank: int | None = None
    piece_ranks: list[list[int]] | None = None
    source_window: int = 1
    embedding_window: int = 5
    position_free: bool = True
    key_norms: list[int] | tuple[int, ...] = ()
    predicts_error: bool = False
    linear_path: bool = False
    trunk: bool = False
    hidden_size: int = 128
    num_attention_heads: int = 4
    num_stages: int = 1
    causal: bool = True
    output_activation: str | None = None
    num_translators: int = 1
    top_k: int = 1
    routing: str = "straight_through"
    experts: str = "translator"

    def __post_init__(self, **kwargs: Any):
        if kwargs.get("output_attentions") is False:  # `to_dict` writes it
            del kwargs["output_attentions"]
        # A field of `PreTrainedConfig` never gets here; other attributes of the class would be overwritten.
        unknown = sorted(name for name in kwargs if name not in _WRITTEN_BY_TRANSFORMERS)
        if kwargs.get("model_type", self.model_type) != self.model_type:
            raise ValueError(f"`model_type` must be {self.model_type!r}, got {kwargs['model_type']!r}.")
        for name in ("attn_implementation", "experts_implementation"):
            if "/" in str(kwargs.get(name)):  # transformers would fetch code from the Hub
                raise ValueError(f"`{name}` is not a translator's, got {kwargs[name]!r}.")
        if not isinstance(self.id2label, dict | None):
            raise ValueError(f"`id2label` must be an object or null, got {self.id2label!r}.")
        if unknown:
            raise ValueError(
                f"`{unknown[0]}` is not a field of MoTConfig format {FORMAT_VERSION} (value: {kwargs[unknown[0]]!r}). "
                "Correct its name, or upgrade hf_mot if the translator was saved by a later release."
            )
        if self.format_version > FORMAT_VERSION or self.format_version < 1:
            raise ValueError(
                f"`format_version` is {self.format_version}, but this release of hf_mot reads up to {FORMAT_VERSION}. "
                "Upgrade hf_mot."
            )
        # transformers turns every `dtype` within a config into text, and trips over other things.
        for dtype in (
            self.dtype,
            kwargs.get("torch_dtype"),
            *((part or {}).get("dtype") for part in (self.source, self.target)),
        ):
            if dtype is not None and str(dtype).removeprefix("torch.") not in _DTYPES:
                raise ValueError(f"`dtype` must be one of {', '.join(_DTYPES)}, got {dtype!r}.")
        self._check_method()
        if self.replay_curve is not None and not _is_curve(self.replay_curve):
            raise ValueError(
                "`replay_curve` must hold context_length, n and points, each with replay, flops_share and recovery "
                f"(value, low, high), got {str(self.replay_curve)[:200]}. Measure it again: hf-mot evaluate … --curve "
                "--card."
            )
        self.source_layers = [int(layer_idx) for layer_idx in self.source_layers]
        self.key_norms = [int(layer_idx) for layer_idx in self.key_norms]
        self.restored_layers = [int(layer_idx) for layer_idx in self.restored_layers]
        if self.target_layers is not None:
            self.target_layers = [int(layer_idx) for layer_idx in self.target_layers]
        check_layers(self)
        super().__post_init__(**kwargs)

    def _check_method(self) -> None:
        for name, allowed in (
            ("method", METHODS),
            ("routing", ROUTINGS),
            ("experts", EXPERTS),
            ("output_activation", (None, "gelu")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(map(str, allowed))}, got {getattr(self, name)!r}."
                )
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"`rank` must be at least 1, or None for a full-rank map, got {self.rank}.")
        if self.embedding_window < 0:
            raise ValueError(f"`embedding_window` must be 0 or more tokens, got {self.embedding_window}.")
        if self.source_window < 1:
            raise ValueError(f"`source_window` must be 1 or more tokens, got {self.source_window}.")
        for name in ("hidden_size", "num_attention_heads", "num_stages", "num_translators", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"`hidden_size` must be a multiple of `num_attention_heads` {self.num_attention_heads}, got "
                f"{self.hidden_size}."
            )
        if self.top_k > self.num_translators:
            raise ValueError(
                f"`top_k` must be at most `num_translators` {self.num_translators}, got {self.top_k}. Choose fewer "
                "translators a token, or more of them."
            )
        if self.key_norms and (self.method == "identity" or not self.position_free):
            raise ValueError(
                "`key_norms` needs keys that are translated without their positions: a method other than 'identity', "
                f"and `position_free`; got {self.method!r} and {self.position_free}."
            )
        if len(set(self.key_norms)) < len(self.key_norms):
            raise ValueError(f"`key_norms` must name each layer once, got {self.key_norms}.")
        if self.trunk and self.linear_path:
            raise ValueError(
                "`trunk` and `linear_path` exclude each other: a trunk is the linear path. Set one of them."
            )
        if self.trunk and (self.method != "mot" or self.rank is None):
            raise ValueError(
                f"`trunk` needs `method` 'mot' and a `rank`, the channels that its translators work in, got "
                f"{self.method!r} and {self.rank}."
            )
        if self.source_window > 1:
            self._check_linear_map("source_window")
        if self.predicts_error:
            self._check_linear_map("predicts_error")
        if self.piece_ranks is not None:
            self._check_linear_map("piece_ranks")
            check_piece_ranks(self)

    def _check_linear_map(self, name: str) -> None:
        beside = self.method in ("mot", "mlp") and (self.linear_path or self.trunk)
        if self.rank is None or not (self.method == "reduced_rank" or beside):
            raise ValueError(
                f"`{name}` needs a linear map of low rank: `method` 'reduced_rank', `linear_path` or `trunk`, and "
                f"a `rank`, got {self.method!r} and {self.rank}. Set these, or leave it out."
            )


def _is_curve(curve: dict) -> bool:
    """Whether a `replay_curve` is whole. Its plans are read where the layers are known, by [`MoTModel`]."""
    if curve.keys() != {"context_length", "n", "points"}:
        return False
    counts, points = (curve["context_length"], curve["n"]), curve["points"]
    counted = all(type(count) is int and count > 0 for count in counts)
    return counted and isinstance(points, list) and len(points) > 0 and all(map(_is_point, points))


def _is_point(point: Any) -> bool:
    if not isinstance(point, dict) or point.keys() != {"replay", "flops_share", "recovery"}:
        return False
    recovery = point["recovery"]
    if not isinstance(recovery, dict) or recovery.keys() != {"value", "low", "high"}:
        return False
    numbers = [point["flops_share"], *recovery.values()]
    finite = all(type(number) in (int, float) and abs(number) < 1e9 for number in numbers)
    return finite and isinstance(point["replay"], str) and recovery["low"] <= recovery["high"]
