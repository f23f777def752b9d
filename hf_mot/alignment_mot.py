"""Which source token carries the text of each target token, by character offsets of two fast tokenizers."""

import os
import re
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Span = tuple[int, int]

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# A UTF-8 character has at most four bytes: with this many tokens before it, a piece of one decodes as in the text.
CONTEXT_TOKENS = 4


@dataclass(frozen=True)
class Alignment:
    """
    The target tokens of a context, each with the source token whose states it is translated from.

    Args:
        target_ids (`list[int]`):
            The context in the target's tokens, without the target's prefix.
        source_index (`list[int]`):
            For each target token, an index into the source ids as they were given (prefix and specials counted).
        text (`str`):
            The text that both token sequences stand for.
    """

    target_ids: list[int]
    source_index: list[int]
    text: str


def align(
    source_tokenizer: PreTrainedTokenizerBase,
    source_ids: list[int],
    target_tokenizer: PreTrainedTokenizerBase,
    target_ids: list[int] | None = None,
    *,
    text: str | None = None,
    same_tokenizer: bool = False,
) -> Alignment:
    """
    Aligns one context, as the source has read it, with the tokens that the target has for the same text.

    Special tokens of the source are left out of the text and never chosen. Where the ids are cut inside a character,
    the text has U+FFFD in its place (one a token for byte-fallback tokens, else one a character), and the target is
    given that.

    Args:
        source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`):
            Fast tokenizers.
        source_ids (`list[int]`):
            One row without padding; it may begin with the source's prefix and hold special tokens anywhere.
        target_ids (`list[int]`, *optional*):
            The target's tokens for the same text, without its prefix. By default the text is tokenised; special
            tokens that are only spelled out in it stay text.
        text (`str`, *optional*):
            The text of `source_ids`, which may have leading spaces that decoding drops (ids that were tokenised in a
            longer document). By default the decoded ids, without cleanup.
        same_tokenizer (`bool`, *optional*, defaults to `False`):
            The two tokenizers are equal: the target gets the source's own tokens, each aligned with itself.

    Returns:
        [`Alignment`]

    Raises:
        ValueError: if a tokenizer is slow, the context has no text, or ids and text disagree.
    """
    _require_fast(source_tokenizer, "source_tokenizer")
    _require_fast(target_tokenizer, "target_tokenizer")
    for name, ids in (("source_input_ids", source_ids), ("target_input_ids", target_ids or [])):
        if ids and not 0 <= min(ids) <= max(ids) < 2**32:
            raise ValueError(f"`{name}` must be ids of its tokenizer, got {min(ids)} to {max(ids)}.")
    if text == "":
        raise ValueError("`text` must not be empty: there is no context to translate. Pass the text of the context.")
    text, source_spans = _read(source_tokenizer, source_ids, text, "source_input_ids", "`text`")
    if not text or all(span is None for span in source_spans):
        raise ValueError(
            "`source_input_ids` must hold text, but the context is empty: "
            f"{len(source_ids)} ids, none of which decodes to text. Pass the ids of a context."
        )
    content_ids = _content(source_ids, source_spans)
    if target_ids is not None:
        _, target_spans = _read(target_tokenizer, target_ids, text, "target_input_ids", "the context's text")
    elif same_tokenizer:
        target_ids, target_spans = content_ids, [span for span in source_spans if span is not None]
    else:
        target_ids, target_spans = tokenize_with_spans(target_tokenizer, text)
    if not target_ids:
        raise ValueError(
            "`source_input_ids` must hold text that `target_tokenizer` has tokens for, but it makes none of "
            f"{text!r}. Pass the ids of a context."
        )
    if same_tokenizer and content_ids == _content(target_ids, target_spans):
        source_spans, target_spans = _count(source_spans), _count(target_spans)
    return Alignment(list(target_ids), align_spans(source_spans, target_spans), text)


def align_spans(source_spans: list[Span | None], target_spans: list[Span | None]) -> list[int]:
    """
    For each target token the index of the source token that covers its last character.

    Where pieces of a character share it, the last of them is taken; where no source token covers it (or the target
    token is special), the nearest earlier source token with text, else the first. Linear in the number of tokens.

    Args:
        source_spans, target_spans (`list[tuple[int, int] | None]`):
            Half-open character spans in one text, in order; `None` for special tokens.
    """
    candidates = [(index, span[0]) for index, span in enumerate(source_spans) if span is not None]
    if not candidates:
        raise ValueError(
            f"`source_spans` must hold a token with text, but none of its {len(source_spans)} tokens has a span. "
            "Pass the spans of a context that is not empty."
        )
    source_index, position = [], 0
    for span in target_spans:
        if span is not None:
            while position + 1 < len(candidates) and candidates[position + 1][1] < span[1]:
                position += 1
        source_index.append(candidates[position][0])
    return source_index


