"""Training examples: windows of documents, cut into a context that is translated and a prompt that is learnt from."""

import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hf_mot.data import iterate_documents
from hf_mot.data.windows import context_text, document_ids
from hf_mot.fit.windows import shuffled

MIN_CONTEXT, CONTEXT_LENGTH = 8, 64  # tokens, prefix included
COPIED_SPAN = (8, 32)  # tokens: long enough that most of them can be looked up once the first ones are read


@dataclass(frozen=True)
class TrainingExample:
    """
    A window of a document in the target's tokens.

    Args:
        document (`str`): Which window of which document, `documents:3/0`, for error messages.
        text (`str`): What the source reads: exactly the characters of the context.
        context_ids (`list[int]`): The context's ids, the target's prefix (BOS) included.
        prompt_ids (`list[int]`): The ids that follow. The first is fed and not scored: no logits stand before it.
    """

    document: str
    text: str
    context_ids: list[int]
    prompt_ids: list[int]


def iterate_examples(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prefix_ids: list[int],
    length: int = 128,
    context_length: int | tuple[int, int] = CONTEXT_LENGTH,
    shuffle_buffer: int = 50_000,
    seed: int = 0,
    copy_share: float = 0.0,
    name: str = "documents",
    counts: Counter | None = None,
) -> Iterator[TrainingExample]:
    """
    Streams examples: each document is tokenised once and cut into disjoint windows, which are shuffled within a
    buffer. The defaults are the paper's (E.1). The same documents and arguments give the same examples.

    Some prompts can be turned into a copy task (`copy_share`): a blank line and spans of the context, one after the
    other. Continuations alone teach little exact recall; these tokens must be looked up.

    Args:
        documents (`Iterable[str]` or a `datasets` dataset with a column `text`): Read once, in order.
        tokenizer (`PreTrainedTokenizerBase`): The target's fast tokenizer.
        prefix_ids (`list[int]`): The target's leading special tokens; empty for a model that has none.
        length (`int`, *optional*, defaults to 128): Tokens of an example with the longest context, prefix included.
        context_length (`int` or `tuple[int, int]`, *optional*, defaults to 64): Tokens of context, prefix included, or
            the least and the most of them, drawn anew for each window. The prompt has `length` less the most.
        shuffle_buffer (`int`, *optional*, defaults to 50,000): Windows held to be shuffled; 1 keeps their order.
        seed (`int`, *optional*, defaults to 0): Seed of order, lengths and copied spans.
        copy_share (`float`, *optional*, defaults to 0.0): Share of the examples that are copy tasks.
        name (`str`, *optional*, defaults to `"documents"`): What the documents are called in `document`.
        counts (`Counter`, *optional*): Counts the `documents` read, those `too_short` for a window, the windows
            skipped because their context would end within a character (`split_character`), `examples` and `copies`.

    Returns:
        `Iterator[TrainingExample]`

    Raises:
        ValueError: For impossible lengths or shares, at the call; while iterating, if no document gives an example.
    """
    low, high = context_length if isinstance(context_length, tuple | list) else (context_length, context_length)
    if not max(MIN_CONTEXT, len(prefix_ids) + 1) <= low <= high:
        raise ValueError(
            f"`context_length` must be {MIN_CONTEXT} tokens or more, beyond the target's prefix of {len(prefix_ids)}, "
            f"or a range of such numbers, got {context_length}."
        )
    if length < high + 2:
        raise ValueError(
            f"`length` must exceed the longest context by the prompt's tokens, at least 2, got {length} with "
            f"`context_length` {context_length}. Use {high + 2} or more."
        )
    if not 0 <= copy_share <= 1:
        raise ValueError(f"`copy_share` must be from 0 to 1, got {copy_share}.")
    if shuffle_buffer < 1:
        raise ValueError(f"`shuffle_buffer` must be 1 window or more, got {shuffle_buffer}.")
    counts = Counter() if counts is None else counts
    own = (low - len(prefix_ids), high - len(prefix_ids))
    windows = _cut(iterate_documents(documents), tokenizer, own, length - high, seed, name, counts)
    separator = tokenizer("\n\n", add_special_tokens=False)["input_ids"]

    def examples() -> Iterator[TrainingExample]:
        for document, ids, context in shuffled(windows, shuffle_buffer, random.Random(seed)):
            context_ids, prompt_ids = ids[:context].tolist(), ids[context:].tolist()
            text = context_text(tokenizer, context_ids)
            if text is None:
                counts["split_character"] += 1
                continue
            draw = random.Random(f"{seed}/copy/{document}")  # of its own: the share changes nothing else
            if draw.random() < copy_share:
                prompt_ids = _copies(context_ids, separator, len(prompt_ids), draw)
                counts["copies"] += 1
            counts["examples"] += 1
            yield TrainingExample(document, text, [*prefix_ids, *context_ids], prompt_ids)
        if not counts["examples"]:
            raise ValueError(
                f"`documents` holds no document of {low} + {length - high} target tokens: {counts['too_short']} of "
                f"{counts['documents']} are shorter. Give longer documents, or a smaller `length`."
            )

    return examples()


def _cut(
    documents: Iterable[str], tokenizer, own: tuple[int, int], prompt: int, seed: int, name: str, counts: Counter
) -> Iterator[tuple[str, array, int]]:
    """Disjoint windows of each document: (name, ids in 4 bytes each, how many of them are context)."""
    for number, document in enumerate(documents):
        draw = random.Random(f"{seed}/cut/{number}")
        ids = array("i", document_ids(tokenizer, document))
        counts["documents"] += 1
        counts["too_short"] += len(ids) < own[0] + prompt
        start = index = 0
        while (left := len(ids) - start - prompt) >= own[0]:
            context = draw.randint(own[0], min(own[1], left))
            yield f"{name}:{number}/{index}", ids[start : start + context + prompt], context
            start, index = start + context + prompt, index + 1


def _copies(context_ids: list[int], separator: list[int], length: int, draw: random.Random) -> list[int]:
    """`length` ids: spans of the context, each after a blank line."""
    ids: list[int] = []
    while len(ids) < length:
        span = min(draw.randint(*COPIED_SPAN), len(context_ids))
        start = draw.randint(0, len(context_ids) - span)
        ids += separator + context_ids[start : start + span]
    return ids[:length]
