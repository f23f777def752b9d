"""Texts of which one model reads the start: the place of the cut, and what is read after it."""

import pytest
import torch
from conftest import make_documents, make_tokenizer
from evaluation_pair import make_pair

from hf_mot.evaluation.answers import prompt_logits
from hf_mot.evaluation.batch import Models
from hf_mot.evaluation.requests import Request, compile_splits, read_requests, split_ids

TOKENIZER = make_tokenizer(merges=40)


def cut(text: str, split: str | None = None, tokenizer=TOKENIZER) -> tuple[str, str]:
    """Context and prompt; the target's ids are those of the whole text."""
    ids = tokenizer(text)["input_ids"]
    request = split_ids(ids, tokenizer, compile_splits(split))
    assert request.context_ids + request.prompt_ids == ids
    assert tokenizer.decode(request.context_ids, skip_special_tokens=True) == request.text
    return request.text, tokenizer.decode(request.prompt_ids)


@pytest.mark.parametrize(
    ("text", "context", "prompt"),
    [
        ("river\n\nstone\nQuestion: q?\nAnswer:", "river\n\nstone", "\nQuestion: q?\nAnswer:"),
        ("Q: a\nA: b\n\nriver\n\nQ: c\nA:", "Q: a\nA: b\n\nriver", "\n\nQ: c\nA:"),
        ("river\n\nstone\n\nlantern\nsilver", "river\n\nstone", "\n\nlantern\nsilver"),
        ("river\nstone\nlantern", "river\nstone", "\nlantern"),
    ],
)
def test_prompt_starts_at_the_last_question_else_paragraph_else_line(text, context, prompt):
    assert cut(text) == (context, prompt)


def test_rule_of_the_user_is_the_only_one():
    assert cut("river\nstone Ask: lantern\nsilver", r" Ask:") == ("river\nstone", " Ask: lantern\nsilver")
    assert cut("river\n\nstone", "Ask:") == ("", "<bos>river\n\nstone")


def test_token_across_the_place_belongs_to_the_prompt():
    tokenizer = make_tokenizer(merges=300)
    assert tokenizer.decode(tokenizer("river village")["input_ids"][-1]) == " village"  # else this tests nothing
    assert cut("river village", "village", tokenizer) == ("river", " village")


@pytest.mark.parametrize("text", ["river stone", "\nriver", "\n\nQuestion: river", "<eos>\nriver", ""])
def test_text_without_a_place_that_has_text_before_it_is_all_prompt(text):
    context, prompt = cut(text)
    assert not context and prompt == f"<bos>{text}"


def test_last_match_with_text_before_it_is_taken():
    assert cut("\nriver\nstone") == ("\nriver", "\nstone")


def test_split_that_is_no_regular_expression_is_refused():
    with pytest.raises(ValueError, match=r"`split` must be a regular expression, got '\(a': missing \)"):
        compile_splits("(a")


@pytest.fixture(scope="module")
def models():
    pair = make_pair()
    names = ("source", "target", "source_tokenizer", "target_tokenizer", "translator", "no_source")
    parts = {name: pair[name] for name in names}
    return Models(**parts, identity=None, prefix_ids=pair["translator"].config.target["prefix_ids"])


@pytest.fixture(scope="module")
def requests(models):
    """Three prompts about two contexts, and a text without context."""
    first, second = make_documents(2, words=8)
    texts = [f"{first}\nQ: river", f"{second[:30]}\nQ: stone lantern", f"{first}\nQ: a", "silver garden"]
    ids = [models.target_tokenizer(text)["input_ids"] for text in texts]
    return [split_ids(row, models.target_tokenizer, compile_splits(None)) for row in ids]


def logits(models, arm, requests, batch_size) -> list[torch.Tensor]:
    """What the target expects after each request."""
    found = [None] * len(requests)
    with torch.no_grad():
        for indices, cache in read_requests(models, arm, requests, batch_size):
            rows = [[requests[index].prompt_ids[-1], 0] for index in indices]
            for index, row in zip(indices, prompt_logits(models.target, cache, rows)[0], strict=True):
                found[index] = row[0]
    return found


@pytest.mark.parametrize("batch_size", [1, 3])
def test_native_reads_all_of_each_request(models, requests, batch_size):
    native, nothing = (logits(models, arm, requests, batch_size) for arm in ("native", "no_context"))
    for place, request in enumerate(requests):
        with torch.no_grad():
            ids = torch.tensor([request.context_ids + request.prompt_ids])
            expected = models.target(input_ids=ids).logits[0, -1]
        torch.testing.assert_close(native[place], expected, atol=1e-4, rtol=1e-4)
        without_context = (nothing[place] - expected).abs().max()
        assert without_context < 1e-4 if not request.context_ids else without_context > 0.1


def test_requests_that_share_a_context_share_one_handoff(models, requests, monkeypatch):
    read, read_source = [], models.translator.read_source

    def counted(texts, *args, **kwargs):
        read.extend(texts)
        return read_source(texts, *args, **kwargs)

    monkeypatch.setattr(models.translator, "read_source", counted)
    logits(models, "translated", requests, 1)
    assert sorted(read) == sorted({request.text for request in requests if request.context_ids})


def test_wrong_document_is_the_translation_of_the_next_context(models, requests):
    other = {requests[0].text: requests[1], requests[1].text: requests[0]}
    swapped = [
        Request(other[request.text].context_ids, other[request.text].text, request.prompt_ids)
        for request in requests[:3]
    ]
    for found, expected in zip(
        logits(models, "wrong_document", requests[:3], 2), logits(models, "translated", swapped, 2), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_wrong_document_needs_another_one(models, requests):
    with pytest.raises(ValueError, match=r"`arm` is wrong_document, which needs at least 2 contexts, got 1"):
        logits(models, "wrong_document", [requests[0], requests[2]], 2)


def test_texts_that_are_not_split_are_counted(models, requests, caplog):
    logits(models, "translated", requests, 2)
    assert "1 of 4 texts have no place at which `split` matches" in caplog.text
    caplog.clear()
    logits(models, "translated", requests[:3], 2)
    assert "split" not in caplog.text
