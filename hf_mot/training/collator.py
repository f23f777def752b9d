"""From examples to a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_mot.alignment_mot import align, tokenize_with_spans
from hf_mot.configuration_mot import MoTConfig
from hf_mot.data.states import collate
from hf_mot.evaluation.answers import right_pad
from hf_mot.rows_mot import left_pad

from .examples import TrainingExample


class PairCollator:
    """
    Makes a batch of [`TrainingExample`]s: their contexts `target_ids` and `target_mask` `[batch, context]`,
    left-padded; their prompts `prompt_ids` and `prompt_mask` `[batch, prompt]`, right-padded; their names `documents`;
    and, for a translator that reads a source, what the source reads, `source_ids` and `source_mask`
    `[batch, source_seq]`, left-padded, and `source_index` `[batch, context]`, the slot there that each token of a
    context is translated from. `MoTModel.handoff` does the same, but here `dataloader_num_workers` can hide it.

    Captured examples (the `dict`s of a [`StatesDataset`]) are batched by [`hf_mot.data.states.collate`].

    Args:
        config ([`MoTConfig`], *optional*): The translator's. Not needed for captured examples.
        source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`, *optional*): The pair's fast tokenizers, where
            the translator reads a source.

    Raises:
        `ValueError`: while batching, a context whose ids and text disagree.
    """

    def __init__(
        self,
        config: MoTConfig | None = None,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.config, self.source_tokenizer, self.target_tokenizer = config, source_tokenizer, target_tokenizer

    def __call__(self, examples: Sequence[TrainingExample] | Sequence[dict[str, Any]]) -> dict[str, Any]:
        if isinstance(examples[0], dict):
            return collate(examples)
        target_ids, target_mask = left_pad([example.context_ids for example in examples])
        prompt_ids, prompt_mask = right_pad([example.prompt_ids for example in examples], torch.device("cpu"))
        batch = {
            "target_ids": target_ids,
            "target_mask": target_mask,
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "documents": [example.document for example in examples],
        }
        if self.config is None or not self.config.source_layers or self.source_tokenizer is None:
            return batch
        rows, indices = zip(*map(self._aligned, examples), strict=True)
        batch["source_ids"], batch["source_mask"] = left_pad(rows)
        pads = [batch["source_ids"].shape[1] - len(row) for row in rows]
        slots = [[pad + index for index in own] for pad, own in zip(pads, indices, strict=True)]
        return {**batch, "source_index": left_pad(slots)[0]}

    def _aligned(self, example: TrainingExample) -> tuple[list[int], list[int]]:
        """The source's ids of a context, and the place there of each of the target's."""
        source, target = self.config.source, self.config.target
        ids = [*source["prefix_ids"], *tokenize_with_spans(self.source_tokenizer, example.text)[0]]
        prefix = len(target["prefix_ids"])
        found = align(
            self.source_tokenizer,
            ids,
            self.target_tokenizer,
            example.context_ids[prefix:],
            text=example.text,
            same_tokenizer=source["tokenizer_fingerprint"] == target["tokenizer_fingerprint"],
        )
        return ids, [0] * prefix + found.source_index
