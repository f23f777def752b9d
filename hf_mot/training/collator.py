"""From examples to a batch."""

from collections.abc import Sequence
from typing import Any

import torch

from hf_mot.evaluation.answers import right_pad
from hf_mot.rows_mot import left_pad

from .examples import TrainingExample

IGNORED = -100  # the label of a token that is not scored


class PairCollator:
    """
    Makes a batch of [`TrainingExample`]s: the contexts `context_ids` and `context_mask` `[batch, context]`,
    left-padded; the prompts `prompt_ids` and `prompt_mask` `[batch, prompt]`, right-padded; their `labels`, which
    leave pads and first tokens out (-100); and per example `texts`, all that the source reads, and `documents`.

    The texts are tokenised for the source where they are read: rows of the two models need not have one length.
    """

    def __call__(self, examples: Sequence[TrainingExample]) -> dict[str, Any]:
        context_ids, context_mask = left_pad([example.context_ids for example in examples])
        prompt_ids, prompt_mask = right_pad([example.prompt_ids for example in examples], torch.device("cpu"))
        labels = prompt_ids.masked_fill(prompt_mask == 0, IGNORED)
        labels[:, 0] = IGNORED  # no logits of the prompt stand before it
        return {
            "context_ids": context_ids,
            "context_mask": context_mask,
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "labels": labels,
            "texts": [example.text for example in examples],
            "documents": [example.document for example in examples],
        }