def decode_with_spans(tokenizer: PreTrainedTokenizerBase, input_ids: list[int]) -> tuple[str, list[Span | None]]:
    """
    The text of ids, decoded without cleanup and without special tokens, and what each token covers in it.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            A fast tokenizer.
        input_ids (`list[int]`):
            One row without padding: canonical, generated, or cut out of a longer document.

    Returns:
        The text, and for each id a half-open span of characters, `None` if it is special. The spans are in order and
        cover the text without a gap. Pieces of one character all cover it; a token without text of its own shares
        the character before it, and is empty at the start of the text.
    """
    _require_fast(tokenizer, "tokenizer")
    return _read(tokenizer, input_ids, None, "input_ids", "text")


def tokenize_with_spans(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[Span]]:
    """
    The tokens of a context text, no special token added or recognised, and the spans they cover, without a gap.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            A fast tokenizer.
        text (`str`):
            The context. A special token spelled out in it (`"<bos>"`) is tokenised as the text it is.
    """
    _require_fast(tokenizer, "tokenizer")
    encoding = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True, verbose=False
    )
    input_ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    spans, end = [], 0
    for first, last in offsets:
        start = end - 1 if end and (first < end or last <= end) else end
        end = max(end, last)
        spans.append((start, end))
    if spans:
        spans[-1] = (spans[-1][0], len(text))
    # Offsets may leave out the spaces at a word's ends, or be empty ("▁" put before the text): decoding tells more.
    if spans != offsets:
        decoded = tokenizer.backend_tokenizer.decode(input_ids, skip_special_tokens=False)
        spans = _spans_by_decoding(tokenizer, input_ids, decoded, text) or spans
    return input_ids, spans


def _read(
    tokenizer: PreTrainedTokenizerBase, input_ids: list[int], text: str | None, ids_name: str, text_name: str
) -> tuple[str, list[Span | None]]:
    """Text and spans of ids; with `text`, spans in it, after a check that it is what the ids stand for."""
    special_ids = _special_ids(tokenizer, input_ids)
    content_ids = [token for token in input_ids if token not in special_ids]
    decoded = tokenizer.backend_tokenizer.decode(content_ids, skip_special_tokens=False)
    text = decoded if text is None else text
    spans = _spans_by_decoding(tokenizer, content_ids, decoded, text)
    if spans is None:
        # A normalizer or an unusual decoder: the ids have a place in the text if they are its own tokenization.
        spans = _spans_by_offsets(tokenizer, content_ids, text, special_ids)
    if spans is None and decoded.lstrip(" ") != text.lstrip(" "):
        raise ValueError(
            f"`{ids_name}` must decode to {text_name} (leading spaces aside), but {_difference(decoded, text)}. "
            f"Pass the ids of that text, or leave {'`text`' if text_name == '`text`' else f'`{ids_name}`'} out."
        )
    if spans is None:
        raise ValueError(
            f"`{ids_name}` must be the tokenizer's own ids for their text, because the decoder of "
            f"{type(tokenizer).__name__} does not work token by token, but they are others. "
            "Pass the ids that it gives for the whole context."
        )
    spans = iter(spans)
    return text, [None if token in special_ids else next(spans) for token in input_ids]


