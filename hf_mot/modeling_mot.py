"""MoTModel: a translator from one model's KV cache to another's. Read `translate` first: a line per stage.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, ids and masks `[batch, seq]`; rows are left-padded.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput, cached_file, logging

from .alignment_mot import Alignment, align, tokenize_with_spans
from .cache_mot import TranslatedCache
from .capture_mot import check_cache, positions_from_mask, prefill, source_states
from .compat_mot import run_decoder  # noqa: F401  older transformers ship only the files that this one imports
from .configuration_mot import MoTConfig
from .generation_mot import attach
from .geometry_mot import ModelGeometry, check_model, check_tokenizer, describe_model
from .positions_mot import RotaryEncoding  # noqa: F401  likewise
from .replay_mot import ReplayPlan, translator_widths
from .translators_mot import IdentityTranslator, ReducedRankTranslator, embedding_window

logger = logging.get_logger(__name__)

FIT_REPORT = "fit_report.json"


@dataclass
class MoTOutput(ModelOutput):
    """
    Output of [`MoTModel`].

    Args:
        key_states (`tuple[torch.Tensor, ...]`): Position-free keys per target layer.
        value_states (`tuple[torch.Tensor, ...]`): Values per target layer.
    """

    key_states: tuple[torch.Tensor, ...] | None = None
    value_states: tuple[torch.Tensor, ...] | None = None


@dataclass
class TranslationInputs:
    """
    A batch of contexts, aligned: everything that a translator reads, one slot per target token.

    Args:
        source_states (`torch.Tensor` or `None`): `[batch, target_seq, source width]`.
        embeddings (`torch.Tensor` or `None`): `[batch, target_seq, embedding_window * dim]`.
        target_ids, target_mask (`torch.Tensor`): The target's rows `[batch, target_seq]`, left-padded, prefix first.
    """

    source_states: torch.Tensor | None
    embeddings: torch.Tensor | None
    target_ids: torch.Tensor
    target_mask: torch.Tensor


class MoTModel(PreTrainedModel):
    """
    A translator for one source→target pair. Load it with `AutoModel.from_pretrained`, then [`translate`] a cache that
    the source already has, or [`handoff`] a text. The language models are arguments, never part of the translator.

    Args:
        config ([`MoTConfig`]): Configuration with the contracts of both models.
    """

    config_class = MoTConfig
    base_model_prefix = "mot"
    main_input_name = "source_states"

    def __init__(self, config: MoTConfig):
        super().__init__(config)
        if config.source is None or config.target is None:
            raise ValueError(
                "`config` must hold the contracts of the source and the target model (`source`, `target`), as "
                "`hf-mot fit` or MoTModel.identity write them."
            )
        self.source_geometry = ModelGeometry.from_dict(config.source["geometry"])
        self.target_geometry = ModelGeometry.from_dict(config.target["geometry"])
        if config.method == "identity":
            self.translator: nn.Module = IdentityTranslator()
        else:
            self.translator = ReducedRankTranslator(*translator_widths(config), config.rank)
        self.fit_report: dict[str, Any] | None = None
        self.post_init()

    @classmethod
    def identity(cls, target: PreTrainedModel, target_tokenizer: PreTrainedTokenizerBase) -> "MoTModel":
        """The oracle: a translator from `target` to itself that passes the states through the whole path."""
        contract = describe_model(target, target_tokenizer)
        layers = list(range(len(contract["geometry"]["layers"])))
        config = MoTConfig(
            method="identity", source=contract, target=contract, source_layers=layers, embedding_window=0
        )
        return cls(config)

    @torch.no_grad()
    def translate(
        self,
        source_cache: Cache | None,
        source_input_ids: torch.Tensor | None,
        *,
        target: PreTrainedModel,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        source_attention_mask: torch.Tensor | None = None,
        target_input_ids: torch.Tensor | None = None,
        target_attention_mask: torch.Tensor | None = None,
        text: str | Sequence[str] | None = None,
        replay: str | ReplayPlan = "none",
    ) -> TranslatedCache:
        """
        Translates a cache that the source model already has (`source(**inputs)`, `source.generate(...)`) into one that
        `target.generate(**prompt, past_key_values=translated)` continues from. Calls `attach(target)`; changes nothing
        else.

        Args:
            source_cache (`Cache`): The source's cache over the context; `None` for a translator without source.
            source_input_ids (`torch.Tensor`): The ids it was made from, `[batch, seq]`. One surplus trailing id (the
                last one of `generate`, which is in no cache) is dropped.
            target (`PreTrainedModel`): The target model.
            source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`): The fast tokenizers of both models.
            source_attention_mask (`torch.Tensor`, *optional*): 0 on the pads of left-padded rows.
            target_input_ids (`torch.Tensor`, *optional*): The context as the target tokenised it, its prefix (BOS)
                included; by default the text is tokenised alone.
            target_attention_mask (`torch.Tensor`, *optional*): Mask of left-padded `target_input_ids`.
            text (`str` or list of `str`, *optional*): The context's text; by default the decoded source ids.
            replay (`str` or `ReplayPlan`, *optional*, defaults to `"none"`): What the target computes itself.

        Returns:
            [`TranslatedCache`]

        Raises:
            `ValueError`: a model, tokenizer or cache that is not the pair's, a cache that lost keys or holds NaN or
                mixed dtypes, an empty context, more context than the target's positions.
        """
        ReplayPlan.parse(replay)
        inputs = self.prepare(
            source_cache,
            source_input_ids,
            target=target,
            source_tokenizer=source_tokenizer,
            target_tokenizer=target_tokenizer,
            source_attention_mask=source_attention_mask,
            target_input_ids=target_input_ids,
            target_attention_mask=target_attention_mask,
            text=text,
        )
        output = self(inputs.source_states, inputs.embeddings)
        return self.assemble(output, inputs, target)

    @torch.no_grad()
    def handoff(
        self,
        text: str | Sequence[str],
        *,
        target: PreTrainedModel,
        target_tokenizer: PreTrainedTokenizerBase,
        source: PreTrainedModel | None = None,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> TranslatedCache:
        """
        From text to a [`TranslatedCache`], the source's prefill included. Arguments as in [`translate`]; `source` may
        be left out only by a translator that reads no source.
        """
        texts = [text] if isinstance(text, str) else list(text)
        cache, source_ids, source_mask = self.read_source(texts, source, source_tokenizer)
        return self.translate(
            cache,
            source_ids,
            source_attention_mask=source_mask,
            source_tokenizer=source_tokenizer,
            target=target,
            target_tokenizer=target_tokenizer,
            text=texts,
            **kwargs,
        )

    def read_source(self, texts, source, source_tokenizer):
        """The source's own prefill of `texts`: (cache, ids, mask), left-padded, its prefix first; all `None` for a
        translator that reads no source."""
        if not self.config.source_layers:
            return None, None, None
        if source is None:
            raise ValueError("`source` is required: the translator reads the source model's states of the context.")
        check_model(self.config.source, source, "source")
        check_tokenizer(self.config.source, source_tokenizer, "source_tokenizer")
        if not texts or not all(texts):
            raise ValueError("`text` is empty: there is no context to hand off. Pass a text with at least one token.")
        prefix_ids = self.config.source["prefix_ids"]
        ids = [prefix_ids + tokenize_with_spans(source_tokenizer, text)[0] for text in texts]
        source_ids, source_mask = left_pad(ids)
        _check_length("source", source_ids.shape[1], self.source_geometry)
        return prefill(source, source_ids, source_mask, self.config.source_layers), source_ids, source_mask

    def prepare(
        self,
        source_cache,
        source_input_ids,
        *,
        target,
        source_tokenizer,
        target_tokenizer,
        source_attention_mask=None,
        target_input_ids=None,
        target_attention_mask=None,
        text=None,
    ) -> TranslationInputs:
        """Checks the pair, aligns both tokenizations and gathers what the translator reads. Arguments as in
        [`translate`]; the closed-form fit reads its features here too."""
        check_model(self.config.target, target, "target")
        check_tokenizer(self.config.target, target_tokenizer, "target_tokenizer")
        texts = [text] if isinstance(text, str) else text
        source_mask = None
        if self.config.source_layers:
            check_tokenizer(self.config.source, source_tokenizer, "source_tokenizer")
            source_input_ids, source_mask = self._check_source(source_cache, source_input_ids, source_attention_mask)
        given = None
        if target_input_ids is not None:
            given = _unpad(target_input_ids, target_attention_mask, self.config.target["prefix_ids"])
        aligned = self._align(source_input_ids, source_mask, source_tokenizer, target_tokenizer, texts, given)
        prefix = self.config.target["prefix_ids"]
        target_ids, target_mask = left_pad([prefix + row.target_ids for row in aligned])
        source_index, _ = left_pad([[0] * len(prefix) + row.source_index for row in aligned])
        _check_length("target", target_ids.shape[1], self.target_geometry)
        return TranslationInputs(
            self._gather_source(source_cache, source_input_ids, source_mask, source_index),
            self._embed(target, target_ids, target_mask),
            target_ids,
            target_mask,
        )

    def forward(self, source_states: torch.Tensor | None = None, embeddings: torch.Tensor | None = None) -> MoTOutput:
        """
        Translates states, tensors in, tensors out.

        Args:
            source_states (`torch.Tensor`): Aligned position-free states of the source layers, `[batch, seq, width]`.
            embeddings (`torch.Tensor`): Window of target token embeddings, `[batch, seq, embedding_window * dim]`.
        """
        states = self.translator(source_states, embeddings)
        key_states, value_states, start = [], [], 0
        for layer in self.target_geometry.layers:
            for into, dim in ((key_states, layer.key_dim), (value_states, layer.value_dim)):
                piece = states[..., start : start + layer.kv_heads * dim]
                into.append(piece.unflatten(-1, (layer.kv_heads, dim)).transpose(1, 2))  # [batch, kv_heads, seq, dim]
                start += layer.kv_heads * dim
        return MoTOutput(key_states=tuple(key_states), value_states=tuple(value_states))

    def _check_source(self, cache, input_ids, attention_mask):
        """Checks the source's cache; returns ids and mask cut to what it holds."""
        if cache is None or input_ids is None:
            raise ValueError("`source_cache` and `source_input_ids` are required: this translator reads the source.")
        length = check_cache(cache, self.source_geometry, self.config.source_layers)
        if input_ids.shape[-1] - length not in (0, 1):
            raise ValueError(
                f"`source_input_ids` has {input_ids.shape[-1]} ids, but `source_cache` holds {length} positions. Pass "
                "the ids that the cache was made from (the `sequences` of generate, which are one longer, are fine)."
            )
        rows = cache.layers[self.config.source_layers[0]].keys.shape[0]
        if rows != input_ids.shape[0]:
            raise ValueError(
                f"`source_cache` has {rows} rows, but `source_input_ids` has {input_ids.shape[0]}. Pass the ids of "
                "each row; the cache of a beam search holds beams, not what was returned."
            )
        input_ids = input_ids[:, :length]
        if attention_mask is not None and attention_mask.shape != (rows, attention_mask.shape[1]):
            raise ValueError(f"`source_attention_mask` has {attention_mask.shape[0]} rows, but the cache has {rows}.")
        if attention_mask is not None and attention_mask.shape[1] < length:
            raise ValueError(
                f"`source_attention_mask` covers {attention_mask.shape[1]} of the {length} positions that the cache "
                "holds. Extend it with ones for generated tokens."
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, :length]
        prefix = self.config.source["prefix_ids"]
        first = mask.long().argmax(dim=1, keepdim=True) + torch.arange(len(prefix), device=mask.device)
        expected = torch.tensor(prefix, dtype=input_ids.dtype, device=input_ids.device)
        if prefix and (first.max() >= length or not bool((input_ids.gather(1, first) == expected).all())):
            logger.warning(
                f"`source_cache` does not start with the special ids {prefix} that this translator was fitted with; "
                "the translation will be worse. Run the source over these ids and then the context."
            )
        return input_ids, mask

    def _align(self, source_ids, source_mask, source_tokenizer, target_tokenizer, texts, given) -> list[Alignment]:
        """For each target token of each row, the slot of the source cache that covers its last character."""
        if not self.config.source_layers:
            if given is None:
                given = [tokenize_with_spans(target_tokenizer, text)[0] for text in texts or []]
            if not given or not all(given):
                raise ValueError("`text` is empty: there is no context to translate. Pass at least one token.")
            return [Alignment(ids, [0] * len(ids), "") for ids in given]
        same = self.config.source["tokenizer_fingerprint"] == self.config.target["tokenizer_fingerprint"]
        sources = _unpad(source_ids, source_mask)
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
                same_tokenizer=same,
            )
            aligned.append(replace(found, source_index=[slots[index] for index in found.source_index]))
        return aligned

    def _gather_source(self, source_cache, source_ids, source_mask, source_index) -> torch.Tensor | None:
        """Position-free source states, one per target slot: `[batch, target_seq, source width]`."""
        if not self.config.source_layers:
            return None
        positions = positions_from_mask(source_mask)
        states = source_states(source_cache, self.source_geometry, self.config.source_layers, positions)
        self._check_positions(states, source_ids, source_mask)
        index = source_index.to(states.device)[..., None].expand(-1, -1, states.shape[-1])
        return self._to_own(states.gather(1, index))

    def _check_positions(self, states, source_ids, source_mask) -> None:
        """The first token of a row sees only itself: without its position, equal ones have equal states. Where they
        have not, the rows were run at positions that count the pads."""
        pads = source_mask.long().argmax(dim=1)
        first_ids = source_ids.gather(1, pads[:, None].to(source_ids.device))
        if pads.min() == pads.max() or first_ids.min() != first_ids.max():
            return
        first = states[torch.arange(len(states)), pads.to(states.device)].float()
        if (first - first[:1]).abs().max() > 0.05 * first.abs().max():
            raise ValueError(
                "`source_cache` was made at positions that count the pads of its left-padded rows. Run the source "
                "with `position_ids` derived from the attention mask, as generate does, or row by row."
            )

    def _embed(self, target, target_ids, target_mask) -> torch.Tensor | None:
        """The causal window of the target's token embeddings: `[batch, target_seq, window * dim]`."""
        if not self.config.embedding_window:
            return None
        table = target.get_input_embeddings()
        embeddings = table(target_ids.to(table.weight.device))
        mask = target_mask.to(embeddings.device)
        return self._to_own(embedding_window(embeddings, mask, self.config.embedding_window))

    def _to_own(self, states: torch.Tensor) -> torch.Tensor:
        own = next(self.parameters(), None)
        return states if own is None else states.to(device=own.device, dtype=own.dtype)

    def assemble(self, output: MoTOutput, inputs: TranslationInputs, target: PreTrainedModel) -> TranslatedCache:
        """Puts the target's positions on, and the natively computed prefix in front of each row."""
        weight = target.get_input_embeddings().weight
        mask = inputs.target_mask.to(weight.device)
        positions = positions_from_mask(mask)
        prefix_ids = self.config.target["prefix_ids"]
        # The prefix sees nothing before it, so one native row serves all.
        prefix = prefill(target, torch.tensor([prefix_ids])) if prefix_ids else None
        slots = mask.argmax(dim=1, keepdim=True) + torch.arange(len(prefix_ids), device=mask.device)
        all_keys, all_values = [], []
        for layer_idx, layer in enumerate(self.target_geometry.layers):
            # Under a device map each layer lives where the target put it.
            device = weight.device if prefix is None else prefix.layers[layer_idx].keys.device
            keys = output.key_states[layer_idx].to(device=device, dtype=weight.dtype)
            values = output.value_states[layer_idx].to(device=device, dtype=weight.dtype)
            if layer.position == "rope":
                keys = self.target_geometry.rotary[layer.rotary].apply(keys, positions)
            states = []
            for translated, native in ((keys, "keys"), (values, "values")):
                if prefix is not None:
                    source = getattr(prefix.layers[layer_idx], native).expand(len(mask), -1, -1, -1)
                    index = slots.to(device)[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3])
                    translated = translated.scatter(2, index, source)
                states.append((translated * mask[:, None, :, None].to(translated)).contiguous())
            all_keys.append(states[0])
            all_values.append(states[1])
        attach(target)
        bos_token_id = prefix_ids[0] if self.config.target["adds_prefix"] else None
        return TranslatedCache(all_keys, all_values, mask, bos_token_id, self.target_geometry.sliding)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Writes weights (safetensors), config, the code that remote loading needs, and `fit_report.json`."""
        if self.config.method == "identity":
            raise ValueError("An identity translator holds nothing to save. Make it anew with MoTModel.identity.")
        super().save_pretrained(save_directory, **kwargs)
        if self.fit_report is not None:
            text = json.dumps(self.fit_report, indent=2, ensure_ascii=False)
            (Path(save_directory) / FIT_REPORT).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args: Any, **kwargs: Any) -> "MoTModel":
        """As in transformers, but a weight that is missing, surplus or of another shape is an error."""
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True  # so that they are reported, and refused below
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(
                f"The weights of {pretrained_model_name_or_path!r} cannot be read ({error}): the safetensors file is "
                "truncated or damaged. Download or save it again."
            ) from error
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info.get(problem):
                raise ValueError(
                    f"The weights of {pretrained_model_name_or_path!r} do not fit its config: "
                    f"{problem.replace('_', ' ')} {sorted(map(str, info[problem]))}. Save or download it again."
                )
        hub_arguments = ("cache_dir", "revision", "token", "local_files_only", "subfolder")
        report = cached_file(
            pretrained_model_name_or_path,
            FIT_REPORT,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **{name: kwargs[name] for name in hub_arguments if name in kwargs},
        )
        if report is not None:
            try:
                model.fit_report = json.loads(Path(report).read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{FIT_REPORT} of {pretrained_model_name_or_path!r} is damaged: {error}.") from error
        return (model, info) if wants_info else model


def _check_length(side: str, tokens: int, geometry: ModelGeometry) -> None:
    if geometry.max_positions is not None and tokens > geometry.max_positions:
        raise ValueError(
            f"The context has {tokens} {side} tokens, more than the {geometry.max_positions} positions of the {side}. "
            "Shorten the context."
        )


def left_pad(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids as one left-padded tensor and its mask, `[batch, longest]`."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, values in enumerate(rows):
        ids[row, longest - len(values) :] = torch.tensor(values, dtype=torch.long)
        mask[row, longest - len(values) :] = 1
    return ids, mask


def _unpad(ids: torch.Tensor, mask: torch.Tensor | None, prefix: Sequence[int] = ()) -> list[list[int]]:
    """The ids of each row without pads and, where it has it, without `prefix`."""
    rows = []
    for row, values in enumerate(ids.tolist()):
        kept = values if mask is None else [v for v, m in zip(values, mask[row].tolist(), strict=True) if m]
        starts = bool(prefix) and kept[: len(prefix)] == list(prefix)
        rows.append(kept[len(prefix) :] if starts else kept)
    return rows
