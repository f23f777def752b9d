"""Configuration of a translator: what it computes, and which two models it was made for."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

FORMAT_VERSION = 1
METHODS = ("reduced_rank", "identity")

# Left behind in a saved config.json by transformers itself, besides the fields of `PreTrainedConfig`.
_WRITTEN_BY_TRANSFORMERS = ("auto_map", "model_type", "torch_dtype", "name_or_path", "attn_implementation")


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
        unknown = sorted(
            name
            for name in kwargs
            if not (name.startswith("_") or name in _WRITTEN_BY_TRANSFORMERS or hasattr(PreTrainedConfig, name))
        )
        if unknown and kwargs.get("model_type", self.model_type) == self.model_type:
            raise ValueError(
                f"`{unknown[0]}` is not a field of MoTConfig format {FORMAT_VERSION} (value: {kwargs[unknown[0]]!r}). "
                "Correct its name, or upgrade hf_mot if the translator was saved by a later release."
            )
        if self.format_version > FORMAT_VERSION or self.format_version < 1:
            raise ValueError(
                f"`format_version` is {self.format_version}, but this release of hf_mot reads up to {FORMAT_VERSION}. "
                "Upgrade hf_mot."
            )
        if self.method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {self.method!r}.")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"`rank` must be at least 1, or None for a full-rank map, got {self.rank}.")
        if self.embedding_window < 0:
            raise ValueError(f"`embedding_window` must be 0 or more tokens, got {self.embedding_window}.")
        self.source_layers = [int(layer_idx) for layer_idx in self.source_layers]
        super().__post_init__(**kwargs)
