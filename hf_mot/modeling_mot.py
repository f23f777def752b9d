"""MoTModel: a translator from one model's KV cache to another's. Read `translate` first: a line per stage.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, ids and masks `[batch, seq]`; rows are left-padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from .alignment_mot import Alignment, align, tokenize_with_spans
from .cache_mot import TranslatedCache
from .capture_mot import PrefilledCache, prefill, read_cache
from .channels_mot import channels
from .compat_mot import layer_windows
from .configuration_mot import MoTConfig
from .contract_mot import check_contract, check_model, check_tokenizer, describe_model
from .generation_mot import attach
from .geometry_mot import ModelGeometry
from .guidance_mot import Guidance, Guide, carried_over
from .pretrained_mot import MoTPreTrainedModel
from .replay_auto_mot import choose_plan, is_auto
from .replay_mot import ReplayPlan, guiding_layers
from .replay_run_mot import replay
from .rows_mot import check_rows, left_pad, unpad
from .sparse_mot import sparse_way
from .translators_mot import build_translator, embedding_window
from .translators_norm_mot import KeyNorm


@dataclass
class MoTOutput(ModelOutput):
    """
    Output of [`MoTModel`].

    Args:
        key_states (`tuple[torch.Tensor, ...]`): Keys per translated target layer, position-free unless the config
            says otherwise (`position_free`).
        value_states (`tuple[torch.Tensor, ...]`): Values per translated target layer.
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
        guidance (`dict[int, torch.Tensor]`, *optional*): By target layer, where the source looked, in the target's
            slots, `[batch, target_seq, size]`, for plan sparse.
    """

    source_states: torch.Tensor | None
    embeddings: torch.Tensor | None
    target_ids: torch.Tensor
    target_mask: torch.Tensor
    guidance: dict[int, torch.Tensor] | None = None


class MoTModel(MoTPreTrainedModel):
    """
    A translator for one source→target pair. Load it with `AutoModel.from_pretrained`, then [`translate`] a cache that
    the source already has, or [`handoff`] a text. The language models are arguments, never part of the translator.

    Args:
        config ([`MoTConfig`]): Configuration with the contracts of both models.
    """

    def __init__(self, config: MoTConfig):
        super().__init__(config)
        if config.source is None or config.target is None:
            raise ValueError(
                "`config` must hold the contracts of the source and the target model (`source`, `target`), as "
                "`hf-mot fit` or MoTModel.identity write them."
            )
        for side, contract in (("source", config.source), ("target", config.target)):
            check_contract(contract, side)
        self.source_geometry = ModelGeometry.from_dict(config.source["geometry"])
        self.target_geometry = ModelGeometry.from_dict(config.target["geometry"])
        for name, layers, geometry in (
            ("source_layers", config.source_layers, self.source_geometry),
            ("target_layers", config.target_layers or [], self.target_geometry),
            ("key_norms", config.key_norms, self.target_geometry),
        ):
            depth = len(geometry.layers)
            if not set(layers) <= set(range(depth)):
                raise ValueError(f"`{name}` must lie in 0..{depth - 1}, got {layers}.")
        if config.piece_ranks is not None and len(config.piece_ranks) != len(self.target_layers):
            raise ValueError(
                f"`piece_ranks` must be [keys, values] for each of the {len(self.target_layers)} target layers that "
                f"are translated, got {len(config.piece_ranks)}."
            )
        if config.method == "identity" and config.source_layers != self.target_layers:
            raise ValueError(
                f"`source_layers` of an identity translator must be the layers that it hands through, "
                f"{self.target_layers}, got {config.source_layers}."
            )
        if not config.source_layers and not config.embedding_window:
            raise ValueError("`source_layers` and `embedding_window` are both empty: there is nothing to read.")
        for point in (config.replay_curve or {}).get("points", []):
            self.injected_layers(point["replay"])
        self.plan()  # refuses a default plan that these layers are too few for
        self.translator: nn.Module = build_translator(config)
        self.key_norms = nn.ModuleDict()
        for layer_idx in config.key_norms:
            layer = self.target_geometry.layers[layer_idx]
            self.key_norms[str(layer_idx)] = KeyNorm(layer.kv_heads, layer.key_dim)
        self.post_init()

    @property
    def target_layers(self) -> list[int]:
        """The target layers that are translated, the channel window."""
        depth = len(self.target_geometry.layers)
        return list(range(depth)) if self.config.target_layers is None else self.config.target_layers

    def plan(self, replay: str | ReplayPlan | None = None, context_length: int | None = None) -> ReplayPlan:
        """The replay plan of that name, by default the one of the config, over the layers that are translated;
        `"auto"` is chosen for a context of `context_length` target tokens, see [`choose_plan`]. Raises `ValueError`
        for an unknown one, one that this translator gives too few layers for, or where there is none to choose."""
        replay = self.config.replay if replay is None else replay
        plan = choose_plan(replay, self.config, context_length) if is_auto(replay) else ReplayPlan.parse(replay)
        layers = self.injected_layers(plan)
        if plan.sparse and not self.config.source_layers:
            raise ValueError(
                f"`replay` {plan} looks where the source has looked, but this translator reads no source. Pass "
                f"replay='{plan.unguided}'."
            )
        if plan.kind == "none" or len(layers) == len(self.target_geometry.layers):
            return plan
        return replace(plan, window=(layers[0], layers[-1]))

    def injected_layers(self, plan: str | ReplayPlan) -> range:
        """The target layers whose states are translated by a plan. Raises `ValueError` as [`plan`]."""
        return ReplayPlan.parse(plan).layers(self.target_layers, len(self.target_geometry.layers))

    def load_linear_path(self, closed_form: "MoTModel") -> None:
        """
        Copies the weights of a closed-form translator into this one's linear path, and its key norms, so that training
        starts there.

        Raises:
            `ValueError`: this translator has no linear path, or one of other sizes; `closed_form` is none.
        """
        if closed_form.config.method != "reduced_rank":
            raise ValueError(f"`closed_form` must be a closed form (reduced_rank), got {closed_form.config.method}.")
        path = self.translator if self.config.trunk else getattr(self.translator, "linear", None)
        if self.config.method == "reduced_rank":
            path = self.translator
        if path is None:
            raise ValueError("This translator has no linear path to load. Set `linear_path` or `trunk` in its config.")
        for field in (
            *("source_layers", "target_layers", "rank", "piece_ranks"),
            *("embedding_window", "position_free", "key_norms"),
        ):
            came, own = getattr(closed_form.config, field), getattr(self.config, field)
            if came != own:
                raise ValueError(
                    f"`closed_form` was fitted with `{field}` {came}, but this translator has {own}. Make them equal."
                )
        with torch.no_grad():
            own = path.state_dict()
            for name, tensor in closed_form.translator.state_dict().items():
                own[name].copy_(tensor)
        self.key_norms.load_state_dict(closed_form.key_norms.state_dict())

    @classmethod
    def from_pair(
        cls,
        source: PreTrainedModel,
        target: PreTrainedModel,
        source_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        **kwargs: Any,
    ) -> "MoTModel":
        """A translator for a pair of models and their fast tokenizers, to be trained. Arguments as in
        [`from_contracts`]."""
        contracts = (describe_model(source, source_tokenizer), describe_model(target, target_tokenizer))
        return cls.from_contracts(*contracts, **kwargs)

    @classmethod
    def from_contracts(
        cls,
        source: dict[str, Any],
        target: dict[str, Any],
        *,
        channel_ratio: float = 1.0,
        start: int = 0,
        mapping: str = "depth_ratio",
        **fields: Any,
    ) -> "MoTModel":
        """
        A translator with random weights.

        Args:
            source, target (`dict`): The contracts of both models, as `contract_mot.describe_model` writes them.
            channel_ratio, start, mapping (*optional*): The channel window, as in [`channels_mot.channels`]; by default
                all target layers, each with the source layer of its relative depth.
            **fields: Fields of [`MoTConfig`], such as those of `configuration_mot.PAPER`; `source_layers` and
                `target_layers` take the place of the window's.

        Raises:
            `ValueError`: a window out of range, or fields that [`MoTConfig`] refuses.
        """
        depths = (len(contract["geometry"]["layers"]) for contract in (source, target))
        window = channels(*depths, channel_ratio=channel_ratio, start=start, mapping=mapping)
        if channel_ratio == 1:
            window["target_layers"] = None
        default = {"method": "mot", "replay": "none" if channel_ratio == 1 else "full"}
        return cls(MoTConfig(source=source, target=target, **{**default, **window, **fields}))

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
        replay: str | ReplayPlan | None = None,
        guidance: Guidance | None = None,
        allow_variant: bool = False,
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
            replay (`str` or [`ReplayPlan`], *optional*): What the target computes itself: `"none"`, `"full"`,
                `"sparse:128"` (as `"full"`, but that it looks where the source has looked most),
                `"bottom:6"` (its first layers), `"tokens:32"` (the last tokens), `"bottom:6+tokens:32"`; by default
                what the translator was made for, `config.replay`. `"auto:0.25"` (of native FLOPs) or
                `"auto:recovery=0.9"` chooses by the translator's measured curve, see [`choose_plan`].
            guidance ([`Guidance`], *optional*): Where the source has looked, as [`guide`] tells, for `"sparse:128"`: a
                ready cache does not tell. By default what came with a cache of [`read_source`].
            allow_variant (`bool`, *optional*, defaults to `False`): Accepts a source or target that is the
                translator's with another PEFT adapter or quantization.

        Returns:
            [`TranslatedCache`]

        Raises:
            `ValueError`: a model, tokenizer or cache that is not the pair's, a cache that lost keys or holds NaN or
                mixed dtypes, an empty context, more context than the target's positions, an unknown plan or one that
                asks for more layers or tokens than there are, plan sparse without guidance, or no plan that `"auto"`
                could choose.
        """
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
            guidance=guidance,
            allow_variant=allow_variant,
        )
        plan = self.plan(replay, int(inputs.target_mask.sum(dim=1).min()))
        cache = self.assemble(self.run(inputs, plan), inputs, target, plan)
        if allow_variant:
            cache.contract = None
        return cache

    @torch.no_grad()
    def handoff(
        self,
        text: str | Sequence[str],
        *,
        target: PreTrainedModel,
        target_tokenizer: PreTrainedTokenizerBase,
        source: PreTrainedModel | None = None,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
        replay: str | ReplayPlan | None = None,
        allow_variant: bool = False,
        **kwargs: Any,
    ) -> TranslatedCache:
        """
        From text to a [`TranslatedCache`], the source's prefill included. Arguments as in [`translate`]; `source` may
        be left out only by a translator that reads no source.
        """
        texts = [text] if isinstance(text, str) else list(text)
        shortest = None
        if texts and is_auto(self.config.replay if replay is None else replay):
            check_tokenizer(self.config.target, target_tokenizer, "target_tokenizer")
            own = min(len(tokenize_with_spans(target_tokenizer, text)[0]) for text in texts)
            shortest = len(self.config.target["prefix_ids"]) + own
        plan = self.plan(replay, shortest)
        if plan.sparse:
            sparse_way(target)
        cache, source_ids, source_mask = self.read_source(texts, source, source_tokenizer, allow_variant, plan=plan)
        return self.translate(
            cache,
            source_ids,
            source_attention_mask=source_mask,
            source_tokenizer=source_tokenizer,
            target=target,
            target_tokenizer=target_tokenizer,
            text=texts,
            replay=plan,
            allow_variant=allow_variant,
            **kwargs,
        )

    def read_source(self, texts, source, source_tokenizer, allow_variant=False, layers=None, plan=None):
        """The source's own prefill of `texts`: (cache, ids, mask), left-padded, its prefix first; all `None` for a
        translator that reads no source. `layers`: those to keep, by default the ones that are read. `plan`:
        what the cache's `guidance` is recorded for, if it needs one."""
        if not self.config.source_layers:
            return None, None, None
        if source is None:
            raise ValueError("`source` is required: the translator reads the source model's states of the context.")
        check_model(self.config.source, source, "source", allow_variant)
        check_tokenizer(self.config.source, source_tokenizer, "source_tokenizer")
        if not texts or not all(texts):
            raise ValueError("`text` is empty: there is no context to hand off. Pass a text with at least one token.")
        prefix_ids = self.config.source["prefix_ids"]
        ids = [prefix_ids + tokenize_with_spans(source_tokenizer, text)[0] for text in texts]
        source_ids, source_mask = left_pad(ids)
        check_length("source", source_ids.shape[1], self.source_geometry)
        layers = self.config.source_layers if layers is None else layers
        guide = self.source_guide(source, plan)
        return prefill(source, source_ids, source_mask, layers, guide), source_ids, source_mask

    def source_guide(self, source: PreTrainedModel, plan: ReplayPlan | None) -> Guide | None:
        """What a plan has to know of where the source looks."""
        if plan is None or not plan.sparse:
            return None
        windows = layer_windows(source.config.get_text_config())[: len(self.source_geometry.layers)]
        depth = len(self.target_geometry.layers)
        return plan.guide(windows, self.target_geometry.windows or [None] * depth)

    def guide(
        self,
        source: PreTrainedModel,
        source_input_ids: torch.Tensor,
        source_attention_mask: torch.Tensor | None = None,
        replay: str | ReplayPlan | None = None,
    ) -> Guidance:
        """
        Where the source looks, which a ready cache does not tell and plan sparse needs. Runs the source over the
        context as far up as that takes; [`handoff`] finds it in passing.

        Args:
            source (`PreTrainedModel`): The source model.
            source_input_ids (`torch.Tensor`): The ids of the cache that is to be translated, `[batch, seq]`.
            source_attention_mask (`torch.Tensor`, *optional*): 0 on the pads of padded rows.
            replay (`str` or [`ReplayPlan`], *optional*): The plan, `"sparse:128"` for one.

        Returns:
            [`Guidance`], for `translate(..., guidance=…, replay=…)`.

        Raises:
            `ValueError`: a plan that is not sparse, or a source that is not the translator's or shows no attention.
        """
        plan = self.plan(replay)
        if not plan.sparse:
            raise ValueError(f"`replay` must be sparse, like sparse:128, to need guidance, got {plan}.")
        check_rows(source_input_ids, source_attention_mask, "source_input_ids", "source_attention_mask")
        check_model(self.config.source, source, "source", allow_variant=True)
        guide = self.source_guide(source, plan)
        return prefill(source, source_input_ids, source_attention_mask, (), guide).guidance

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
        guidance=None,
        allow_variant=False,
    ) -> TranslationInputs:
        """Checks the pair, aligns both tokenizations and gathers what the translator reads. Arguments as in
        [`translate`]; the closed-form fit reads its features here too."""
        check_model(self.config.target, target, "target", allow_variant)
        check_tokenizer(self.config.target, target_tokenizer, "target_tokenizer")
        texts = [text] if isinstance(text, str) else text
        source_states = source_mask = None
        if guidance is None and isinstance(source_cache, PrefilledCache):
            guidance = source_cache.guidance
        if self.config.source_layers:
            check_tokenizer(self.config.source, source_tokenizer, "source_tokenizer")
            if source_cache is None or source_input_ids is None:
                raise ValueError(
                    "`source_cache` and `source_input_ids` are required: this translator reads the source."
                )
            source_states, source_input_ids, source_mask = read_cache(
                source_cache,
                source_input_ids,
                source_attention_mask,
                self.source_geometry,
                self.config.source_layers,
                self.config.source["prefix_ids"],
                self.config.position_free,
            )
        given = self._without_prefix(target_input_ids, target_attention_mask, target_tokenizer)
        aligned = self._align(source_input_ids, source_mask, source_tokenizer, target_tokenizer, texts, given)
        prefix = self.config.target["prefix_ids"]
        target_ids, target_mask = left_pad([prefix + row.target_ids for row in aligned])
        check_length("target", target_ids.shape[1], self.target_geometry)
        if source_states is not None:
            first = source_mask.long().argmax(dim=1).tolist()  # what the target's prefix is beside
            source_index, _ = left_pad(
                [[slot] * len(prefix) + row.source_index for slot, row in zip(first, aligned, strict=True)]
            )
            index = source_index.to(source_states.device)[..., None].expand(-1, -1, source_states.shape[-1])
            if guidance is not None:
                guidance = self._guide_target(guidance, source_mask, source_index.masked_fill(target_mask == 0, -1))
            source_states = self._to_own(source_states.gather(1, index))  # [batch, target_seq, width]
        embeddings = self._embed(target, target_ids, target_mask)
        return TranslationInputs(source_states, embeddings, target_ids, target_mask, guidance)

    def _guide_target(self, guidance: Guidance, source_mask, source_index) -> dict[int, torch.Tensor]:
        """By target layer, where the source looked, in the target's slots. `source_index`: `[batch, target_seq]`."""
        for positions in guidance.positions.values():
            if len(positions) != len(source_mask) or positions.shape[1] < source_mask.shape[1]:
                raise ValueError(
                    f"`guidance` is of {len(positions)} rows of {positions.shape[1]} source tokens, but the cache is "
                    f"of {len(source_mask)} of {source_mask.shape[1]}. Pass what guide(…) tells of the same ids."
                )
        carried = {
            layer_idx: carried_over(positions, source_index, guidance.size)
            for layer_idx, positions in guidance.positions.items()
        }
        if not carried:
            return {}
        depths = (len(self.source_geometry.layers), len(self.target_geometry.layers))
        return {idx: carried[guide] for idx, guide in enumerate(guiding_layers(list(carried), *depths))}

    def run(self, inputs: TranslationInputs, plan: ReplayPlan) -> MoTOutput:
        """Translates what the plan does not leave to the target. Raises `ValueError` for a row that it is too short
        for, and as [`ReplayPlan.check_guidance`]."""
        plan.check_guidance(inputs.guidance, inputs.target_mask.shape[1])
        plan.translated_tokens(inputs.target_mask, len(self.config.target["prefix_ids"]))
        end = plan.tokens_read(self.config, inputs.target_mask.shape[1])
        if end == 0 or not self.injected_layers(plan):
            return MoTOutput(key_states=(), value_states=())
        read = (inputs.source_states, inputs.embeddings, inputs.target_mask)
        return self(*(None if part is None else part[:, :end] for part in read), first_layer=plan.bottom)

    def forward(
        self,
        source_states: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        first_layer: int = 0,
    ) -> MoTOutput:
        """
        Translates states, tensors in, tensors out.

        Args:
            source_states (`torch.Tensor`): Aligned states of the source layers, `[batch, seq, width]`, as
                [`prepare`] gathers them.
            embeddings (`torch.Tensor`): Window of target token embeddings, `[batch, seq, embedding_window * dim]`.
            attention_mask (`torch.Tensor`, *optional*): `[batch, seq]`, 0 on the pads of left-padded rows.
            first_layer (`int`, *optional*, defaults to 0): The target layers below are left out.
        """
        if attention_mask is not None:
            attention_mask = self._to_own(attention_mask, dtype=False)
        layers = [layer_idx for layer_idx in self.target_layers if layer_idx >= first_layer]
        left_out = self.target_layers[: len(self.target_layers) - len(layers)]
        skipped = sum(self.target_geometry.layers[layer_idx].width for layer_idx in left_out)
        states = self.translator(source_states, embeddings, attention_mask, start=skipped)
        key_states, value_states, start = [], [], 0
        for layer_idx in layers:
            layer = self.target_geometry.layers[layer_idx]
            for into, dim in ((key_states, layer.key_dim), (value_states, layer.value_dim)):
                piece = states[..., start : start + layer.kv_heads * dim]
                into.append(piece.unflatten(-1, (layer.kv_heads, dim)).transpose(1, 2))  # [batch, kv_heads, seq, dim]
                start += layer.kv_heads * dim
            if str(layer_idx) in self.key_norms:
                key_states[-1] = self.key_norms[str(layer_idx)](key_states[-1])
        return MoTOutput(key_states=tuple(key_states), value_states=tuple(value_states))

    def _without_prefix(self, target_ids, target_mask, target_tokenizer) -> list[list[int]] | None:
        """The target's ids of each row, as the user passed them, without pads and prefix."""
        if target_ids is None:
            return None
        check_rows(target_ids, target_mask, "target_input_ids", "target_attention_mask")
        pad, prefix = target_tokenizer.pad_token_id, self.config.target["prefix_ids"]
        if target_mask is None and pad is not None and [pad] != prefix[:1] and bool((target_ids[:, 0] == pad).any()):
            raise ValueError(
                f"`target_input_ids` starts with the pad id {pad}, but `target_attention_mask` is missing. Pass the "
                "mask of the padded rows."
            )
        if target_mask is not None and target_mask.shape != target_ids.shape:
            raise ValueError(
                f"`target_attention_mask` has the shape {tuple(target_mask.shape)}, but `target_input_ids` "
                f"{tuple(target_ids.shape)}. Pass the mask that belongs to the ids."
            )
        rows = unpad(target_ids, target_mask)
        return [row[len(prefix) :] if prefix and row[: len(prefix)] == prefix else row for row in rows]

    def _align(self, source_ids, source_mask, source_tokenizer, target_tokenizer, texts, given) -> list[Alignment]:
        """For each target token of each row, the slot of the source cache that covers its last character."""
        if not self.config.source_layers:
            if given is None:
                given = [tokenize_with_spans(target_tokenizer, text)[0] for text in texts or []]
            if not given or not all(given):
                raise ValueError("`text` is empty: there is no context to translate. Pass at least one token.")
            return [Alignment(ids, [0] * len(ids), "") for ids in given]
        same = self.config.source["tokenizer_fingerprint"] == self.config.target["tokenizer_fingerprint"]
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
                same_tokenizer=same,
            )
            aligned.append(replace(found, source_index=[slots[index] for index in found.source_index]))
        return aligned

    def _embed(self, target, target_ids, target_mask) -> torch.Tensor | None:
        """The causal window of the target's token embeddings: `[batch, target_seq, window * dim]`."""
        if not self.config.embedding_window:
            return None
        table = target.get_input_embeddings()
        embeddings = table(target_ids.to(table.weight.device))
        mask = target_mask.to(embeddings.device)
        return self._to_own(embedding_window(embeddings, mask, self.config.embedding_window))

    def _to_own(self, states: torch.Tensor, dtype: bool = True) -> torch.Tensor:
        own = next(self.parameters(), None)
        return states if own is None else states.to(device=own.device, dtype=own.dtype if dtype else None)

    def assemble(
        self, output: MoTOutput, inputs: TranslationInputs, target: PreTrainedModel, plan: ReplayPlan | None = None
    ) -> TranslatedCache:
        """Makes the target's cache of translated states, and attaches the target. Gradients flow through it."""
        layers = self.target_layers[len(self.target_layers) - len(output.key_states) :]  # all, or the upper ones
        cache = replay(
            ReplayPlan() if plan is None else plan,
            dict(zip(layers, output.key_states, strict=True)),
            dict(zip(layers, output.value_states, strict=True)),
            target=target,
            contract=self.config.target,
            position_free=self.config.position_free,
            target_ids=inputs.target_ids,
            target_mask=inputs.target_mask,
            guidance=inputs.guidance,
        )
        attach(target)
        return cache


def check_length(side: str, tokens: int, geometry: ModelGeometry) -> None:
    """Refuses more tokens than the model has positions. Raises `ValueError`."""
    if geometry.max_positions is not None and tokens > geometry.max_positions:
        raise ValueError(
            f"The context has {tokens} {side} tokens, more than the {geometry.max_positions} positions of the {side}. "
            "Shorten the context."
        )
