"""How a document is cut in the target's tokens, so that the source reads the context's characters and no others."""

from transformers import PreTrainedTokenizerBase

from hf_mot.alignment_mot import decode_with_spans


def document_ids(tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
    """The ids of a document as a whole, so that what follows a cut is what really follows. A special token that is
    only spelled out in it stays text."""
    return tokenizer(document, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def context_text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str | None:
    """The characters that ids of a document stand for; `None` where they begin or end within a character."""
    text, _ = decode_with_spans(tokenizer, ids)
    return None if not text or "\ufffd" in (text[0], text[-1]) else text
