"""Replay plans: what the target computes itself beside a translation, and what that costs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .configuration_mot import MoTConfig
from .geometry_mot import ModelGeometry
from .translators_mot import translator_flops

_FORMS = {"none": "none", "full": r"full(:\d+-\d+)?", "bottom": r"bottom:[1-9]\d*", "tokens": r"tokens:[1-9]\d*"}


@dataclass(frozen=True)
class ReplayPlan:
    """
    What the target computes natively.

    Args:
        kind (`str`, *optional*, defaults to `"none"`):
            `"none"`: the target's prefill is skipped, but for the parts below. `"full"` (the paper's replay): the
            target runs all its layers over the context, and translated keys and values take the place of its own in
            `window`. That costs as much as a native prefill.
        window (`tuple[int, int]`, *optional*):
            First and last target layer (0-based, inclusive) that `"full"` injects. By default all.
        bottom (`int`, *optional*, defaults to 0):
            So many of the target's first layers have native keys and values: those below the last of them run over the
            context, and that one as far as its keys and values. Those above do not run: theirs are translated.
        tokens (`int`, *optional*, defaults to 0):
            So many of the last tokens of each row are run by the target, on top of what it then has of those before
            them.

    Raises:
        `ValueError`: negative counts, or parts that exclude each other.
    """

    kind: Literal["none", "full"] = "none"
    window: tuple[int, int] | None = None
    bottom: int = 0
    tokens: int = 0

    def __post_init__(self):
        if self.bottom < 0 or self.tokens < 0:
            raise ValueError(f"`bottom` and `tokens` of a plan must be 0 or more, got {self.bottom}, {self.tokens}.")
        if self.kind == "full" and (self.bottom or self.tokens):
            raise ValueError(
                f"`replay` full runs all layers over all tokens, so bottom and tokens do not go with it, got {self}. "
                "Leave out either."
            )

    @classmethod
    def parse(cls, plan: "str | ReplayPlan") -> "ReplayPlan":
        """Reads a plan from its name: `"none"`, `"full"` or, with a channel window, `"full:6-11"`; `"bottom:6"`,
        `"tokens:32"`, or both as `"bottom:6+tokens:32"`. Raises `ValueError` for an unknown one."""
        if isinstance(plan, cls):
            return plan
        given: dict[str, list[int]] = {}
        for part in str(plan).split("+"):
            name = part.partition(":")[0]
            if name in given or name not in _FORMS or re.fullmatch(_FORMS[name], part) is None:
                raise ValueError(
                    "`replay` must be one of none, full, full:6-11 (the layers to inject), bottom:6 (so many first "
                    "layers are native), tokens:32 (so many last tokens are; both from 1) or bottom:6+tokens:32, "
                    f"got {plan!r}."
                )
            given[name] = [int(number) for number in re.findall(r"\d+", part)]
        if "none" in given and len(given) > 1:
            raise ValueError(f"`replay` none runs nothing natively, so no part goes with it, got {plan!r}. Drop none.")
        window = tuple(given.get("full", ())) or None
        counts = {name: given[name][0] for name in ("bottom", "tokens") if name in given}
        return cls("full" if "full" in given else "none", window, **counts)

    def __str__(self) -> str:
        parts = [f"{name}:{count}" for name in ("bottom", "tokens") if (count := getattr(self, name))]
        if self.kind == "full":
            parts.insert(0, "full" if self.window is None else f"full:{self.window[0]}-{self.window[1]}")
        return "+".join(parts) or "none"

    @property
    def runs_target(self) -> bool:
        """Whether the target runs over any of the context."""
        return self.kind == "full" or self.bottom > 0 or self.tokens > 0

    def layers(self, translated: Sequence[int], depth: int) -> range:
        """
        The target layers whose keys and values are injected.

        Args:
            translated (`Sequence[int]`): The layers that the translator translates, contiguous.
            depth (`int`): Layers of the target's cache.

        Raises:
            ValueError: For layers that are not there or not translated, or a plan that needs more of them.
        """
        if self.bottom > depth:
            raise ValueError(
                f"`replay` takes the first {self.bottom} layers from the target itself, but it has {depth}. Choose "
                f"from bottom:1 to bottom:{depth}, which is a native cache."
            )
        if self.bottom == depth:
            return range(depth, depth)
        first, last = (translated[0], translated[-1]) if self.window is None else self.window
        if not translated[0] <= first <= last <= translated[-1]:
            raise ValueError(
                f"`replay` injects layers {first}-{last}, but the translator gives layers "
                f"{translated[0]}-{translated[-1]} of the target."
            )
        if self.kind == "none" and (first > self.bottom or last < depth - 1):
            raise ValueError(
                f"`replay` is {self}, but the translator gives layers {first}-{last} of the target's {depth} alone, "
                "and nothing would compute the others. Pass replay='full'"
                + (f" or replay='bottom:{first}'." if last == depth - 1 else ".")
            )
        return range(max(first, self.bottom), last + 1)

    def translated_tokens(self, attention_mask: torch.Tensor, prefix: int) -> int:
        """
        How many columns of left-padded rows `[batch, seq]` are not left to the target: all but the last `tokens`.

        Args:
            attention_mask (`torch.Tensor`): 0 on the pads of the rows.
            prefix (`int`): Special tokens that each row starts with, which are not translated in any plan.

        Raises:
            ValueError: For a row with fewer tokens.
        """
        lengths = (attention_mask.sum(dim=1) - prefix).tolist()
        row = lengths.index(min(lengths))
        if self.tokens > lengths[row]:
            raise ValueError(
                f"`replay` runs the last {self.tokens} tokens of each row natively, but row {row} of the context has "
                f"{lengths[row]} (its special prefix not counted). Choose tokens:{lengths[row]} or fewer."
            )
        return attention_mask.shape[1] - self.tokens

    def tokens_read(self, config: MoTConfig, context_length: int) -> int:
        """How many of `context_length` tokens the translator reads: those that it translates, or all of them where
        the translation of each depends on all."""
        reads_all = config.method == "mot" and not config.causal
        return context_length if reads_all else max(context_length - self.tokens, 0)

    def flops(self, config: MoTConfig, context_length: int) -> int:
        """FLOPs (2 × MACs) of translator and replay over a context of `context_length` target tokens; the source's
        own prefill is not counted."""
        depth = len(config.target["geometry"]["layers"])
        layers = range(depth) if config.target_layers is None else config.target_layers
        skipped = sum(layer_idx < self.bottom for layer_idx in layers)
        translator = translator_flops(config, self.tokens_read(config, context_length), skipped)
        return translator + self.target_flops(config, context_length)

    def target_flops(self, config: MoTConfig, context_length: int) -> int:
        """What the target computes of `flops`: a native prefill, without its upper layers over the tokens that are
        translated. More `tokens` than there are count as all."""
        geometry = ModelGeometry.from_dict(config.target["geometry"])
        native = native_flops(geometry, context_length)
        if self.kind == "full":
            return native
        translated = max(context_length - self.tokens, 0)
        return native - native_flops(geometry, translated) + bottom_flops(geometry, translated, self.bottom)

    def flops_share(self, config: MoTConfig, context_length: int) -> float:
        """`flops` as a share of the target's own prefill."""
        native = native_flops(ModelGeometry.from_dict(config.target["geometry"]), context_length)
        return self.flops(config, context_length) / native


def native_flops(geometry: ModelGeometry, context_length: int) -> int:
    """FLOPs (2 × MACs) of a causal prefill without LM head: every decoder weight once a token, and per layer the
    scores and the weighted sum over the tokens before (windows not subtracted)."""
    attention = 2 * len(geometry.layers) * geometry.attention_dim * context_length * (context_length + 1) // 2
    return 2 * (geometry.decoder_parameters * context_length + attention)


def bottom_flops(geometry: ModelGeometry, context_length: int, layers: int) -> int:
    """FLOPs (2 × MACs) of the keys and values of the first `layers` layers: those below the last of them, each with an
    equal share of `native_flops`, and of the last its projections, queries included."""
    if layers == 0:
        return 0
    projections = geometry.embedding_dim * (geometry.layers[layers - 1].width + geometry.attention_dim)
    below = native_flops(geometry, context_length) * (layers - 1) // len(geometry.layers)
    return below + 2 * context_length * projections
