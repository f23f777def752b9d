"""Training examples: disjoint, deterministic, the source reads the context's characters, copies can be looked up."""

import inspect
from collections import Counter

import pytest
from conftest import make_documents, make_tokenizer

from hf_mot.training.examples import COPIED_SPAN, iterate_examples

TOKENIZER = make_tokenizer(merges=40)
PREFIX = [TOKENIZER.bos_token_id]
SMALL = {"prefix_ids": PREFIX, "length": 32, "context_length": 16, "shuffle_buffer": 20}


def examples(documents=None, **kwargs):
    documents = make_documents(12) if documents is None else documents
    return list(iterate_examples(documents, TOKENIZER, **{**SMALL, **kwargs}))


def test_defaults_are_those_of_the_paper():
    defaults = {name: p.default for name, p in inspect.signature(iterate_examples).parameters.items()}
    assert (defaults["length"], defaults["context_length"], defaults["shuffle_buffer"]) == (128, 64, 50_000)
    assert defaults["copy_share"] == 0


def test_same_seed_gives_the_same_examples_and_another_one_another_order():
    first, again, other = examples(), examples(), examples(seed=1)
    assert first == again
    assert first != other
    assert sorted(e.document for e in first) == sorted(e.document for e in other)


def test_examples_of_a_document_are_disjoint_and_in_place():
    document = "river stone lantern village winter market " * 20  # no character of several tokens
    ids = TOKENIZER(document, add_special_tokens=False)["input_ids"]
    found = examples([document], shuffle_buffer=1)
    assert len(found) == len(ids) // 31 > 3
    joined = [token for e in found for token in [*e.context_ids[1:], *e.prompt_ids]]
    assert joined == ids[: len(joined)]
    assert [e.document for e in found] == [f"documents:0/{n}" for n in range(len(found))]


def test_text_is_exactly_what_the_context_ids_stand_for():
    for example in examples():
        assert example.context_ids[0] == TOKENIZER.bos_token_id
        assert (len(example.context_ids), len(example.prompt_ids)) == (16, 16)
        assert example.text == TOKENIZER.decode(example.context_ids[1:])


def test_contexts_of_a_range_take_every_length_and_leave_the_prompt_alone():
    found = examples(make_documents(40), context_length=(8, 12), length=20)
    assert {len(e.context_ids) for e in found} == {8, 9, 10, 11, 12}
    assert {len(e.prompt_ids) for e in found} == {8}


def test_copy_prompts_can_be_looked_up_in_the_context():
    separator = TOKENIZER("\n\n", add_special_tokens=False)["input_ids"]
    found = examples(make_documents(12, words=200), copy_share=1.0, length=140, context_length=70)
    assert found
    for example in found:
        context = example.context_ids[1:]
        text, rest = ",".join(map(str, context)), example.prompt_ids
        spans = []
        while rest:
            assert rest[: len(separator)] == separator[: len(rest)]
            rest = rest[len(separator) :]
            own = next((n for n in range(len(rest)) if rest[n : n + len(separator)] == separator), len(rest))
            spans.append(rest[:own])
            rest = rest[own:]
        assert len(example.prompt_ids) == 70
        while spans[-1] and spans[-1][-1] == separator[0]:  # cut off within the next separator
            spans[-1].pop()
        assert all(",".join(map(str, span)) in text for span in spans)
        assert all(COPIED_SPAN[0] <= len(span) <= COPIED_SPAN[1] for span in spans[:-1])


def test_copy_share_is_kept_and_changes_nothing_else():
    counts = Counter()
    documents = make_documents(150)
    plain, mixed = examples(documents), examples(documents, copy_share=0.3, counts=counts)
    assert [e.document for e in plain] == [e.document for e in mixed]
    assert [e.context_ids for e in plain] == [e.context_ids for e in mixed]
    changed = sum(a.prompt_ids != b.prompt_ids for a, b in zip(plain, mixed, strict=True))
    assert changed == counts["copies"]
    assert 0.2 < changed / len(plain) < 0.4


def test_what_is_skipped_is_counted():
    counts = Counter()
    found = examples(["short", *make_documents(3), "🙂" * 40], counts=counts)
    assert counts["documents"] == 5
    assert counts["too_short"] == 1
    assert counts["examples"] == len(found) > 0
    assert counts["split_character"] > 0  # one emoji is several byte tokens here
    assert not any("\ufffd" in e.text for e in found)


def test_special_tokens_that_are_spelled_out_stay_text():
    (example,) = examples(["<eos>" + make_documents(1, words=10)[0]], length=24, context_length=12)[:1]
    assert TOKENIZER.eos_token_id not in example.context_ids
    assert example.text.startswith("<eos>")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"context_length": 4}, "`context_length` must be 8 tokens or more.*got 4"),
        ({"context_length": (16, 10)}, "`context_length` must be .* or a range"),
        ({"length": 17}, "`length` must exceed the longest context.*got 17.*Use 18 or more"),
        ({"copy_share": 1.5}, "`copy_share` must be from 0 to 1, got 1.5"),
        ({"shuffle_buffer": 0}, "`shuffle_buffer` must be 1 window or more, got 0"),
    ],
)
def test_impossible_settings_are_refused_at_the_call(kwargs, message):
    with pytest.raises(ValueError, match=message):
        iterate_examples(make_documents(2), TOKENIZER, **{**SMALL, **kwargs})


def test_no_example_at_all_is_an_error():
    with pytest.raises(ValueError, match="holds no document of 16 \\+ 16 target tokens: 2 of 2 are shorter"):
        examples(["short", "shorter"])
