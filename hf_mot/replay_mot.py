"""Replay plans: what the target computes itself beside a translation, and what that costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from .configuration_mot import MoTConfig
from .geometry_mot import ModelGeometry
from .guidance_mot import Guide, choose_guide
from .replay_cost_mot import (
    assumed_windows,
    bottom_flops,
    native_flops,
    projection_flops,
    resume_flops,
    unseen_flops,
)
from .replay_text_mot import COUNTS, FULL_LAYERS, read_plan, write_plan
from .translators_mot import translator_flops

KEPT_WINDOW = 4  # times the sparse positions: looking up single keys costs some times more than a row of them


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
        uncertain (`int`, *optional*, defaults to 0):
            So many of the other tokens of each row are run by the target too, those whose translation is most likely
            wrong, as the translator predicts it; each on top of what then stands before it.
        sparse (`int`, *optional*, defaults to 0):
            With `"full"`: in the layers from `full_layers` up each token attends to so many tokens alone, those that
            the source looked at most (the paper's Top-S, C.4). Sliding layers whose window holds at most `KEPT_WINDOW`
            times as many keep that instead. 0: to all.
        full_layers (`int`, *optional*, defaults to 2):
            With `sparse`, so many of the target's first layers attend to all tokens (the paper's L_full).
        resume (`int`, *optional*):
            The target runs the layers above this one over the context, from a hidden state that is translated beside
            the keys and values of the others, this one included.

    Raises:
        `ValueError`: negative counts, or parts that exclude each other.
    """

    kind: Literal["none", "full"] = "none"
    window: tuple[int, int] | None = None
    bottom: int = 0
    tokens: int = 0
    uncertain: int = 0
    sparse: int = 0
    full_layers: int = FULL_LAYERS
    resume: int | None = None

    def __post_init__(self):
        counts = [getattr(self, name) for name in COUNTS]
        if min(counts) < 0:
            raise ValueError(
                f"`bottom`, `tokens` and `uncertain` of a plan must be 0 or more, got {', '.join(map(str, counts))}."
            )
        if self.kind == "full" and any(counts):
            raise ValueError(
                "`replay` full and sparse run all layers over all tokens, so bottom, tokens and uncertain do not go "
                f"with them, got {self}. Leave out either."
            )
        if self.resume is not None and (self.resume < 0 or self.kind == "full" or self.bottom):
            raise ValueError(
                "`resume` of a plan must be a layer, from 0, and those above it are run from a translated state, so "
                f"full, sparse and bottom do not go with it, got {self}. Leave out either."
            )
        if min(self.sparse, self.full_layers) < 0 or (self.sparse and self.kind != "full"):
            raise ValueError(
                "`sparse` and `full_layers` of a plan must be 0 or more, and `sparse` goes with the kind full, got "
                f"{self.sparse}, {self.full_layers}, {self.kind}."
            )

    @classmethod
    def parse(cls, plan: "str | ReplayPlan") -> "ReplayPlan":
        """Reads a plan from its name: `"none"`, `"full"` or, with a channel window, `"full:6-11"`; `"sparse:128"`,
        with other full layers than two `"sparse:128/4"`, with a window `"full:6-11+sparse:128"`; `"bottom:6"`,
        `"tokens:32"`, `"uncertain:32"`, `"resume:5"`, or several as `"bottom:6+tokens:32"`. Raises `ValueError` for
        an unknown one."""
        if isinstance(plan, cls):
            return plan
        return cls(**read_plan(plan))

    def __str__(self) -> str:
        return write_plan(vars(self))

    @property
    def runs_target(self) -> bool:
        """Whether the target runs over any of the context."""
        return self.kind == "full" or self.bottom > 0 or self.run_tokens > 0 or self.resume is not None

    @property
    def run_tokens(self) -> int:
        """How many tokens of each row run through all layers, on top of the translation of the others."""
        return self.tokens + self.uncertain

    @property
    def unpredicted(self) -> "ReplayPlan":
        """The plan where nobody knows which tokens are uncertain: as many last ones."""
        return replace(self, tokens=self.run_tokens, uncertain=0)

    @property
    def unguided(self) -> "ReplayPlan":
        """The same plan where nothing is known of where the source looked: the target looks everywhere."""
        return replace(self, sparse=0, full_layers=FULL_LAYERS)

    def layers(self, translated: Sequence[int], depth: int) -> range:
        """
        The target layers whose keys and values are injected.

        Args:
            translated (`Sequence[int]`): The layers that the translator translates, contiguous.
            depth (`int`): Layers of the target's cache.

        Raises:
            ValueError: For layers that are not there or not translated, or a plan that needs more of them.
        """
        if self.sparse and self.full_layers >= depth:
            raise ValueError(
                f"`replay` {self} has full attention in the first {self.full_layers} layers of the target, which has "
                f"{depth}, so that none is sparse. Choose from sparse:{self.sparse}/0 to "
                f"sparse:{self.sparse}/{depth - 1}, or full."
            )
        if self.bottom > depth:
            raise ValueError(
                f"`replay` takes the first {self.bottom} layers from the target itself, but it has {depth}. Choose "
                f"from bottom:1 to bottom:{depth}, which is a native cache."
            )
        if self.bottom == depth and self.uncertain:
            raise ValueError(
                f"`replay` is {self}, but with all {depth} layers native no token is uncertain. Choose fewer layers, "
                "or leave out uncertain."
            )
        if self.bottom == depth:
            return range(depth, depth)
        if self.resume is not None:
            return self._below(translated, depth)
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

    def _below(self, translated: Sequence[int], depth: int) -> range:
        """The layers below those that `resume` runs."""
        if self.resume > depth - 2:
            raise ValueError(
                f"`replay` {self} runs the layers above {self.resume} of the target, but it has {depth}, from 0. "
                f"Choose from resume:0 to resume:{depth - 2}."
            )
        if not translated[0] == 0 <= self.resume <= translated[-1]:
            raise ValueError(
                f"`replay` {self} needs layers 0-{self.resume} of the target, but the translator gives layers "
                f"{translated[0]}-{translated[-1]}."
            )
        return range(self.resume + 1)

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
        if self.run_tokens > lengths[row]:
            rest = lengths[row] - self.tokens
            raise ValueError(
                f"`replay` {self} runs {self.run_tokens} tokens of each row natively, but row {row} of the context "
                f"has {lengths[row]} (its special prefix not counted). "
                + (f"Choose uncertain:{rest} or fewer." if rest else "Leave out uncertain.")
            )
        return attention_mask.shape[1] - self.tokens

    def sparse_layers(self, windows: Sequence[int | None]) -> list[int]:
        """The target layers that attend to guided positions alone. `windows`: how many tokens the sliding window of
        each of them holds, `None` for full attention."""
        if not self.sparse:
            return []
        kept = [window is not None and window <= KEPT_WINDOW * self.sparse for window in windows]
        return [idx for idx in range(self.full_layers, len(windows)) if not kept[idx]]

    def guide(self, source_windows: Sequence[int | None], target_windows: Sequence[int | None]) -> Guide | None:
        """What the source is listened to for, `None` where nobody needs it. Arguments: the windows of both models'
        layers, as in [`sparse_layers`]."""
        guided = self.sparse_layers(target_windows)
        return choose_guide(guided, self.sparse, source_windows, len(target_windows)) if self.sparse else None

    def check_guidance(self, guidance: Mapping[int, torch.Tensor] | None, context_length: int) -> None:
        """Raises `ValueError` where `sparse` lacks guidance, `[batch, seq, size]` by target layer, or enough of it."""
        if self.sparse and guidance is None:
            raise ValueError(
                f"`guidance` is required by the plan {self}: a ready cache does not tell where the source has looked. "
                f"Hand off from text, or pass guidance=mot.guide(source, source_input_ids, replay='{self}')."
            )
        least = min((part.shape[2] for part in (guidance or {}).values()), default=context_length)
        if least < min(self.sparse, context_length):
            raise ValueError(
                f"`guidance` names {least} positions per token, but the plan {self} takes {self.sparse}. Pass what "
                f"guide(…, replay='{self}') tells."
            )

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
        translated, and what restores layers of these or runs from a translated state. More `tokens` than there are
        count as all. Those of `uncertain` run on top of what the target computes for all, and cost most where they are
        the last ones, as they are counted."""
        geometry = ModelGeometry.from_dict(config.target["geometry"])
        native, translated = native_flops(geometry, context_length), max(context_length - self.tokens, 0)
        depth = len(geometry.layers)
        first, last = self.window or (0, depth - 1 if self.resume is None else self.resume)
        injected = [idx for idx in config.restored_layers if max(first, self.bottom) <= idx <= last]
        restored = sum(projection_flops(geometry, translated, idx) for idx in injected)
        if self.kind == "full":
            sparse_layers = len(self.sparse_layers(assumed_windows(geometry)))
            return native - sparse_layers * unseen_flops(geometry, context_length, self.sparse) + restored
        run = bottom_flops(geometry, translated, self.bottom)
        run += 0 if self.resume is None else resume_flops(geometry, translated, self.resume + 1)
        return native - native_flops(geometry, max(context_length - self.run_tokens, 0)) + run + restored

    def flops_share(self, config: MoTConfig, context_length: int) -> float:
        """`flops` as a share of the target's own prefill."""
        native = native_flops(ModelGeometry.from_dict(config.target["geometry"]), context_length)
        return self.flops(config, context_length) / native
