"""
A narrower vocabulary for the losses on prompts: an LM head over 262k tokens costs more than the small model below it,
and almost all of them occur nowhere in the text.

A vocabulary is a tensor of ascending ids `[narrow]`; in the narrower numbering an id is its place in it.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_mot.data.states import StatesDataset

from .examples import TrainingExample

# Of these examples the tokens are counted; some 260,000 tokens by the paper's recipe.
VOCABULARY_EXAMPLES = 2048


def frequent_tokens(
    examples: StatesDataset | Iterable[TrainingExample | dict[str, Any]], size: int, vocabulary_size: int
) -> torch.Tensor:
    """
    The tokens that are most frequent in training data. The same data give the same ones.

    Args:
        examples (`Iterable`): Of these the first 2,048 are counted, or captured states, which are counted whole: their
            contexts, prompts and, where they hold them, the native target's likeliest tokens.
        size (`int`): How many. If fewer occur, the lowest other ids join them: those are frequent in most tokenizers.
        vocabulary_size (`int`): The target's number of tokens.

    Returns:
        `torch.Tensor`: `[vocabulary_size]`, 1 for the frequent tokens and 0 for all others.
    """
    if isinstance(examples, StatesDataset):
        parts = examples.token_ids()
    else:
        parts = map(_ids, itertools.islice(examples, VOCABULARY_EXAMPLES))
    counts = torch.zeros(vocabulary_size, dtype=torch.long)
    for ids in parts:
        counts += ids.flatten().long().bincount(minlength=vocabulary_size)
    frequent = torch.zeros(vocabulary_size, dtype=torch.int32)
    frequent[counts.argsort(descending=True, stable=True)[:size]] = 1
    return frequent


def scored_ids(batch: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The ids of a batch that the losses on its prompts look up: none of them may be missing from a vocabulary."""
    yield from (batch[name].flatten().long() for name in ("prompt_ids", "top_ids") if name in batch)


def narrowed(ids: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """Ids in the numbering of a vocabulary (`None`: of the whole one). Raises `ValueError` for an id that it lacks."""
    if vocabulary is None:
        return ids
    ids = ids.long()
    vocabulary = vocabulary.to(ids.device)
    places = torch.searchsorted(vocabulary, ids).clamp(max=len(vocabulary) - 1)
    missing = ids[vocabulary[places] != ids]
    if len(missing):
        raise ValueError(
            f"`vocabulary` lacks the id {int(missing[0])}, which the batch's prompts hold. Add the ids of the prompts "
            "to it."
        )
    return places


@contextmanager
def narrow_head(model: PreTrainedModel, vocabulary: torch.Tensor | None) -> Iterator[None]:
    """
    Within it the model's logits are those of a vocabulary's tokens alone, in its order; soft caps and scalings are
    applied as ever. Every parameter of the head that has a row a token (weight, bias, what LoRA adds) is replaced by
    the rows of these tokens; input embeddings, tied ones too, are left alone. `None`: nothing is changed.

    Gradients flow through the logits, not into the head: it is frozen.
    """
    if vocabulary is None:
        yield
        return
    head = model.get_output_embeddings()
    own = [
        (part, name, parameter)
        for part in head.modules()
        for name, parameter in part.named_parameters(recurse=False)
        if parameter.dim() and len(parameter) == len(head.weight)
    ]
    try:
        for part, name, parameter in own:
            rows = parameter.detach()[vocabulary.to(parameter.device)]
            setattr(part, name, torch.nn.Parameter(rows, requires_grad=False))
        yield
    finally:
        for part, name, parameter in own:
            setattr(part, name, parameter)


def _ids(example: TrainingExample | dict[str, Any]) -> torch.Tensor:
    if isinstance(example, dict):
        return torch.cat([example["context_ids"], example["prompt_ids"]])
    return torch.tensor([*example.context_ids, *example.prompt_ids])
