"""Replay: makes the target's cache of translated states and of what the plan lets the target compute itself.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, ids and masks `[batch, seq]`; rows are left-padded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from .cache_mot import TranslatedCache
from .capture_mot import PrefilledCache, prefill
from .compat_mot import layer_windows, run_decoder
from .geometry_mot import ModelGeometry
from .layers_mot import require_read
from .replay_mot import ReplayPlan
from .restore_mot import restore
from .resume_mot import check_resumable, resume
from .rows_mot import positions_from_mask
from .sparse_mot import sparse_attention
from .uncertain_mot import choose_slots, run_slots

_States = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer


def read_bottom(
    plan: ReplayPlan,
    *,
    target: PreTrainedModel,
    prefix: int,
    target_ids: torch.Tensor,
    target_mask: torch.Tensor,
    hidden_layer: int | None = None,
) -> tuple[tuple[_States, ...], torch.Tensor | None]:
    """
    The target reads what a plan leaves to its first layers, in one pass that ends there.

    Args:
        plan ([`ReplayPlan`]): What the target computes.
        target (`PreTrainedModel`): The target model.
        prefix (`int`): Special tokens that each row starts with.
        target_ids, target_mask (`torch.Tensor`): The target's rows, prefix first.
        hidden_layer (`int`, *optional*): A layer whose input is kept: one of the plan's `bottom`, or that from which
            a plan resumes, which is then read natively.

    Returns:
        `tuple`: Keys and values of each of the first layers, and the hidden states that went into `hidden_layer`,
        `[batch, seq, hidden]`, zero on pads: of the tokens that are translated, those before the plan's last ones.

    Raises:
        `ValueError`: a row that is too short for the plan.
    """
    translated = plan.translated_tokens(target_mask, prefix)
    last = plan.bottom if hidden_layer is None else max(plan.bottom, hidden_layer + 1)
    if translated == 0 or last == 0:
        return (), None
    ids, mask = target_ids[:, :translated], target_mask[:, :translated]
    cache = prefill(target, ids, mask, range(last), hidden_layer=hidden_layer)
    hidden = cache.hidden_states
    if hidden is not None:
        hidden = hidden.masked_fill(mask[..., None].to(hidden.device) == 0, 0)
    return tuple(_states(cache)[: plan.bottom]), hidden


def replay(
    plan: ReplayPlan,
    key_states: Mapping[int, torch.Tensor],
    value_states: Mapping[int, torch.Tensor],
    *,
    attention_inputs: Mapping[int, torch.Tensor] | None = None,
    hidden_states: torch.Tensor | None = None,
    target: PreTrainedModel,
    contract: dict[str, Any],
    position_free: bool = True,
    target_ids: torch.Tensor,
    target_mask: torch.Tensor,
    guidance: Mapping[int, torch.Tensor] | None = None,
    bottom_states: Sequence[_States] | None = None,
    log_error: torch.Tensor | None = None,
) -> TranslatedCache:
    """
    Fills a [`TranslatedCache`]: the target's positions are put on the translated states, the target's special prefix
    is computed natively, and whatever else the plan says. Gradients flow to the translated states.

    Args:
        plan ([`ReplayPlan`]): What the target computes.
        key_states, value_states (`Mapping[int, torch.Tensor]`): Translated states by target layer. Layers and last
            tokens that the plan leaves to the target are not read.
        attention_inputs (`Mapping[int, torch.Tensor]`, *optional*): By target layer, what goes into its attention,
            `[batch, seq, hidden]`, of layers whose keys and values the target restores from that.
        hidden_states (`torch.Tensor`, *optional*): What goes into the lowest of the layers that a plan `resume` runs,
            `[batch, seq, hidden]`.
        target (`PreTrainedModel`): The target model; its parameters are not changed.
        contract (`dict`): The target's contract, `config.target`.
        position_free (`bool`, *optional*, defaults to `True`): Whether the keys are without positions, to be put on.
        target_ids, target_mask (`torch.Tensor`): The target's rows, prefix first.
        guidance (`Mapping[int, torch.Tensor]`, *optional*): By target layer, the slots that each token may look at in
            plan sparse, `[batch, seq, size]`.
        bottom_states (`Sequence`, *optional*): What [`read_bottom`] gave, where the target has read it before.
        log_error (`torch.Tensor`, *optional*): How wrong the translation of each token is likely to be, `[batch,
            seq]`, by which plan uncertain chooses.

    Raises:
        `ValueError`: a plan that these layers or rows are too few for; plan sparse without guidance, or for a target
            that cannot look at some tokens alone; plan uncertain without `log_error`, or for a target that cannot run
            single tokens; plan resume without a hidden state, or for a target whose upper layers do not run alone.
        `RuntimeError`: the target has left the cache aside.
    """
    geometry, prefix_ids = ModelGeometry.from_dict(contract["geometry"]), contract["prefix_ids"]
    translated = plan.translated_tokens(target_mask, len(prefix_ids))
    weight = target.get_input_embeddings().weight
    ids, mask = target_ids.to(weight.device), target_mask.to(weight.device)
    positions = positions_from_mask(mask)

    def filled(layers: Sequence[_States], mask: torch.Tensor) -> TranslatedCache:
        keys, values = (
            [(part * mask[:, None, :, None].to(part)).contiguous() for part in parts]
            for parts in zip(*layers, strict=True)
        )
        added = prefix_ids if contract["adds_prefix"] else ()
        return TranslatedCache(keys, values, mask, added, geometry.sliding, contract)

    if translated == 0:  # the target has no prefix and runs all tokens
        return filled(_states(prefill(target, ids, mask)), mask)

    if plan.resume is not None:
        check_resumable(target, geometry)
    activations = attention_inputs or {}
    injected = plan.layers(sorted({*key_states, *activations}), len(geometry.layers))
    first = ids[:, :translated], mask[:, :translated], positions[:, :translated]
    activations = {idx: activations[idx][:, :translated] for idx in injected if idx in activations}
    restored = restore(target, activations, first[0], *(() if bool(first[1].all()) else first[1:]))

    def placed(layer_idx: int, **place: Any) -> _States:
        if layer_idx in restored:
            return restored[layer_idx]
        pair = (states[layer_idx][:, :, :translated].to(**place) for states in (key_states, value_states))
        return geometry.apply_positions(layer_idx, *pair, first[2]) if position_free else tuple(pair)

    if plan.kind == "full":
        windows = geometry.windows or layer_windows(target.config.get_text_config())[: len(geometry.layers)]
        sparse_layers = plan.sparse_layers(windows)
        if sparse_layers:
            plan.check_guidance(guidance or None, ids.shape[1])  # empty where it was made for a plan that needs none
        # The layers of a group share what they are guided by, also when it is narrowed.
        narrowed = {id(part): part[..., : plan.sparse] for part in (guidance or {}).values()}
        sparse = {idx: narrowed[id(guidance[idx])] for idx in sparse_layers}
        placed_states = {idx: placed(idx, dtype=weight.dtype) for idx in injected}
        with sparse_attention(target, sparse):
            layers = _injected(placed_states, target, prefix_ids, *first)
    else:
        if bottom_states is None:
            rows = {"target_ids": target_ids, "target_mask": target_mask}
            bottom_states, _ = read_bottom(plan, target=target, prefix=len(prefix_ids), **rows)
        if len(bottom_states) != plan.bottom or any(keys.shape[2] != translated for keys, _ in bottom_states):
            raise ValueError(
                f"`bottom_states` must be {plan.bottom} layers of {translated} tokens by the plan {plan}, got "
                f"{[tuple(keys.shape) for keys, _ in bottom_states]}. Take them from read_target with this plan."
            )
        layers = list(bottom_states)
        start = None if plan.resume is None else plan.resume + 1
        with_prefix = bool(prefix_ids) and len(injected) > 0
        prefix = prefill(target, torch.tensor([prefix_ids]), hidden_layer=start) if with_prefix else None
        for layer_idx in injected:
            native = None if prefix is None else prefix.layers[layer_idx]
            # Under a device map each layer lives where the target put it.
            device = weight.device if native is None else native.keys.device
            pair = placed(layer_idx, device=device, dtype=weight.dtype)
            if native is not None:
                pair = (
                    _with_prefix(pair[0], native.keys, *first[1:]),
                    _with_prefix(pair[1], native.values, *first[1:]),
                )
            layers.append(pair)
        if start is not None:
            layers += _resumed(start, hidden_states, prefix, target, *first)
    cache = filled(layers, first[1])
    if plan.uncertain:
        if log_error is None:
            raise ValueError(
                f"`log_error` is required by the plan {plan}, which runs the tokens that are likeliest wrong. Take it "
                "from the output of a translator that predicts it (`predicts_error`)."
            )
        slots = choose_slots(log_error[:, :translated], *first[1:], len(prefix_ids), plan.uncertain)
        last = torch.arange(translated, ids.shape[1], device=slots.device).expand(len(ids), -1)
        run = run_slots(target, cache, ids, mask, positions, torch.cat([slots, last], dim=1))
        return filled(_states(run), mask)
    return filled(_read_on(target, cache, ids, mask, positions), mask) if plan.tokens else cache


def _states(cache: Cache) -> list[_States]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _resumed(
    start: int,
    hidden_states: torch.Tensor | None,
    prefix: PrefilledCache | None,
    target: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
) -> list[_States]:
    """The target runs its layers from `start` up, of translated hidden states; those of `prefix` are its own."""
    if hidden_states is None:
        raise ValueError(
            f"`hidden_states` is required by the plan resume:{start - 1}: what goes into layer {start} of the target. "
            "Pass what a translator with that `resume_layer` gives."
        )
    hidden = hidden_states[:, : ids.shape[1]].to(target.get_input_embeddings().weight)
    if prefix is not None:
        hidden = _with_prefix(hidden[:, None], prefix.hidden_states[:, None], mask, positions)[:, 0]
    return resume(target, start, hidden, ids, *(() if bool(mask.all()) else (mask, positions)))


def _injected(
    states: Mapping[int, _States],
    target: PreTrainedModel,
    prefix_ids: Sequence[int],
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
) -> list[_States]:
    """The target runs all its layers, and attends to `states` in place of its own, but for the prefix's."""
    own = mask.bool() & (positions < len(prefix_ids))
    cache = _InjectingCache(states, keep_own=own)
    padded = not bool(mask.all())
    run_decoder(target, ids, cache, *((mask, positions) if padded else ()))
    require_read(set(states) - cache.done)
    return _states(cache)


