"""From a batch to what the translator reads, and from its output to what the losses compare."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from hf_mot.capture_mot import prefill, source_states, split_layers
from hf_mot.data.states import translation_inputs
from hf_mot.evaluation.answers import wrap
from hf_mot.inputs_mot import TranslationInputs, check_length
from hf_mot.modeling_mot import MoTModel, MoTOutput
from hf_mot.replay_mot import ReplayPlan
from hf_mot.rows_mot import positions_from_mask

from .forward import Prompt, context_states, layer_outputs
from .losses import ON_PROMPT, LossInputs, TopLogProbs
from .queries import capture_queries
from .vocabulary import narrow_head, narrowed

ON_TARGET = (*ON_PROMPT, "key_attention", "cc_hidden")  # losses that the target is run for, whatever was captured


@dataclass
class Comparison:
    """
    Runs the frozen models over a batch, as far as the wanted losses need it and the batch does not hold it: one of
    [`PairCollator`] holds the ids of both, aligned, one of [`hf_mot.data.states.collate`] states.

    Args:
        source, target (`PreTrainedModel`): The frozen models, where they are run; known to be the translator's pair.
        plan ([`ReplayPlan`]): What the target computes itself.
        losses (`Sequence[str]`): The wanted losses.
        captured_layers (`Sequence[int]`, *optional*): The target layers whose states batches hold, if they hold any.
        cc_start (`int`): As in [`LossInputs`].
        layer_weights (`Sequence`, *optional*): Weights of all target layers, as in [`LossInputs`].
        restores (`bool`, *optional*, defaults to `False`): Whether the target makes keys and values of a translated
            state in some layer.

    Raises:
        `ValueError`: a loss or plan that needs a target, without one; a loss that the plan cannot have; weights
            that no loss reads.
    """

    source: PreTrainedModel | None
    target: PreTrainedModel | None
    plan: ReplayPlan
    losses: Sequence[str]
    captured_layers: Sequence[int] | None = None
    cc_start: int = 0
    layer_weights: Sequence[float | tuple[float, float]] | None = None
    restores: bool = False

    def __post_init__(self):
        if self.layer_weights is not None and not set(self.losses) - set(ON_PROMPT):
            raise ValueError(
                f"`layer_weights` weigh losses on states, but `losses` has {', '.join(self.losses)} alone, on "
                "prompts. Add one on states, like cc, or leave the weights out."
            )
        if "cc_hidden" in self.losses and self.plan.kind == "none":
            raise ValueError(
                "`losses` holds cc_hidden, which compares hidden states over the context: it needs a `replay` in "
                "which the target computes them, like full. Leave it out, or choose such a plan."
            )
        if self.plan.sparse:
            raise ValueError(
                f"`replay` {self.plan} is a cheaper way to run {self.plan.unguided}, which one translator serves. "
                f"Train with replay='{self.plan.unguided}'."
            )
        if self.plan.uncertain:
            plain = replace(self.plan, uncertain=0)
            raise ValueError(
                f"`replay` {self.plan} leaves tokens to the target that the translator itself chooses, and no loss "
                f"would reach these. Train with replay='{plain}', which serves both."
            )
        reasons = [name for name in self.losses if name in ON_TARGET]
        reasons += [f"the plan {self.plan}"] if self.plan.runs_target else []
        reasons += ["a translator with `restored_layers`"] if self.restores else []
        reasons += ["text"] if self.captured_layers is None else []
        if self.target is None and reasons:
            raise ValueError(f"`target` is required: {reasons[0]} cannot be trained on without running it.")

    @torch.no_grad()
    def inputs(self, mot: MoTModel, batch: dict[str, Any], table: nn.Module | None = None) -> TranslationInputs:
        """What the translator reads: the source's states of the contexts, aligned, and the target's own hidden state,
        if it does. `table`: the target's embeddings, where there is no target."""
        table = table if self.target is None else self.target.get_input_embeddings()
        check_length("target", batch["target_ids"].shape[1], mot.target_geometry)
        if mot.config.source_layers and "source_states" not in batch:
            batch = {**batch, "source_states": self._source_states(mot, batch)}
        dtype = next((weight.dtype for weight in mot.parameters()), torch.float32)
        inputs = translation_inputs(batch, mot.config, table, dtype)
        # By its plan, such a translator cannot be trained without a target.
        reads_target = mot.config.target_hidden_layer is not None
        return mot.read_target(inputs, self.target, self.plan) if reads_target else inputs

    def _source_states(self, mot: MoTModel, batch: dict[str, Any]) -> torch.Tensor:
        """`[batch, context, width]`: the states of the source's own prefill, beside each token of the target."""
        if self.source is None:
            raise ValueError("`source` is required: the translator reads the source model's states of the context.")
        if "source_index" not in batch:
            raise ValueError(
                "`data_collator` must give `source_ids`, `source_mask` and `source_index` for a translator that reads "
                f"a source, got {', '.join(batch)}. Use PairCollator(config, source_tokenizer, target_tokenizer)."
            )
        ids, mask, layers = batch["source_ids"], batch["source_mask"], mot.config.source_layers
        check_length("source", ids.shape[1], mot.source_geometry)
        cache = prefill(self.source, ids, mask, layers)
        positions = positions_from_mask(mask).to(cache.layers[layers[0]].keys.device)
        states = source_states(cache, mot.source_geometry, layers, positions, mot.config.position_free)
        index = batch["source_index"].to(states.device)[..., None].expand(-1, -1, states.shape[-1])
        return states.gather(1, index).to(batch["target_mask"].device)

    def loss_inputs(
        self, mot: MoTModel, output: MoTOutput, inputs: TranslationInputs, batch: dict[str, Any]
    ) -> LossInputs:
        """What the losses compare. Where the batch has a `vocabulary` (ascending ids), logits, labels and likeliest
        tokens are in its numbering."""
        layers, mask = self.layers(mot), inputs.target_mask
        target = None if self.target is None else unwrap_peft_model(self.target)
        prompt = Prompt(batch["prompt_ids"], batch["prompt_mask"])
        prompt = prompt if any(name in self.losses for name in ON_PROMPT) else None
        vocabulary = None if prompt is None else batch.get("vocabulary")
        cache, logits = None, None
        with layer_outputs(target, "cc_hidden" in self.losses) as hidden:
            if self.plan.runs_target or self.restores or any(name in self.losses for name in ON_TARGET):
                cache = mot.assemble(output, inputs, self.target, self.plan)
        with narrow_head(target, vocabulary):
            if prompt is not None:
                logits = prompt.logits(target, cache)
            native = self.native(mot, inputs, batch, prompt)
        if not (self.plan.runs_target or self.restores or self.positions_on):
            ours = (output.key_states, output.value_states)
        else:
            ours = context_states(cache, layers, self._strips(mot), mask)
        return LossInputs(
            *ours,
            **native,
            mask=self._counted(mot, inputs),
            logits=logits,
            labels=None if prompt is None else narrowed(prompt.labels, vocabulary),
            hidden_states=tuple(hidden[layer_idx] for layer_idx in layers) if hidden else None,
            translated_layers=len(mot.injected_layers(self.plan)),
            cc_start=self.cc_start,
            layer_weights=None if self.layer_weights is None else [self.layer_weights[idx] for idx in layers],
        )

    def native_inputs(self, mot: MoTModel, inputs: TranslationInputs, batch: dict[str, Any]) -> LossInputs:
        """The native side alone, in place of the translation too."""
        native = self.native(mot, inputs, batch)
        states = (native["native_key_states"], native["native_value_states"])
        return LossInputs(*states, **native, mask=self._counted(mot, inputs))

    @torch.no_grad()
    def native(
        self, mot: MoTModel, inputs: TranslationInputs, batch: dict[str, Any], prompt: Prompt | None = None
    ) -> dict[str, Any]:
        """The native side of [`LossInputs`], captured or computed."""
        layers, mask, found = self.layers(mot), inputs.target_mask, {}
        distilled, cache, hidden = prompt is not None and "distill" in self.losses, None, []
        target = None if self.target is None else unwrap_peft_model(self.target)
        captured = "native_states" in batch and not self.positions_on and "cc_hidden" not in self.losses
        if captured:
            lacking = sorted(set(layers) - set(self.captured_layers))
            if lacking:
                raise ValueError(
                    f"The captured states hold the target's layers {list(self.captured_layers)}, but by the plan "
                    f"{self.plan} the losses compare {lacking} too. Capture them, or choose a higher window."
                )
            keys, values = split_layers(batch["native_states"], mot.target_geometry, self.captured_layers)
            places = [list(self.captured_layers).index(layer_idx) for layer_idx in layers]
            states = tuple(tuple(part[place] for place in places) for part in (keys, values))
        if not captured or (distilled and not {"top_ids", "native_hidden"} & batch.keys()):
            with layer_outputs(target, "cc_hidden" in self.losses) as hidden:
                cache = prefill(target, inputs.target_ids, mask)
        if not captured:
            states = context_states(cache, layers, self._strips(mot), mask)
        if distilled and "top_ids" in batch:
            top_ids, log_probs = map(prompt.scored, (batch["top_ids"], batch["top_log_probs"]))
            found["native_logits"] = TopLogProbs(narrowed(top_ids, batch.get("vocabulary")), log_probs)
        elif distilled and "native_hidden" in batch:
            head = target.get_output_embeddings()
            found["native_logits"] = head(prompt.scored(batch["native_hidden"]).to(head.weight))
        elif distilled:
            wrapped = wrap(cache, mask.to(cache.layers[0].keys.device), mot.target_geometry.sliding)
            found["native_logits"] = prompt.logits(target, wrapped)
        if self.positions_on:
            queries = capture_queries(target, inputs.target_ids, mask)
            found["query_states"] = tuple(queries[layer_idx] for layer_idx in layers)
        if hidden:
            found["native_hidden_states"] = tuple(hidden[layer_idx] for layer_idx in layers)
        return {"native_key_states": states[0], "native_value_states": states[1], **found}

    def layers(self, mot: MoTModel) -> Sequence[int]:
        """The target layers that are compared: the window, and what the target computes above it."""
        first = mot.injected_layers(self.plan).start
        return range(first, len(mot.target_geometry.layers))

    @property
    def positions_on(self) -> bool:
        """Attention looks at keys with their positions on; all else compares them without."""
        return "key_attention" in self.losses

    def _counted(self, mot: MoTModel, inputs: TranslationInputs) -> torch.Tensor:
        """`[batch, seq]`: the tokens of the contexts, without pads and those that the target runs, the special prefix
        and the plan's last tokens."""
        mask, prefix = inputs.target_mask, len(mot.config.target["prefix_ids"])
        columns = torch.arange(mask.shape[1], device=mask.device)
        translated = columns < self.plan.translated_tokens(mask, prefix)
        return mask.bool() & (positions_from_mask(mask) >= prefix) & translated

    def _strips(self, mot: MoTModel):
        return mot.target_geometry if mot.config.position_free and not self.positions_on else None


def token_counts(batch: dict[str, Any], native: int) -> dict[str, int]:
    """How many tokens of a batch the losses on its contexts and on its prompts are means over, and all that it has.
    `native`: tokens of each context that the target runs in any case."""
    context, prompt = int(batch["target_mask"].sum()), int(batch["prompt_mask"].sum())
    rows = len(batch["target_mask"])
    return {"context": context - native * rows, "prompt": prompt - rows, "all": context + prompt}
