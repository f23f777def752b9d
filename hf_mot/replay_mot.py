"""Replay: what the target computes itself on top of a translation, and what that costs.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, ids and masks `[batch, seq]`; rows are left-padded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel

from .cache_mot import TranslatedCache
from .capture_mot import prefill
from .compat_mot import run_decoder
from .configuration_mot import MoTConfig
from .geometry_mot import ModelGeometry
from .rows_mot import positions_from_mask
from .translators_mot import translator_flops


@dataclass(frozen=True)
class ReplayPlan:
    """
    What the target computes natively.

    Args:
        kind (`str`, *optional*, defaults to `"none"`):
            `"none"`: every target layer is translated and the target's prefill is skipped. `"full"` (the paper's
            replay): the target runs all its layers over the context, and translated keys and values take the place of
            its own in `window`. That costs as much as a native prefill.
        window (`tuple[int, int]`, *optional*):
            First and last target layer (0-based, inclusive) that `"full"` injects. By default all.
    """

    kind: Literal["none", "full"] = "none"
    window: tuple[int, int] | None = None

    @classmethod
    def parse(cls, plan: "str | ReplayPlan") -> "ReplayPlan":
        """Reads a plan from its name: `"none"`, `"full"` or, with a channel window, `"full:6-11"`. Raises `ValueError`
        for an unknown one."""
        if isinstance(plan, cls):
            return plan
        found = re.fullmatch(r"none|full(?::(\d+)-(\d+))?", str(plan))
        if found is None:
            raise ValueError(
                f"`replay` must be one of none, full, or full with the layers to inject (full:6-11), got {plan!r}."
            )
        window = None if found[1] is None else (int(found[1]), int(found[2]))
        return cls("none" if found[0] == "none" else "full", window)

    def __str__(self) -> str:
        return self.kind if self.window is None else f"{self.kind}:{self.window[0]}-{self.window[1]}"

    def layers(self, translated: Sequence[int], depth: int) -> range:
        """
        The target layers whose keys and values are injected.

        Args:
            translated (`Sequence[int]`): The layers that the translator translates, contiguous.
            depth (`int`): Layers of the target's cache.

        Raises:
            ValueError: For layers that are not translated, or a plan that needs more of them.
        """
        first, last = (translated[0], translated[-1]) if self.window is None else self.window
        if not translated[0] <= first <= last <= translated[-1]:
            raise ValueError(
                f"`replay` injects layers {first}-{last}, but the translator gives layers "
                f"{translated[0]}-{translated[-1]} of the target."
            )
        if self.kind == "none" and last - first + 1 < depth:
            raise ValueError(
                f"`replay` is none, but the translator gives layers {first}-{last} of the target's {depth} alone, and "
                "nothing would compute the others. Pass replay='full'."
            )
        return range(first, last + 1)

    def flops(self, config: MoTConfig, context_length: int) -> int:
        """FLOPs (2 × MACs) of translator and replay over a context of `context_length` target tokens; the source's
        own prefill is not counted."""
        translator = translator_flops(config, context_length)
        if self.kind == "none":
            return translator
        return translator + native_flops(ModelGeometry.from_dict(config.target["geometry"]), context_length)

    def flops_share(self, config: MoTConfig, context_length: int) -> float:
        """`flops` as a share of the target's own prefill."""
        native = native_flops(ModelGeometry.from_dict(config.target["geometry"]), context_length)
        return self.flops(config, context_length) / native


