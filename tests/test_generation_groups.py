"""Prompts of unequal length on a target with sliding windows: rows are generated in groups, and given back as one."""

import re

import pytest
import torch
from conftest import make_documents, make_own
from test_generation_modes import LONG_PROMPT, NEW, PROMPT, SECOND, history, ids_of, native, prompt_of, translated
from transformers import GenerationConfig, StoppingCriteriaList

from hf_mot import attach
from hf_mot.compat_mot import output_cache

PROMPTS = [PROMPT, LONG_PROMPT, PROMPT]
OPTIONS = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture
def own():
    own = make_own("gemma3")
    attach(own["target"]).generation_config.pad_token_id = None
    return own


def middle_row_ends_first(own):
    """Texts, what native generation says after each, and the place of an id that only the second says, once."""
    for seed in range(30):
        texts = make_documents(3, 12, seed)
        said = [native(own, history(own, text, row)) for text, row in zip(texts, PROMPTS, strict=True)]
        only = [i for i in range(2, NEW - 2) if said[1].index(said[1][i]) == i and said[1][i] not in said[0] + said[2]]
        if only:
            return texts, said, only[0]
    raise AssertionError("no seed gives such texts")


@pytest.mark.parametrize("pad_in", ["call", "config", "model", "nothing but eos"])
def test_rows_that_end_earlier_are_padded(own, pad_in):
    texts, said, end = middle_row_ends_first(own)
    eos = said[1][end]
    never = min(set(range(3, 100)) - {token for row in said for token in row} - {eos})
    # As within one generate call, it is the first end-of-sequence id that stands in for a pad.
    pad, eos_ids = (eos, [eos, never]) if pad_in == "nothing but eos" else (never, [eos])
    options = {**OPTIONS, "eos_token_id": eos_ids}
    if pad_in == "call":
        options["pad_token_id"] = pad
    elif pad_in == "config":
        options = {"generation_config": GenerationConfig(**options, pad_token_id=pad)}
    elif pad_in == "model":
        own["target"].generation_config.pad_token_id = pad
    prompt = prompt_of(own, *PROMPTS)
    out = own["target"].generate(**prompt, past_key_values=translated(own, texts), **options)
    expected = [said[0], said[1][: end + 1] + [pad] * (NEW - end - 1), said[2]]
    assert eos > never
    assert out[:, prompt["input_ids"].shape[1] :].tolist() == expected


def test_rows_that_a_criterion_stops_earlier_are_padded_with_zeros_where_no_pad_is_known(own):
    prompt = prompt_of(own, PROMPT, LONG_PROMPT)
    width = prompt["input_ids"].shape[1]
    texts, criterion = (
        make_documents(2, 12),
        StoppingCriteriaList([lambda ids, scores: ids[:, -1] * 0 == ids.shape[1] - width - 2]),
    )
    out = own["target"].generate(
        **prompt, past_key_values=translated(own, texts), stopping_criteria=criterion, **OPTIONS
    )
    said = [native(own, history(own, text, row)) for text, row in zip(texts, (PROMPT, LONG_PROMPT), strict=True)]
    assert out[0, width:].tolist() == said[0] and out[1, width:].tolist() == said[1][:3] + [0] * (NEW - 3)


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_attentions", "output_hidden_states"])
def test_details_of_grouped_rows_are_refused_by_name(own, name):
    own["target"].set_attn_implementation("eager")  # the others give no attentions
    message = (
        f"`{name}` is not available for prompts of unequal length on a target with sliding-window layers, where rows "
        "are generated in groups. Generate row by row."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        own["target"].generate(
            **prompt_of(own, PROMPT, LONG_PROMPT),
            past_key_values=translated(own, make_documents(2, 20, 3)),
            max_new_tokens=2,
            return_dict_in_generate=True,
            **{name: True},
        )


@pytest.mark.parametrize(("family", "prompts"), [("llama", [PROMPT, LONG_PROMPT]), ("gemma3", [PROMPT, PROMPT])])
def test_details_of_rows_that_need_no_groups_are_given(family, prompts):
    own = make_own(family)
    out = attach(own["target"]).generate(
        **prompt_of(own, *prompts),
        past_key_values=translated(own, make_documents(2, 20, 3)),
        return_dict_in_generate=True,
        output_scores=True,
        **OPTIONS,
    )
    assert [scores.argmax(-1).tolist() for scores in out.scores] == out.sequences[:, -NEW:].T.tolist()


def test_prompts_of_three_lengths_equal_row_by_row(own):
    texts, prompts = make_documents(4, 20, 3), [PROMPT, LONG_PROMPT, SECOND, PROMPT]
    out = own["target"].generate(**prompt_of(own, *prompts), past_key_values=translated(own, texts), **OPTIONS)
    for row in range(4):
        assert out[row, -NEW:].tolist() == native(own, history(own, texts[row], prompts[row]))


@pytest.mark.parametrize("first", [0, 1], ids=["named first", "named last"])
def test_second_turn_after_either_of_two_ends_of_sequence(own, first):
    texts, said, end = middle_row_ends_first(own)
    never = min(set(range(3, 100)) - {token for row in said for token in row})
    out = own["target"].generate(
        **prompt_of(own, *PROMPTS),
        past_key_values=translated(own, texts),
        return_dict_in_generate=True,
        eos_token_id=[never, said[1][end]][:: -1 if first == 0 else 1],
        pad_token_id=own["target_tokenizer"].pad_token_id,
        **OPTIONS,
    )
    again = own["target"].generate(
        **prompt_of(own, SECOND, SECOND, SECOND), past_key_values=output_cache(out), **OPTIONS
    )
    said[1] = said[1][: end + 1]
    for row in range(3):
        told = history(own, texts[row], PROMPTS[row]) + said[row] + ids_of(own, SECOND)
        assert again[row, -NEW:].tolist() == native(own, told)


@pytest.mark.parametrize("prompts", [PROMPTS, [PROMPT] * 3], ids=["unequal", "equal"])
def test_second_turn_of_several_sampled_sequences_each(own, prompts):
    texts, prompt = make_documents(3, 12), prompt_of(own, *prompts)
    torch.manual_seed(3)
    out = own["target"].generate(
        **prompt,
        past_key_values=translated(own, texts),
        max_new_tokens=NEW,
        do_sample=True,
        num_return_sequences=2,
        return_dict_in_generate=True,
    )
    said = out.sequences[:, prompt["input_ids"].shape[1] :].tolist()
    assert len({tuple(row) for row in said}) == 6
    again = own["target"].generate(**prompt_of(own, *[SECOND] * 6), past_key_values=output_cache(out), **OPTIONS)
    for row in range(6):
        told = history(own, texts[row // 2], prompts[row // 2]) + said[row] + ids_of(own, SECOND)
        assert again[row, -NEW:].tolist() == native(own, told)


@pytest.mark.parametrize("prompts", [[PROMPT, LONG_PROMPT], [PROMPT] * 2], ids=["unequal", "equal"])
def test_two_beams_give_native_ids_and_no_cache_of_the_beams(own, prompts):
    texts, options = make_documents(2, 12), {**OPTIONS, "num_beams": 2}
    out = own["target"].generate(
        **prompt_of(own, *prompts),
        past_key_values=translated(own, texts),
        return_dict_in_generate=True,
        **options,
    )
    for row in range(2):
        assert out.sequences[row, -NEW:].tolist() == native(own, history(own, texts[row], prompts[row]), **options)
    assert output_cache(out) is None
    if prompts[0] != prompts[1]:
        assert out.beam_indices is None  # the beams of one group say nothing about the whole
