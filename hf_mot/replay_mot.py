"""Replay plans: what the target computes itself on top of a translated cache, and what that costs."""

from dataclasses import dataclass

from .configuration_mot import MoTConfig
from .geometry_mot import ModelGeometry

PLANS = ("none",)


@dataclass(frozen=True)
class ReplayPlan:
    """
    What the target computes natively.

    Args:
        kind (`str`, *optional*, defaults to `"none"`):
            `"none"`: every target layer is translated and the target's prefill is skipped.
    """

    kind: str = "none"

    @classmethod
    def parse(cls, plan: "str | ReplayPlan") -> "ReplayPlan":
        """Reads a plan from its name. Raises `ValueError` for an unknown one."""
        if isinstance(plan, cls):
            return plan
        if plan not in PLANS:
            raise ValueError(f"`replay` must be one of {', '.join(PLANS)}, got {plan!r}.")
        return cls(plan)

    def flops(self, config: MoTConfig, context_length: int) -> int:
        """FLOPs (2 × MACs) of translator and replay over a context of `context_length` target tokens; the source's
        own prefill is not counted, and for `none` nothing is replayed."""
        return 2 * translator_parameters(config) * context_length

    def flops_share(self, config: MoTConfig, context_length: int) -> float:
        """`flops` as a share of the target's own prefill."""
        native = native_flops(ModelGeometry.from_dict(config.target["geometry"]), context_length)
        return self.flops(config, context_length) / native


def native_flops(geometry: ModelGeometry, context_length: int) -> int:
    """FLOPs (2 × MACs) of a causal prefill without LM head: every decoder weight once a token, and per layer the
    scores and the weighted sum over the tokens before (windows not subtracted)."""
    attention = 2 * len(geometry.layers) * geometry.attention_dim * context_length * (context_length + 1) // 2
    return 2 * (geometry.decoder_parameters * context_length + attention)


def translator_widths(config: MoTConfig) -> tuple[int, int, int]:
    """(source, embedding window, target) widths of a translator, in channels a token."""
    source, target = (ModelGeometry.from_dict(contract["geometry"]) for contract in (config.source, config.target))
    return (
        sum(source.layers[layer_idx].width for layer_idx in config.source_layers),
        config.embedding_window * target.embedding_dim,
        sum(layer.width for layer in target.layers),
    )


def translator_parameters(config: MoTConfig) -> int:
    """Weights of the translator that each token passes."""
    if config.method == "identity":
        return 0
    source_dim, embedding_dim, output_dim = translator_widths(config)
    if config.rank is None:
        return (source_dim + embedding_dim) * output_dim
    return config.rank * (source_dim + embedding_dim + output_dim)
