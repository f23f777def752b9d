"""From a batch to what the translator reads, and from its output to what the losses compare."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import unwrap_peft_model

from hf_mot.modeling_mot import MoTModel, MoTOutput, TranslationInputs
from hf_mot.replay_mot import ReplayPlan
from hf_mot.rows_mot import positions_from_mask

from .forward import Prompt, context_states, layer_outputs, native_reading, prompt_logits
from .losses import LossInputs
from .queries import capture_queries

ON_PROMPT = ("pl", "distill")  # losses on the prompt's tokens; all others are on the context's


@dataclass
class Comparison:
    """
    Runs the frozen models over a batch of [`PairCollator`], as far as the wanted losses need them.

    Args:
        source, target (`PreTrainedModel`): The frozen models; no source for a translator that reads none.
        source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`): Their tokenizers.
        plan ([`ReplayPlan`]): What the target computes itself.
        losses (`Sequence[str]`): The wanted losses.
        cc_start (`int`): As in [`LossInputs`].
        layer_weights (`Sequence`, *optional*): Weights of all target layers, as in [`LossInputs`].
        allow_variant (`bool`): As in [`MoTModel.translate`].

    Raises:
        `ValueError`: a loss that the plan cannot have.
    """

    source: PreTrainedModel | None
    target: PreTrainedModel
    source_tokenizer: PreTrainedTokenizerBase | None
    target_tokenizer: PreTrainedTokenizerBase
    plan: ReplayPlan
    losses: Sequence[str]
    cc_start: int = 0
    layer_weights: Sequence[float | tuple[float, float]] | None = None
    allow_variant: bool = False

    def __post_init__(self):
        if "cc_hidden" in self.losses and self.plan.kind == "none":
            raise ValueError(
                "`losses` holds cc_hidden, which compares hidden states over the context: it needs a `replay` in "
                "which the target computes them, like full. Leave it out, or choose such a plan."
            )

    @torch.no_grad()
    def inputs(self, mot: MoTModel, batch: dict[str, Any]) -> TranslationInputs:
        """What the translator reads: the source's states of the contexts' texts, aligned."""
        cache, source_ids, source_mask = mot.read_source(
            batch["texts"], self.source, self.source_tokenizer, self.allow_variant
        )
        return mot.prepare(
            cache,
            source_ids,
            source_attention_mask=source_mask,
            source_tokenizer=self.source_tokenizer,
            target=self.target,
            target_tokenizer=self.target_tokenizer,
            target_input_ids=batch["context_ids"],
            target_attention_mask=batch["context_mask"],
            text=batch["texts"],
            allow_variant=self.allow_variant,
        )

    def loss_inputs(
        self, mot: MoTModel, output: MoTOutput | None, inputs: TranslationInputs, batch: dict[str, Any]
    ) -> LossInputs:
        """What the losses compare. Without an output, the native side alone."""
        layers, mask, hidden = self.layers(mot), inputs.target_mask, "cc_hidden" in self.losses
        target, prompt = unwrap_peft_model(self.target), self._prompt(batch)
        # Attention looks at keys with their positions on; all else compares them without.
        positions_on = "key_attention" in self.losses
        geometry, length = None if positions_on else mot.target_geometry, mask.shape[1]

        with layer_outputs(target, hidden) as native_hidden:
            native, native_logits = native_reading(
                target, inputs.target_ids, mask, prompt if "distill" in self.losses and output is not None else None
            )
        theirs = ours = context_states(native, layers, length, geometry, mask)
        logits, own_hidden = None, native_hidden
        if output is not None:
            cache = None
            with layer_outputs(target, hidden) as own_hidden:
                if self.plan.kind != "none" or positions_on or prompt is not None:
                    cache = mot.assemble(output, inputs, self.target, self.plan)
            if self.plan.kind == "none" and not positions_on:
                ours = (output.key_states, output.value_states)
            else:
                ours = context_states(cache, layers, length, geometry, mask)
            logits = None if prompt is None else prompt_logits(target, cache, prompt)
        queries = capture_queries(target, inputs.target_ids, mask) if positions_on else None
        return LossInputs(
            *ours,
            *theirs,
            mask=mask.bool() & (positions_from_mask(mask) >= len(mot.config.target["prefix_ids"])),
            logits=logits,
            native_logits=native_logits,
            labels=None if prompt is None else prompt.scored_labels,
            hidden_states=tuple(own_hidden[layer_idx][:, :length] for layer_idx in layers) if hidden else None,
            native_hidden_states=(
                tuple(native_hidden[layer_idx][:, :length] for layer_idx in layers) if hidden else None
            ),
            query_states=None if queries is None else tuple(queries[layer_idx] for layer_idx in layers),
            translated_layers=len(self.plan.layers(mot.target_geometry)),
            cc_start=self.cc_start,
            layer_weights=None if self.layer_weights is None else [self.layer_weights[idx] for idx in layers],
        )

    def layers(self, mot: MoTModel) -> Sequence[int]:
        """The target layers that are compared: the window, and what the target computes above it."""
        first = self.plan.layers(mot.target_geometry).start
        return range(first, len(mot.target_geometry.layers))

    def _prompt(self, batch: dict[str, Any]) -> Prompt | None:
        if not any(name in self.losses for name in ON_PROMPT):
            return None
        return Prompt(batch["prompt_ids"], batch["prompt_mask"], batch["labels"])


def token_counts(batch: dict[str, Any], prefix: int) -> dict[str, int]:
    """How many tokens of a batch the losses on its contexts and on its prompts are means over, and all that it has."""
    mask = batch["context_mask"]
    return {
        "context": int(mask.sum()) - prefix * len(mask),
        "prompt": int((batch["labels"] != -100).sum()),
        "all": int(mask.sum()) + int(batch["prompt_mask"].sum()),
    }