def replay(
    plan: ReplayPlan,
    key_states: Mapping[int, torch.Tensor],
    value_states: Mapping[int, torch.Tensor],
    *,
    target: PreTrainedModel,
    contract: dict[str, Any],
    position_free: bool = True,
    target_ids: torch.Tensor,
    target_mask: torch.Tensor,
) -> TranslatedCache:
    """
    Fills a [`TranslatedCache`]: the target's positions are put on the translated states, the target's special prefix
    is computed natively, and whatever else the plan says. Gradients flow to the translated states.

    Args:
        plan ([`ReplayPlan`]): What the target computes.
        key_states, value_states (`Mapping[int, torch.Tensor]`): Translated states by target layer.
        target (`PreTrainedModel`): The target model; its parameters are not changed.
        contract (`dict`): The target's contract, `config.target`.
        position_free (`bool`, *optional*, defaults to `True`): Whether the keys are without positions, to be put on.
        target_ids, target_mask (`torch.Tensor`): The target's rows, prefix first.
    """
    geometry = ModelGeometry.from_dict(contract["geometry"])
    injected = plan.layers(sorted(key_states), len(geometry.layers))
    weight = target.get_input_embeddings().weight
    mask = target_mask.to(weight.device)
    positions = positions_from_mask(mask)
    prefix_ids = contract["prefix_ids"]
    own = mask.bool() & (positions < len(prefix_ids))  # slots that the target computes itself in every plan

    def placed(layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return geometry.apply_positions(layer_idx, keys, values, positions) if position_free else (keys, values)

    if plan.kind == "full":
        cache: DynamicCache = _InjectingCache(
            {idx: placed(idx, key_states[idx], value_states[idx]) for idx in injected}, keep_own=own
        )
        padded = not bool(mask.all())
        run_decoder(target, target_ids.to(weight.device), cache, *((mask, positions) if padded else ()))
        cache.require_all_injected()
        states = [(layer.keys, layer.values) for layer in cache.layers]
    else:
        # The prefix sees nothing before it, so one native row serves all.
        prefix = prefill(target, torch.tensor([prefix_ids])) if prefix_ids else None
        states = []
        for layer_idx in injected:
            # Under a device map each layer lives where the target put it.
            native = None if prefix is None else prefix.layers[layer_idx]
            device = weight.device if native is None else native.keys.device
            pair = (key_states[layer_idx], value_states[layer_idx])
            pair = tuple(part.to(device=device, dtype=weight.dtype) for part in pair)
            pair = placed(layer_idx, *pair)
            if native is not None:
                pair = tuple(
                    _put_prefix(part, from_prefix, own)
                    for part, from_prefix in zip(pair, (native.keys, native.values), strict=True)
                )
            states.append(pair)
    keys, values = (
        [(part * mask[:, None, :, None].to(part)).contiguous() for part in parts]
        for parts in zip(*states, strict=True)
    )
    added = prefix_ids if contract["adds_prefix"] else ()
    return TranslatedCache(keys, values, mask, added, geometry.sliding, contract)


def _put_prefix(states: torch.Tensor, prefix: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`states` with the rows of `prefix` `[1, kv_heads, prefix, dim]` in each row's slots `own`, its first ones."""
    slots = own.long().argmax(dim=1, keepdim=True) + torch.arange(prefix.shape[2], device=own.device)
    index = slots.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.scatter(2, index, prefix.expand(len(states), -1, -1, -1))


class _InjectingCache(DynamicCache):
    """Full-length layers; in place of what the model computes for an injected layer it stores, and attends to, what
    was translated (its own states stay where `keep_own` is set)."""

    def __init__(self, injected: dict[int, tuple[torch.Tensor, torch.Tensor]], keep_own: torch.Tensor):
        super().__init__()
        self.injected, self.keep_own = injected, keep_own[:, None, :, None]
        self.done: set[int] = set()

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx in self.injected:
            keep = self.keep_own.to(key_states.device)
            keys, values = (part.to(key_states) for part in self.injected[layer_idx])
            key_states = torch.where(keep, key_states, keys)
            value_states = torch.where(keep, value_states, values)
            self.done.add(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def require_all_injected(self) -> None:
        """Gradient checkpointing in training mode, for one, takes the cache away without a word."""
        missed = sorted(set(self.injected) - self.done)
        if missed:
            raise RuntimeError(
                f"The target ran without reading the translated states of layers {missed}. Turn gradient "
                "checkpointing off and put the target in eval mode."
            )


def native_flops(geometry: ModelGeometry, context_length: int) -> int:
    """FLOPs (2 × MACs) of a causal prefill without LM head: every decoder weight once a token, and per layer the
    scores and the weighted sum over the tokens before (windows not subtracted)."""
    attention = 2 * len(geometry.layers) * geometry.attention_dim * context_length * (context_length + 1) // 2
    return 2 * (geometry.decoder_parameters * context_length + attention)
