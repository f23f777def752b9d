"""Texts of which one model reads the start and another the rest: where they are cut, and how they are read."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_mot.alignment_mot import decode_with_spans
from hf_mot.cache_mot import TranslatedCache
from hf_mot.evaluation.answers import read_on
from hf_mot.evaluation.arms import ARMS
from hf_mot.evaluation.batch import Batch, Models
from hf_mot.layers_mot import input_device

logger = logging.get_logger(__name__)

# Where the prompt starts, the first that occurs: the question, the last paragraph, the last line.
SPLITS = (r"\n+(?:Question|Q):", r"\n\n", r"\n")


@dataclass(frozen=True)
class Request:
    """
    A text in the target's tokens, in two parts.

    Args:
        context_ids (`list[int]`): What is cached, prefix included; empty if the target reads all itself.
        text (`str`): The same as text: all that the source reads.
        prompt_ids (`list[int]`): What the target reads after it, at least one token.
    """

    context_ids: list[int]
    text: str
    prompt_ids: list[int]


def compile_splits(split: str | None) -> list[re.Pattern]:
    """The places at which a text may be cut. Raises `ValueError` if `split` is no regular expression."""
    try:
        return [re.compile(pattern) for pattern in (SPLITS if split is None else (split,))]
    except re.error as error:
        raise ValueError(f"`split` must be a regular expression, got {split!r}: {error}.") from error


def split_ids(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, splits: Sequence[re.Pattern]) -> Request:
    """
    Cuts a text in two: the prompt starts at the last match of the first pattern that leaves text before it. A token
    across the place belongs to the prompt; special tokens and blanks alone are no text.

    Args:
        ids (`Sequence[int]`): The text's ids, prefix included; at least one.
        tokenizer (`PreTrainedTokenizerBase`): Their tokenizer.
        splits (`Sequence[re.Pattern]`): The patterns.

    Returns:
        [`Request`]: All of it in the prompt if there is no such place.
    """
    ids = list(ids)
    text, spans = decode_with_spans(tokenizer, ids)
    ends = list(accumulate((0 if span is None else span[1] for span in spans), max))
    for pattern in splits:
        for match in reversed(list(pattern.finditer(text))):
            count = bisect_right(ends, match.start())
            if 0 < count < len(ids) and text[: ends[count - 1]].strip():
                return Request(ids[:count], text[: ends[count - 1]], ids[count:])
    return Request([], "", ids)


def read_requests(
    models: Models, arm: str, requests: Sequence[Request], batch_size: int
) -> Iterator[tuple[list[int], TranslatedCache]]:
    """
    Reads requests, those that share a context after one cache of it.

    Args:
        models (`Models`): All that the arm may use.
        arm (`str`): A key of `ARMS`, of which the target is the reader.
        requests (`Sequence[Request]`): The requests.
        batch_size (`int`): Contexts, and after them prompts, in one forward.

    Yields:
        `tuple[list[int], TranslatedCache]`: The numbers of some requests, and the cache after all of them but the last
        token of each prompt.

    Raises:
        ValueError: If the arm needs another context and there is none.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(tuple(request.context_ids), []).append(index)
    whole = groups.pop((), [])
    # The longest first: batches are even, a wrong context is about as long as the right one, and what is too long is
    # found at once.
    members = sorted(groups.values(), key=lambda indices: -len(requests[indices[0]].context_ids))
    contexts = [requests[indices[0]] for indices in members]
    others = contexts[1:] + contexts[:1]
    if len(contexts) == 1 and ARMS[arm].needs_other:
        raise ValueError(f"`arm` is {arm}, which needs at least 2 contexts, got 1. Give more, or choose another arm.")
    for places in chunks(range(len(members)), batch_size):
        other = [others[place] for place in places]
        own = other if ARMS[arm].wrong else [contexts[place] for place in places]
        cache = ARMS[arm].cache(Batch(models, own, other))
        pairs = [(row, index) for row, place in enumerate(places) for index in members[place]]
        for part in chunks(pairs, batch_size):
            yield _read_prompts(
                models, cache.rows(torch.tensor([row for row, _ in part])), requests, [i for _, i in part]
            )
    device = input_device(models.target)
    for indices in chunks(whole, batch_size):
        nothing = TranslatedCache([], [], torch.ones(len(indices), 0, dtype=torch.long, device=device))
        yield _read_prompts(models, nothing, requests, indices)
    if whole:
        logger.warning(
            f"{len(whole)} of {len(requests)} texts have no place at which `split` matches: the target has read them "
            "whole, so their answers say nothing about the translation."
        )


def _read_prompts(models, cache, requests, indices: list[int]) -> tuple[list[int], TranslatedCache]:
    return indices, read_on(models.target, cache, [requests[index].prompt_ids[:-1] for index in indices])


def chunks(items: Sequence, size: int) -> Iterator[list]:
    return (list(items[start : start + size]) for start in range(0, len(items), size))
