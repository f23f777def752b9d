"""Calibration windows: pieces of documents of 128 to 2,048 tokens, batched by length."""

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

WINDOW_TOKENS = (128, 256, 512, 1024, 2048)
SHUFFLE_BUFFER = 10_000  # documents, and windows
T = TypeVar("T")


class Window(NamedTuple):
    """A piece of a document: its text, nominal length, own tokens and number in the stream."""

    text: str
    length: int
    tokens: int
    number: int

    @property
    def key(self) -> int:
        """What it is known by: its text and number in 63 bits."""
        return int.from_bytes(hashlib.sha256(f"{self.number}\n{self.text}".encode()).digest()[:8]) >> 1


def shuffled(items: Iterable[T], buffer: int, rng: random.Random) -> Iterator[T]:
    """Streams `items` in random order, holding at most `buffer` of them."""
    held: list[T] = []
    for item in items:
        if len(held) < buffer:
            held.append(item)
            continue
        index = rng.randrange(buffer)
        held[index], item = item, held[index]
        yield item
    rng.shuffle(held)
    yield from held


def characters_per_token(documents: list[str], tokenizer: PreTrainedTokenizerBase) -> float:
    """Mean characters of a token in `documents`."""
    tokens = sum(len(ids) for ids in tokenizer(documents, add_special_tokens=False)["input_ids"])
    return sum(map(len, documents)) / max(1, tokens)


def calibration_windows(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    token_chars: float,
    max_window: int,
    max_tokens: int,
    rng: random.Random,
) -> Iterator[Window]:
    """
    Cuts documents into windows whose lengths are drawn so that each length in `WINDOW_TOKENS` gets about as many
    tokens, where the documents are long enough, and streams them in random order.

    Args:
        documents (`Iterable[str]`): Documents, read once, in order.
        tokenizer (`PreTrainedTokenizerBase`): Counts the tokens.
        token_chars (`float`): Characters a token; a window is cut at the white space before its length is reached.
        max_window (`int`): Longest window that both models can read, in tokens.
        max_tokens (`int`): Ends before the window that would exceed it, but not before the first.
        rng (`random.Random`): Draws the lengths and the order.
    """
    lengths = [length for length in WINDOW_TOKENS if length <= max_window] or [max_window]
    total = 0
    pieces = shuffled(_cut(documents, token_chars, lengths, rng), SHUFFLE_BUFFER, rng)
    for number, (length, text) in enumerate(pieces):
        tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        if total and total + tokens > max_tokens:
            return
        total += tokens
        yield Window(text, length, tokens, number)


def batched(windows: Iterable[Window], batch_tokens: int) -> Iterator[list[Window]]:
    """Batches of windows of one length, of about `batch_tokens` tokens."""
    waiting: dict[int, list[Window]] = defaultdict(list)
    for window in windows:
        waiting[window.length].append(window)
        if len(waiting[window.length]) * window.length >= batch_tokens:
            yield waiting.pop(window.length)
    yield from waiting.values()


def _cut(documents, token_chars, lengths, rng) -> Iterator[tuple[int, str]]:
    weights = [1 / length for length in lengths]
    for document in documents:
        start = 0
        while len(document) - start >= lengths[0] * token_chars or (start == 0 and document.strip()):
            fitting = [length for length in lengths if length * token_chars <= len(document) - start] or lengths[:1]
            length = rng.choices(fitting, weights[: len(fitting)])[0]
            end = start + int(length * token_chars)
            if end < len(document):
                cut = document.rfind(" ", start + (end - start) // 2, end)
                end = end if cut < 0 else cut
            if document[start:end].strip():
                yield length, document[start:end]
            start = end
