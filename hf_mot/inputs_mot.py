"""What a translator reads: beside each token of the target, the source's states of its text, and a window of the
target's own token embeddings.

Shapes: ids and masks are `[batch, seq]`, states and embeddings `[batch, seq, channels]`; rows are left-padded, those
of a ready source cache at either end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from .alignment_mot import Alignment, align, tokenize_with_spans
from .capture_mot import PrefilledCache, prefill, read_cache
from .configuration_mot import MoTConfig
from .contract_mot import check_model, check_tokenizer
from .geometry_mot import ModelGeometry
from .guidance_mot import Guidance, Guide, guide_target
from .rows_mot import causal_window, check_rows, left_pad, unpad


@dataclass
class TranslationInputs:
    """
    A batch of contexts, aligned: everything that a translator reads, one slot per target token.

    Args:
        source_states (`torch.Tensor` or `None`): `[batch, target_seq, source width]`.
        embeddings (`torch.Tensor` or `None`): `[batch, target_seq, embedding_window * dim]`.
        target_ids, target_mask (`torch.Tensor`): The target's rows `[batch, target_seq]`, left-padded, prefix first.
        guidance (`dict[int, torch.Tensor]`, *optional*): By target layer, where the source has looked, in the target's
            slots, `[batch, target_seq, size]`, for plan sparse.
        bottom_states (`tuple`, *optional*): What the target itself has computed of a plan's first layers, keys and
            values of each, of the tokens that are translated.
        target_hidden_states (`torch.Tensor`, *optional*): What went into one of these layers on the way,
            `[batch, seq, hidden]`, for a translator that reads it.
    """

    source_states: torch.Tensor | None
    embeddings: torch.Tensor | None
    target_ids: torch.Tensor
    target_mask: torch.Tensor
    guidance: dict[int, torch.Tensor] | None = None
    bottom_states: tuple[tuple[torch.Tensor, torch.Tensor], ...] | None = None
    target_hidden_states: torch.Tensor | None = None

    def to(self, weight: torch.Tensor | None) -> "TranslationInputs":
        """The same, what is computed with on the device and in the dtype of a translator's weight, if it has one."""
        if weight is None:
            return self
        names = ("source_states", "embeddings", "target_hidden_states")
        parts = {name: getattr(self, name) for name in names}
        return replace(self, **{name: None if part is None else part.to(weight) for name, part in parts.items()})


def read_source(
    config: MoTConfig,
    texts: Sequence[str],
    source: PreTrainedModel | None,
    source_tokenizer: PreTrainedTokenizerBase | None,
    allow_variant: bool = False,
    layers: Sequence[int] | None = None,
    guide: Guide | None = None,
) -> tuple[PrefilledCache | None, torch.Tensor | None, torch.Tensor | None]:
    """
    The source reads contexts itself.

    Args:
        config ([`MoTConfig`]): The translator's.
        texts (`Sequence[str]`): The contexts.
        source, source_tokenizer: The source model and its fast tokenizer.
        allow_variant (`bool`, *optional*, defaults to `False`): As in [`check_model`].
        layers (`Sequence[int]`, *optional*): The layers to keep, by default those that are read.
        guide ([`Guide`], *optional*): What of the source's attention is kept, as the cache's `guidance`.

    Returns:
        `tuple`: Its cache, ids and mask, left-padded, its prefix first; all `None` for a translator without source.

    Raises:
        `ValueError`: another source or tokenizer, no text, or more of it than the source has positions.
    """
    if not config.source_layers:
        return None, None, None
    if source is None:
        raise ValueError("`source` is required: the translator reads the source model's states of the context.")
    check_model(config.source, source, "source", allow_variant)
    check_tokenizer(config.source, source_tokenizer, "source_tokenizer")
    if not texts or not all(texts):
        raise ValueError("`text` is empty: there is no context to hand off. Pass a text with at least one token.")
    prefix_ids = config.source["prefix_ids"]
    ids, mask = left_pad([prefix_ids + tokenize_with_spans(source_tokenizer, text)[0] for text in texts])
    check_length("source", ids.shape[1], ModelGeometry.from_dict(config.source["geometry"]))
    return prefill(source, ids, mask, config.source_layers if layers is None else layers, guide), ids, mask


