"""Windows of context-NLL: what is read from a document, and what is scored after it."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from hf_mot.data.windows import context_text, document_ids

# y_1 .. y_65: y_1 is fed and not scored (in `no_context` nothing could predict it), so 64 tokens are.
CONTINUATION_TOKENS = 65
MIN_CONTEXT = 8


@dataclass(frozen=True)
class Window:
    """
    A stretch of one document, cut in two.

    Args:
        document (`int`): Index of the document.
        text (`str`): The context's characters, without those of its special tokens: all that a source reads.
        context_ids (`list[int]`): `context_length` ids of the target, its prefix (BOS) included.
        continuation_ids (`list[int]`): The 65 ids that follow.
        index (`int`, *optional*, defaults to 0): Number of the window within its document.
    """

    document: int
    text: str
    context_ids: list[int]
    continuation_ids: list[int]
    index: int = 0

    @property
    def id(self) -> str:
        return f"{self.document}/{self.index}"

    @property
    def group(self) -> int:
        return self.document


@dataclass
class Windows:
    """Windows in seeded order, with the counts of the documents (or windows) that gave none."""

    windows: list[Window] = field(default_factory=list)
    too_short: int = 0
    split_character: int = 0
    too_long_for_source: int = 0

    def __len__(self) -> int:
        return len(self.windows)


def check_context_length(context_length: int, max_positions: int | None) -> None:
    """
    Refuses a context that cannot be measured on this target.

    Args:
        context_length (`int`): Tokens of context, the target's prefix included.
        max_positions (`int`, *optional*): The target's positions; `None` if they have no end.

    Raises:
        ValueError: If it is not an integer from 8 up to the target's positions less the 65 of the continuation.
    """
    if not isinstance(context_length, int) or isinstance(context_length, bool) or context_length < MIN_CONTEXT:
        raise ValueError(
            f"`context_length` must be an integer of at least {MIN_CONTEXT} tokens, got {context_length!r}."
        )
    if max_positions is not None and context_length > max_positions - CONTINUATION_TOKENS:
        raise ValueError(
            f"`context_length` must leave {CONTINUATION_TOKENS} of the target's {max_positions} positions for the "
            f"continuation, got {context_length}. Use at most {max_positions - CONTINUATION_TOKENS}."
        )


def cut_windows(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prefix_ids: list[int],
    context_length: int,
    limit: int | None = None,
    seed: int = 0,
    per_document: int = 1,
    fits: Callable[[str], bool] = bool,
) -> Windows:
    """
    One window at the start of each document, or several disjoint ones in a row, in an order drawn from `seed`.

    Each document is tokenised once, as a whole, so that the continuation is what really follows the context. Documents
    that are too short are counted and skipped, and so are those whose context is more than the source can read, and
    the rare ones whose context would end within a character.

    Args:
        documents (`Iterable[str]`): The documents.
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        prefix_ids (`list[int]`): The target's leading special tokens; empty for a model that has none.
        context_length (`int`): Tokens of context, prefix included.
        limit (`int`, *optional*): Stop at this many windows. All documents by default.
        seed (`int`, *optional*, defaults to 0): Seed of the order.
        per_document (`int`, *optional*, defaults to 1): Windows of a document, at most; each document gives its first
            before any gives its second.
        fits (`Callable`, *optional*): Whether the source has positions for a context's text.

    Returns:
        `Windows`: The windows; the counts cover the documents looked at before `limit` was reached.

    Raises:
        ValueError: If no document gives a window.
    """
    documents = list(documents)
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)

    result = Windows()
    own = context_length - len(prefix_ids)  # tokens that come from the document
    stride = own + CONTINUATION_TOKENS
    for number in range(per_document):
        for index in list(order):
            if limit is not None and len(result) == limit:
                return result
            ids = document_ids(tokenizer, documents[index])[number * stride :]
            if len(ids) < stride:
                result.too_short += number == 0
                order.remove(index)
                continue
            text = context_text(tokenizer, ids[:own])
            if text is None:
                result.split_character += 1
                continue
            if not fits(text):
                result.too_long_for_source += 1
                continue
            result.windows.append(Window(index, text, [*prefix_ids, *ids[:own]], ids[own:stride], number))
    if not result.windows:
        raise ValueError(
            f"`documents` holds no document of {context_length} + {CONTINUATION_TOKENS} target tokens: "
            f"{result.too_short} of {len(documents)} are shorter, the context of {result.split_character} would end "
            f"within a character, and the source has too few positions for {result.too_long_for_source}. Give longer "
            "documents or a smaller `context_length`."
        )
    return result


def joined_window(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, prefix_ids: list[int], context_length: int
) -> Window:
    """
    A window of any length, over documents that may each be shorter, to measure cost on.

    Args:
        documents, tokenizer, prefix_ids, context_length: As in [`cut_windows`].

    Raises:
        ValueError: If all documents together are shorter.
    """
    text = "\n\n".join(documents)[: 64 * context_length]  # no need to tokenise a whole corpus
    # From four places, since the cut may fall within a character.
    starts = [text[start:] for start in range(4)]
    try:
        found = cut_windows(starts, tokenizer, prefix_ids=prefix_ids, context_length=context_length, limit=1)
    except ValueError as error:
        raise ValueError(
            f"`cost_context_length` is {context_length} tokens, more than all documents hold together. Give more text "
            "or a smaller length."
        ) from error
    return found.windows[0]
