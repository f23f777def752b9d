"""From examples to a batch."""

from collections.abc import Sequence
from typing import Any

import torch

from hf_mot.data.states import collate
from hf_mot.evaluation.answers import right_pad
from hf_mot.rows_mot import left_pad

from .examples import TrainingExample


class PairCollator:
    """
    Makes a batch of [`TrainingExample`]s: their contexts `target_ids` and `target_mask` `[batch, context]`,
    left-padded; their prompts `prompt_ids` and `prompt_mask` `[batch, prompt]`, right-padded; and per example `texts`,
    all that the source reads, and `documents`.

    The texts are tokenised for the source where they are read: rows of the two models need not have one length.
    Captured examples (the `dict`s of a [`StatesDataset`]) are batched by [`hf_mot.data.states.collate`].
    """

    def __call__(self, examples: Sequence[TrainingExample] | Sequence[dict[str, Any]]) -> dict[str, Any]:
        if isinstance(examples[0], dict):
            return collate(examples)
        target_ids, target_mask = left_pad([example.context_ids for example in examples])
        prompt_ids, prompt_mask = right_pad([example.prompt_ids for example in examples], torch.device("cpu"))
        return {
            "target_ids": target_ids,
            "target_mask": target_mask,
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "texts": [example.text for example in examples],
            "documents": [example.document for example in examples],
        }