def _spans_by_decoding(
    tokenizer: PreTrainedTokenizerBase, input_ids: list[int], decoded: str, text: str
) -> list[Span] | None:
    """
    Spans in a text by what each token adds to the decoded ids, which may lack leading spaces of it.

    The ids need not be canonical: generated ids, and ids cut out of a longer document, have their spans too. A
    character counts where its first byte stands: cut there, it decodes to one U+FFFD, and the rest adds nothing.

    Returns:
        `None` if the text is another, or the decoder does not work token by token.
    """
    if decoded.lstrip(" ") != text.lstrip(" "):
        return None
    decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    alone = {token: decode([token]) for token in set(input_ids)}
    # Decoders treat the first token in their own way (they drop its space, say), so look at what a second one adds.
    added = {token: decode([token, token])[len(first) :] for token, first in alone.items()}
    byte_counts = _count_bytes(tokenizer, input_ids, alone)
    spans, end = [], 0
    for index, token in enumerate(input_ids):
        inside = False
        if index in byte_counts:
            count = byte_counts[index]
        elif index == 0 or REPLACEMENT in alone[token]:
            window = input_ids[max(index - CONTEXT_TOKENS, 0) : index + 1]
            before = decode(window[:-1])
            count = len(decode(window)) - len(before)
            inside = before.endswith(REPLACEMENT) and decoded[end - 1 : end] != REPLACEMENT
        else:
            count = len(added[token]) if decoded.startswith(added[token], end) else -1
        if count < 0:
            return None
        spans.append((end - 1 if end and (inside or not count) else end, end + count))
        end += count
    if end != len(decoded):
        return None
    shift = len(text) - len(decoded)
    spans = [(max(start + shift, 0), max(end + shift, 0)) for start, end in spans]
    return [(0, end) for _, end in spans[:1]] + spans[1:]


def _count_bytes(tokenizer: PreTrainedTokenizerBase, input_ids: list[int], alone: dict[int, str]) -> dict[int, int]:
    """
    For each byte-fallback token (`<0x0A>`), by index, the characters that it adds.

    Decoders join a run of them; where it is not UTF-8, each becomes one U+FFFD.
    """
    values, counts = {}, {}
    for token, character in alone.items():
        name = len(character) <= 1 and tokenizer.backend_tokenizer.id_to_token(token)
        if name and BYTE_TOKEN.fullmatch(name):
            values[token] = int(name[3:5], 16)
    for is_byte, run in groupby(enumerate(input_ids), key=lambda pair: pair[1] in values):
        if is_byte:
            indices, tokens = zip(*run, strict=True)
            run_bytes = bytes(values[token] for token in tokens)
            whole = run_bytes.decode("utf-8", "ignore").encode() == run_bytes
            counts |= {i: int(not whole or value & 0xC0 != 0x80) for i, value in zip(indices, run_bytes, strict=True)}
            if whole and indices[0] == 0 and not alone[tokens[0]]:
                counts[0] = 0  # a space that is dropped at the start of a text
    return counts


def _spans_by_offsets(
    tokenizer: PreTrainedTokenizerBase, input_ids: list[int], text: str, special_ids: set[int]
) -> list[Span] | None:
    """Spans of the canonical tokenization of a text, `None` if the ids are another one."""
    canonical = zip(*tokenize_with_spans(tokenizer, text), strict=True)
    # The unknown token is special: it stands for no text, though it has a place in this one.
    canonical = [(token, span) for token, span in canonical if token not in special_ids]
    return [span for _, span in canonical] if input_ids == [token for token, _ in canonical] else None


def _special_ids(tokenizer: PreTrainedTokenizerBase, input_ids: list[int]) -> set[int]:
    """The tokenizer's named special ids, and those among the given ids that its decoder can be told to skip."""
    decode = tokenizer.backend_tokenizer.decode
    # Not from `added_tokens_decoder`, which takes longer to build than a whole alignment where thousands are added.
    silent = [token for token in set(input_ids) if not decode([token], skip_special_tokens=True)]
    return set(tokenizer.all_special_ids).union(t for t in silent if decode([t], skip_special_tokens=False))


def _content(input_ids: list[int], spans: list[Span | None]) -> list[int]:
    return [token for token, span in zip(input_ids, spans, strict=True) if span is not None]


def _count(spans: list[Span | None]) -> list[Span | None]:
    """Spans by the number of the token instead of its characters."""
    numbers = iter(range(len(spans)))
    return [None if span is None else (number := next(numbers), number + 1) for span in spans]


def _difference(decoded: str, text: str) -> str:
    """Where two texts first differ, leading spaces aside."""
    ours, theirs = decoded.lstrip(" "), text.lstrip(" ")
    at = len(os.path.commonprefix([ours, theirs]))
    return f"at character {at} they have {ours[at : at + 20]!r} where the text has {theirs[at : at + 20]!r}"


def _require_fast(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"`{name}` must be a fast tokenizer, because alignment needs character offsets, but "
            f"`{type(tokenizer).__name__}` is not one. Load it by `AutoTokenizer.from_pretrained`, or wrap its "
            "`tokenizer.json` in a `PreTrainedTokenizerFast`."
        )
