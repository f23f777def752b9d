"""MoTModel: a translator from one model's KV cache to another's. Read `translate` first: a line per stage.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, ids and masks `[batch, seq]`; rows are left-padded.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from .cache_mot import TranslatedCache
from .capture_mot import prefill
from .configuration_mot import MoTConfig
from .contract_mot import check_model
from .generation_mot import attach
from .guidance_mot import Guidance, Guide
from .inputs_mot import TranslationInputs, prepare_inputs, read_source, shortest_context
from .pretrained_mot import MoTPreTrainedModel
from .replay_auto_mot import choose_plan, is_auto
from .replay_check_mot import check_prediction, check_target, check_translator
from .replay_mot import ReplayPlan
from .replay_run_mot import read_bottom, replay
from .rows_mot import check_rows
from .translators_mot import build_translator
from .translators_norm_mot import KeyNorm
from .translators_output_mot import MoTOutput, layer_width, split_output


class MoTModel(MoTPreTrainedModel):
    """
    A translator for one source→target pair. Load it with `AutoModel.from_pretrained`, then [`translate`] a cache that
    the source already has, or [`handoff`] a text. The language models are arguments, never part of the translator.

    Args:
        config ([`MoTConfig`]): Configuration with the contracts of both models.
    """

    def __init__(self, config: MoTConfig):
        super().__init__(config)
        for point in (config.replay_curve or {}).get("points", []):
            self.injected_layers(point["replay"])
        self.plan()  # refuses a default plan that these layers are too few for
        self.translator: nn.Module = build_translator(config)
        self.key_norms = nn.ModuleDict()
        for layer_idx in config.key_norms:
            layer = self.target_geometry.layers[layer_idx]
            self.key_norms[str(layer_idx)] = KeyNorm(layer.kv_heads, layer.key_dim)
        self.post_init()

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
            source_attention_mask (`torch.Tensor`, *optional*): 0 on the pads of rows that are padded at their ends.
            target_input_ids (`torch.Tensor`, *optional*): The context as the target tokenised it, its prefix (BOS)
                included; by default the text is tokenised alone.
            target_attention_mask (`torch.Tensor`, *optional*): Mask of left-padded `target_input_ids`.
            text (`str` or list of `str`, *optional*): The context's text; by default the decoded source ids.
            replay (`str` or [`ReplayPlan`], *optional*): What the target computes itself: `"none"`, `"full"`,
                `"sparse:128"` (as `"full"`, but that it looks where the source has looked most), `"bottom:6"` (its
                first layers), `"tokens:32"` (the last tokens), `"uncertain:32"` (those that are likeliest translated
                wrong), `"resume:5"` (the layers above, from a translated state), or `"bottom:6+tokens:32"` and other
                sums of these; by default what the translator was made for, `config.replay`. `"auto:0.25"` (of native
                FLOPs) or `"auto:recovery=0.9"` chooses by the measured curve, see [`choose_plan`].
            guidance ([`Guidance`], *optional*): Where the source has looked, as [`guide`] tells, for `"sparse:128"`: a
                ready cache does not tell. By default what came with a cache of [`read_source`].
            allow_variant (`bool`, *optional*, defaults to `False`): Accepts a source or target that is the
                translator's with another PEFT adapter or quantization.

        Returns:
            [`TranslatedCache`]

        Raises:
            `ValueError`: a model, tokenizer or cache that is not the pair's, a cache that lost keys or holds NaN or
                mixed dtypes, an empty context, more context than the target's positions, an unknown plan or one that
                asks for more layers or tokens than there are, or that this target cannot run, plan sparse without
                guidance, or no plan that `"auto"` could choose.
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
        plan = self.plan(replay, int(inputs.target_mask.sum(dim=1).min()), guided=inputs.guidance is not None)
        check_target(plan, target, self.target_geometry)  # before anything runs
        inputs = self.read_target(inputs, target, plan)
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
            shortest = shortest_context(self.config, texts, target_tokenizer)
        plan = self.plan(replay, shortest)
        check_target(plan, target, self.target_geometry)  # before the source runs too
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

    def guide(
        self,
        source: PreTrainedModel,
        source_input_ids: torch.Tensor,
        source_attention_mask: torch.Tensor | None = None,
        replay: str | ReplayPlan | None = None,
        allow_variant: bool = False,
    ) -> Guidance:
        """
        Where the source looks, which a ready cache does not tell and plan sparse needs. Runs the source over the
        context as far up as that takes; [`handoff`] finds it in passing.

        Args:
            source (`PreTrainedModel`): The source model.
            source_input_ids (`torch.Tensor`): The ids of the cache that is to be translated, `[batch, seq]`.
            source_attention_mask (`torch.Tensor`, *optional*): 0 on the pads of padded rows.
            replay (`str` or [`ReplayPlan`], *optional*): The plan, `"sparse:128"` for one.
            allow_variant (`bool`, *optional*, defaults to `False`): As in [`translate`].

        Returns:
            [`Guidance`], for `translate(..., guidance=…, replay=…)`.

        Raises:
            `ValueError`: a plan that is not sparse, or a source that is not the translator's or shows no attention.
        """
        plan = self.plan(replay)
        if not plan.sparse:
            raise ValueError(f"`replay` must be sparse, like sparse:128, to need guidance, got {plan}.")
        check_rows(source_input_ids, source_attention_mask, "source_input_ids", "source_attention_mask")
        check_model(self.config.source, source, "source", allow_variant)
        return prefill(source, source_input_ids, source_attention_mask, (), self.source_guide(plan)).guidance

    def read_source(self, texts, source, source_tokenizer, allow_variant=False, layers=None, plan=None):
        """The source's own prefill of `texts`: its cache, ids and mask, see [`inputs_mot.read_source`]. `plan`: what
        the cache's `guidance` is recorded for, if it needs one."""
        guide = None if plan is None else self.source_guide(plan)
        return read_source(self.config, texts, source, source_tokenizer, allow_variant, layers, guide)

    def source_guide(self, plan: ReplayPlan) -> Guide | None:
        """What a plan has to know of where the source looks, if anything."""
        both = (self.source_geometry, self.target_geometry)
        return plan.guide(*(geometry.windows or [None] * len(geometry.layers) for geometry in both))

    def prepare(self, source_cache, source_input_ids, **arguments) -> TranslationInputs:
        """Checks the pair, aligns both tokenizations and gathers what the translator reads. Arguments as in
        [`translate`]; the closed-form fit reads its features here too."""
        inputs = prepare_inputs(self.config, source_cache, source_input_ids, **arguments)
        return inputs.to(next(self.parameters(), None))

    def read_target(self, inputs: TranslationInputs, target: PreTrainedModel, plan: ReplayPlan) -> TranslationInputs:
        """The inputs with what the target itself computes of its first layers by a plan, in one pass: their keys and
        values, and the hidden state that this translator reads. Raises `ValueError` for a row that is too short."""
        states, hidden = read_bottom(
            plan,
            target=target,
            prefix=len(self.config.target["prefix_ids"]),
            target_ids=inputs.target_ids,
            target_mask=inputs.target_mask,
            hidden_layer=self._hidden_layer(plan),
        )
        read = replace(inputs, bottom_states=states, target_hidden_states=hidden)
        return read.to(next(self.parameters(), None))

    def _hidden_layer(self, plan: ReplayPlan) -> int | None:
        """The target layer whose native input is read. An identity hands that through which a plan resumes from."""
        if self.config.method == "identity" and plan.resume is not None:
            return plan.resume + 1
        return self.config.target_hidden_layer

    def plan(
        self, replay: str | ReplayPlan | None = None, context_length: int | None = None, guided: bool = True
    ) -> ReplayPlan:
        """The replay plan of that name, by default the one of the config, over the layers that are translated;
        `"auto"` is chosen for a context of `context_length` target tokens, of which it is known where the source has
        looked (`guided`) or not, see [`choose_plan`]. Raises `ValueError` for an unknown one, one that this translator
        gives too few layers for or reads no source for, or where there is none to choose."""
        replay = self.config.replay if replay is None else replay
        automatic = is_auto(replay)
        plan = choose_plan(replay, self.config, context_length, guided) if automatic else ReplayPlan.parse(replay)
        layers = self.injected_layers(plan)
        if plan.kind == "none" or len(layers) == len(self.target_geometry.layers):
            return plan
        return replace(plan, window=(layers[0], layers[-1]))

    def injected_layers(self, plan: str | ReplayPlan) -> range:
        """The target layers whose states are translated by a plan. Raises `ValueError` as [`plan`]."""
        plan = ReplayPlan.parse(plan)
        check_translator(plan, self.config)
        layers = plan.layers(self.target_layers, len(self.target_geometry.layers))
        check_prediction(plan, self.config)
        return layers

    def run(self, inputs: TranslationInputs, plan: ReplayPlan) -> MoTOutput:
        """Translates what the plan does not leave to the target. Raises `ValueError` for a row that it is too short
        for, and as [`ReplayPlan.check_guidance`]."""
        plan.check_guidance(inputs.guidance, inputs.target_mask.shape[1])
        plan.translated_tokens(inputs.target_mask, len(self.config.target["prefix_ids"]))
        if plan.tokens_read(self.config, inputs.target_mask.shape[1]) == 0 or not self.injected_layers(plan):
            return MoTOutput(key_states=(), value_states=())
        return self(**self.forward_arguments(inputs, plan), first_layer=plan.bottom)

    def forward_arguments(self, inputs: TranslationInputs, plan: ReplayPlan) -> dict[str, torch.Tensor | None]:
        """What [`forward`] reads of the inputs under a plan, by name: the tokens that it is to translate."""
        end = plan.tokens_read(self.config, inputs.target_mask.shape[1])
        parts = {
            "source_states": inputs.source_states,
            "embeddings": inputs.embeddings,
            "attention_mask": inputs.target_mask,
            "target_hidden_states": inputs.target_hidden_states,
        }
        return {name: None if part is None else part[:, :end] for name, part in parts.items()}

    def forward(
        self,
        source_states: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        first_layer: int = 0,
        target_hidden_states: torch.Tensor | None = None,
    ) -> MoTOutput:
        """
        Translates states, tensors in, tensors out.

        Args:
            source_states (`torch.Tensor`): Aligned states of the source layers, `[batch, seq, width]`, as
                [`prepare`] gathers them.
            embeddings (`torch.Tensor`): Window of target token embeddings, `[batch, seq, embedding_window * dim]`.
            attention_mask (`torch.Tensor`, *optional*): `[batch, seq]`, 0 on the pads of left-padded rows.
            first_layer (`int`, *optional*, defaults to 0): The target layers below are left out.
            target_hidden_states (`torch.Tensor`, *optional*): What goes into the target's `target_hidden_layer`,
                `[batch, seq, hidden]`, as [`read_target`] gives it.

        Raises:
            `ValueError`: without the hidden states that this translator reads.
        """
        if target_hidden_states is None and self.config.target_hidden_layer is not None:
            raise ValueError(
                "`target_hidden_states` is required: this translator reads what goes into the target's layer "
                f"{self.config.target_hidden_layer}. Take the inputs from read_target(inputs, target, plan)."
            )
        own = next(self.parameters(), None)
        if attention_mask is not None and own is not None:
            attention_mask = attention_mask.to(own.device)
        layers = [layer_idx for layer_idx in self.target_layers if layer_idx >= first_layer]
        left_out = self.target_layers[: len(self.target_layers) - len(layers)]
        geometry, restored = self.target_geometry, self.config.restored_layers
        skipped = sum(layer_width(geometry, restored, layer_idx) for layer_idx in left_out)
        states = self.translator(
            source_states, embeddings, attention_mask, start=skipped, target_hidden_states=target_hidden_states
        )
        output = split_output(states, geometry, layers, restored, self.key_norms, self.config.predicts_error)
        if self.config.method == "identity":  # what is handed through is right everywhere
            output.log_error = states.new_zeros(states.shape[:2])
        return output

    def assemble(
        self, output: MoTOutput, inputs: TranslationInputs, target: PreTrainedModel, plan: ReplayPlan | None = None
    ) -> TranslatedCache:
        """Makes the target's cache of translated states, and attaches the target. Gradients flow through it."""
        states = output.by_layer(self.target_layers, self.config.restored_layers)
        cache = replay(
            ReplayPlan() if plan is None else plan,
            states.key_states,
            states.value_states,
            attention_inputs=states.attention_inputs,
            hidden_states=output.hidden_states,
            target=target,
            contract=self.config.target,
            position_free=self.config.position_free,
            target_ids=inputs.target_ids,
            target_mask=inputs.target_mask,
            guidance=inputs.guidance,
            bottom_states=inputs.bottom_states,
            log_error=output.log_error,
        )
        attach(target)
        return cache