def prepare_inputs(
    config: MoTConfig,
    source_cache: Cache | None,
    source_input_ids: torch.Tensor | None,
    *,
    target: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase | None,
    source_attention_mask: torch.Tensor | None = None,
    target_input_ids: torch.Tensor | None = None,
    target_attention_mask: torch.Tensor | None = None,
    text: str | Sequence[str] | None = None,
    guidance: Guidance | None = None,
    allow_variant: bool = False,
) -> TranslationInputs:
    """Checks the pair, aligns both tokenizations and gathers what a translator with this `config` reads. Other
    arguments, and errors, as in [`MoTModel.translate`]."""
    check_model(config.target, target, "target", allow_variant)
    check_tokenizer(config.target, target_tokenizer, "target_tokenizer")
    texts = [text] if isinstance(text, str) else text
    given = states = source_mask = None
    if config.source_layers:
        check_tokenizer(config.source, source_tokenizer, "source_tokenizer")
        if source_cache is None or source_input_ids is None:
            raise ValueError("`source_cache` and `source_input_ids` are required: this translator reads the source.")
        states, source_input_ids, source_mask = read_cache(
            source_cache,
            source_input_ids,
            source_attention_mask,
            ModelGeometry.from_dict(config.source["geometry"]),
            config.source_layers,
            config.source["prefix_ids"],
            config.position_free,
        )
    prefix = config.target["prefix_ids"]
    if target_input_ids is not None:
        given = _without_prefix(target_input_ids, target_attention_mask, prefix, target_tokenizer.pad_token_id)
    if config.source_layers:
        same = config.source["tokenizer_fingerprint"] == config.target["tokenizer_fingerprint"]
        aligned = _align(source_input_ids, source_mask, source_tokenizer, target_tokenizer, texts, given, same)
    else:
        aligned = _unaligned(target_tokenizer, texts, given)
    target_ids, target_mask = left_pad([prefix + row.target_ids for row in aligned])
    check_length("target", target_ids.shape[1], ModelGeometry.from_dict(config.target["geometry"]))
    guided = None
    if states is not None:
        first = source_mask.long().argmax(dim=1).tolist()  # what the target's prefix is beside
        slots, _ = left_pad(
            [[slot] * len(prefix) + row.source_index for slot, row in zip(first, aligned, strict=True)]
        )
        if guidance is None and isinstance(source_cache, PrefilledCache):
            guidance = source_cache.guidance
        if guidance is not None:
            depths = (len(side["geometry"]["layers"]) for side in (config.source, config.target))
            guided = guide_target(guidance, source_mask, slots.masked_fill(target_mask == 0, -1), *depths)
        states = states.gather(1, slots.to(states.device)[..., None].expand(-1, -1, states.shape[-1]))
    embeddings = None
    if config.embedding_window:
        table = target.get_input_embeddings()
        own = table(target_ids.to(table.weight.device))
        embeddings = causal_window(own, target_mask.to(own.device), config.embedding_window)
    return TranslationInputs(states, embeddings, target_ids, target_mask, guided)


def _without_prefix(
    ids: torch.Tensor, mask: torch.Tensor | None, prefix: list[int], pad_id: int | None
) -> list[list[int]]:
    """The target's ids of each row, as the user passed them, without pads and prefix."""
    check_rows(ids, mask, "target_input_ids", "target_attention_mask")
    if mask is None and pad_id is not None and [pad_id] != prefix[:1] and bool((ids[:, 0] == pad_id).any()):
        raise ValueError(
            f"`target_input_ids` starts with the pad id {pad_id}, but `target_attention_mask` is missing. Pass the "
            "mask of the padded rows."
        )
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"`target_attention_mask` has the shape {tuple(mask.shape)}, but `target_input_ids` {tuple(ids.shape)}. "
            "Pass the mask that belongs to the ids."
        )
    return [row[len(prefix) :] if prefix and row[: len(prefix)] == prefix else row for row in unpad(ids, mask)]


def _align(
    source_ids: torch.Tensor,
    source_mask: torch.Tensor,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] | None,
    given: list[list[int]] | None,
    same_tokenizer: bool,
) -> list[Alignment]:
    """For each target token of each row, the slot of the source cache that covers its last character."""
    sources = unpad(source_ids, source_mask)
    for name, rows in (("text", texts), ("target_input_ids", given)):
        if rows is not None and len(rows) != len(sources):
            raise ValueError(f"`{name}` has {len(rows)} rows, but `source_input_ids` has {len(sources)}.")
    aligned = []
    for row, ids in enumerate(sources):
        slots = source_mask[row].nonzero().flatten().tolist()
        found = align(
            source_tokenizer,
            ids,
            target_tokenizer,
            None if given is None else given[row],
            text=None if texts is None else texts[row],
            same_tokenizer=same_tokenizer,
        )
        aligned.append(replace(found, source_index=[slots[index] for index in found.source_index]))
    return aligned


def _unaligned(
    target_tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] | None, given: list[list[int]] | None
) -> list[Alignment]:
    """The target's tokens of each row, where no source is read."""
    if given is None:
        given = [tokenize_with_spans(target_tokenizer, text)[0] for text in texts or []]
    if not given or not all(given):
        raise ValueError("`text` is empty: there is no context to translate. Pass at least one token.")
    return [Alignment(ids, [0] * len(ids), "") for ids in given]


def shortest_context(config: MoTConfig, texts: Sequence[str], target_tokenizer: PreTrainedTokenizerBase) -> int:
    """Target tokens of the shortest of some contexts, prefix included. Raises `ValueError` for another tokenizer."""
    check_tokenizer(config.target, target_tokenizer, "target_tokenizer")
    shortest = min(len(tokenize_with_spans(target_tokenizer, text)[0]) for text in texts)
    return len(config.target["prefix_ids"]) + shortest


def check_length(side: str, tokens: int, geometry: ModelGeometry) -> None:
    """Refuses more tokens than the model has positions. Raises `ValueError`."""
    if geometry.max_positions is not None and tokens > geometry.max_positions:
        raise ValueError(
            f"The context has {tokens} {side} tokens, more than the {geometry.max_positions} positions of the {side}. "
            "Shorten the context."
        )
