"""Configuration of a translator: what it computes, and which two models it was made for."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

FORMAT_VERSION = 1
METHODS = ("reduced_rank", "identity")
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
            down-projection) or `"identity"` (the oracle: source and target are the same model).
        source (`dict`, *optional*):
            Contract of the source model, as `geometry_mot.describe_model` writes it: `id`, `revision`, `adapter`,
            `dtype`, `model_type`, `fingerprint`, `tokenizer_fingerprint`, `prefix_ids`, `geometry`.
        target (`dict`, *optional*):
            Contract of the target model, in the same form.
        source_layers (`list[int]`, *optional*, defaults to `[]`):
            Source layers whose keys and values are read. Empty: the translator reads no source at all.
        rank (`int`, *optional*):
            Width of the shared down-projection. `None`: a full-rank map.
        embedding_window (`int`, *optional*, defaults to 5):
            Number of target token embeddings read beside the source states: the token's own and those of the
            `embedding_window - 1` tokens before it. 0: none.

    Raises:
        `ValueError`: an unknown field or method, or a `format_version` this release cannot read.
    """

    model_type = "mot"

    format_version: int = FORMAT_VERSION
    method: str = "reduced_rank"
    source: dict | None = None
    target: dict | None = None
    source_layers: list[int] | tuple[int, ...] = ()
    rank: int | None = None
    embedding_window: int = 5

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
        if self.method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {self.method!r}.")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"`rank` must be at least 1, or None for a full-rank map, got {self.rank}.")
        if self.embedding_window < 0:
            raise ValueError(f"`embedding_window` must be 0 or more tokens, got {self.embedding_window}.")
        self.source_layers = [int(layer_idx) for layer_idx in self.source_layers]
        super().__post_init__(**kwargs)