def _read_on(
    target: PreTrainedModel, cache: TranslatedCache, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
) -> list[_States]:
    """The target reads what stands in `ids` after the columns that `cache` holds. Its pads are at the left end of
    these, where a sliding window may count them."""
    fork, done = cache.fork(), cache.prefix_mask.shape[1]
    padded = not bool(mask.all())
    run_decoder(target, ids[:, done:], fork, *((mask, positions[:, done:]) if padded else ()))
    require_read([idx for idx, layer in enumerate(fork.layers) if layer.keys.shape[2] < ids.shape[1]])
    return _states(fork)


def _with_prefix(
    states: torch.Tensor, prefix: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`states` `[batch, heads, seq, dim]` with those of `prefix`, `[1, heads, prefix, dim]`, in each row's first
    slots."""
    own = mask.bool() & (positions < prefix.shape[2])
    slots = own.long().argmax(dim=1, keepdim=True) + torch.arange(prefix.shape[2], device=own.device)
    index = slots.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.scatter(2, index, prefix.to(states).expand(len(states), -1, -1, -1))


class _InjectingCache(DynamicCache):
    """Full-length layers; in place of what the model computes for an injected layer it stores, and attends to, what
    was translated (its own states stay where `keep_own` is set)."""

    def __init__(self, injected: Mapping[int, _States], keep_own: torch.Tensor):
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
