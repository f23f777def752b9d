"""`target.generate(**prompt, past_key_values=translated)` equals native generation on context and prompt."""

import copy
import io
import pickle
import re
import warnings

import pytest
import torch
from conftest import FAMILIES, make_documents, make_own
from transformers import DynamicCache, GenerationConfig

from hf_mot import MoTModel, attach, detach
from hf_mot.compat_mot import cache_argument, output_cache
from hf_mot.generation_mot import is_attached

NEW = 8
PROMPT, SECOND = " the captain wrote", " and the bridge said"


@pytest.fixture(params=FAMILIES)
def own(request):
    return make_own(request.param)


def translated(own, text):
    return MoTModel.identity(own["target"], own["target_tokenizer"]).handoff(text, **own)


def ids_of(own, text, bos=False):
    tokenizer = own["target_tokenizer"]
    return [tokenizer.bos_token_id] * bos + tokenizer(text, add_special_tokens=False)["input_ids"]


def native(own, ids, **kwargs):
    """New ids of plain generation on one row."""
    ids = torch.tensor([ids])
    out = detach(own["target"]).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **kwargs
    )
    return out[0, ids.shape[1] :].tolist()


def prompt_of(own, text):
    return own["target_tokenizer"](text, return_tensors="pt", return_token_type_ids=False)


@pytest.mark.parametrize("words", [4, 40], ids=["short", "beyond the window"])
def test_greedy_equals_native(own, words):
    text = make_documents(1, words)[0]
    cache = translated(own, text)
    prompt = prompt_of(own, PROMPT)
    assert prompt["input_ids"][0, 0] == own["target_tokenizer"].bos_token_id
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = own["target"].generate(**prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        again = own["target"].generate(**prompt, cache=cache, max_new_tokens=NEW, do_sample=False)
    length = prompt["input_ids"].shape[1]
    assert torch.equal(out[:, :length], prompt["input_ids"])
    expected = native(own, ids_of(own, text, bos=True) + ids_of(own, PROMPT))
    assert out[0, length:].tolist() == expected == again[0, length:].tolist()
    assert expected != native(own, ids_of(own, PROMPT, bos=True))  # context matters


def test_sampling_equals_native_sampling(own):
    text = make_documents(1, 12)[0]
    cache = translated(own, text)
    prompt = prompt_of(own, PROMPT)
    torch.manual_seed(7)
    ours = own["target"].generate(**prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=True, top_k=5)
    ids = torch.tensor([ids_of(own, text, bos=True) + ids_of(own, PROMPT)])
    torch.manual_seed(7)
    theirs = own["target"].generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=True, top_k=5
    )
    assert ours[0, -NEW:].tolist() == theirs[0, -NEW:].tolist()


def test_left_padded_contexts_equal_row_by_row(own):
    texts = make_documents(1, 5, 1) + make_documents(1, 30, 2)
    cache = translated(own, texts)
    prompt = own["target_tokenizer"]([PROMPT, PROMPT], return_tensors="pt", return_token_type_ids=False)
    out = own["target"].generate(**prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    for row, text in enumerate(texts):
        assert out[row, -NEW:].tolist() == native(own, ids_of(own, text, bos=True) + ids_of(own, PROMPT))


def test_unequal_prompts(own):
    texts, prompts = make_documents(2, 12, 3), [PROMPT, PROMPT + " a long letter to the village"]
    cache = translated(own, texts)
    tokenizer = own["target_tokenizer"]
    prompt = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    out = own["target"].generate(**prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    for row in range(2):
        expected = native(own, ids_of(own, texts[row], bos=True) + ids_of(own, prompts[row]))
        assert out[row, -NEW:].tolist() == expected


def test_second_turn_on_the_returned_cache(own):
    text = make_documents(1, 25)[0]
    options = {"max_new_tokens": NEW, "do_sample": False}
    generate = attach(own["target"]).generate
    prompt = prompt_of(own, PROMPT)
    first = generate(**prompt, past_key_values=translated(own, text), return_dict_in_generate=True, **options)
    second = prompt_of(own, SECOND)
    out = generate(**second, past_key_values=output_cache(first), **options)
    assert torch.equal(out[:, : second["input_ids"].shape[1]], second["input_ids"])
    said = first.sequences[0, -NEW:].tolist()
    history = ids_of(own, text, bos=True) + ids_of(own, PROMPT) + said + ids_of(own, SECOND)
    assert out[0, -NEW:].tolist() == native(own, history)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_second_turn_after_a_row_that_ended_early(family):
    own = make_own(family)
    for seed in range(20):  # two texts after which the first row says something that the second never does
        texts = make_documents(1, 9, seed) + make_documents(1, 16, seed + 100)
        expected = [native(own, ids_of(own, text, bos=True) + ids_of(own, PROMPT)) for text in texts]
        only = [i for i in range(NEW - 1) if expected[0][i] not in expected[0][:i] + expected[1]]
        if only:
            break
    end = only[-1]
    eos = expected[0][end]  # the first row ends here
    prompt = own["target_tokenizer"]([PROMPT] * 2, return_tensors="pt", return_token_type_ids=False)
    pad = own["target_tokenizer"].pad_token_id
    options = {"max_new_tokens": NEW, "do_sample": False}
    cache = translated(own, texts)
    first = own["target"].generate(
        **prompt, past_key_values=cache, eos_token_id=eos, pad_token_id=pad, return_dict_in_generate=True, **options
    )
    assert first.sequences[0, -NEW:].tolist() == expected[0][: end + 1] + [pad] * (NEW - end - 1)
    second = own["target_tokenizer"]([SECOND] * 2, return_tensors="pt", return_token_type_ids=False)
    out = own["target"].generate(**second, past_key_values=output_cache(first), **options)
    for row, text in enumerate(texts):
        said = expected[row][: end + 1] if row == 0 else expected[row]
        history = ids_of(own, text, bos=True) + ids_of(own, PROMPT) + said + ids_of(own, SECOND)
        assert out[row, -NEW:].tolist() == native(own, history)


def test_translated_cache_is_read_only_until_forked():
    own = make_own("llama")
    cache = translated(own, make_documents(1, 6)[0])
    ids = torch.tensor([ids_of(own, PROMPT)])
    with pytest.raises(RuntimeError, match=r"call attach\(target\)"):
        own["target"](ids, **{cache_argument(own["target"]): cache})
    length = cache.get_seq_length()
    own["target"](ids, **{cache_argument(own["target"]): cache.fork()})
    assert cache.get_seq_length() == length


def test_plain_calls_are_not_touched():
    own = make_own("llama")
    ids = ids_of(own, make_documents(1, 6)[0], bos=True)
    before = native(own, ids)
    attach(own["target"])
    tensor, cache = torch.tensor([ids]), DynamicCache()
    after = own["target"].generate(
        tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=NEW, do_sample=False, cache=cache
    )
    assert after[0, len(ids) :].tolist() == before
    assert cache.get_seq_length() == len(ids) + NEW - 1


def test_attach_is_idempotent_and_undone_by_detach():
    own = make_own("llama")
    target = own["target"]
    attach(attach(target))
    assert is_attached(target)
    detach(target)
    assert not is_attached(target) and "generate" not in vars(target)


def test_attach_survives_deepcopy_and_pickle():
    own = make_own("llama")
    cache = translated(own, make_documents(1, 6)[0])
    buffer = io.BytesIO()
    pickle.dump(own["target"], buffer)
    buffer.seek(0)
    prompt = prompt_of(own, PROMPT)
    expected = own["target"].generate(**prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    for other in (copy.deepcopy(own["target"]), pickle.load(buffer)):
        assert is_attached(other)
        assert other.generate.args[0] is other
        ours = other.generate(**prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(ours, expected)


def refused(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("rows", [[""], [PROMPT, ""]], ids=["alone", "beside another"])
def test_prompt_of_nothing_but_bos_is_refused(rows):
    own = make_own("llama")
    cache = translated(own, make_documents(len(rows), 6))
    prompt = own["target_tokenizer"](rows, return_tensors="pt", padding=True, return_token_type_ids=False)
    with refused(
        "`input_ids` has a row without any token besides BOS: there is nothing to continue from. Move the last words "
        "of the context into the prompt."
    ):
        own["target"].generate(**prompt, past_key_values=cache, max_new_tokens=NEW)


def test_prompt_without_bos_is_continued_as_it_is(own):
    text = make_documents(1, 12)[0]
    ids = torch.tensor([ids_of(own, PROMPT)])
    out = attach(own["target"]).generate(
        ids, past_key_values=translated(own, text), max_new_tokens=NEW, do_sample=False
    )
    assert out[0].tolist() == ids[0].tolist() + native(own, ids_of(own, text, bos=True) + ids[0].tolist())


def test_mask_over_context_and_prompt_is_as_good_as_one_over_the_prompt(own):
    cache = translated(own, make_documents(2, 12, 3))
    prompts = [PROMPT, PROMPT + " a letter"]
    prompt = own["target_tokenizer"](prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    expected = own["target"].generate(**prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    prompt["attention_mask"] = torch.cat([cache.prefix_mask, prompt["attention_mask"]], dim=1)
    out = own["target"].generate(**prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, expected)


def test_positions_are_those_after_the_context_whatever_is_passed(own):
    cache, prompt = translated(own, make_documents(1, 12)[0]), prompt_of(own, PROMPT)
    options = {"past_key_values": cache, "max_new_tokens": NEW, "do_sample": False}
    expected = attach(own["target"]).generate(**prompt, **options)
    positions = torch.arange(prompt["input_ids"].shape[1])[None]  # as a collator makes them, from 0
    assert torch.equal(own["target"].generate(**prompt, position_ids=positions, **options), expected)


def test_missing_prompt_is_refused():
    own = make_own("llama")
    cache = translated(own, "a letter")
    with refused("`input_ids` is required with a TranslatedCache: pass the prompt that follows the context."):
        own["target"].generate(past_key_values=cache, max_new_tokens=NEW)


def test_other_number_of_rows_is_refused():
    own = make_own("llama")
    cache = translated(own, make_documents(2, 6))
    with refused("`input_ids` has 1 rows, but the TranslatedCache holds 2. Pass one prompt per translated context."):
        own["target"].generate(**prompt_of(own, PROMPT), past_key_values=cache, max_new_tokens=NEW)


def test_cropped_cache_is_refused():
    own = make_own("llama")
    fork = translated(own, make_documents(1, 6)[0]).fork()
    fork.crop(-2)
    with refused("`past_key_values` was cropped by 2 tokens. Use the whole translated cache."):
        own["target"].generate(**prompt_of(own, PROMPT), past_key_values=fork, max_new_tokens=NEW)


def test_returned_cache_is_read_only_as_well():
    own = make_own("llama")
    cache = translated(own, make_documents(1, 6)[0])
    out = own["target"].generate(
        **prompt_of(own, PROMPT), past_key_values=cache, max_new_tokens=NEW, return_dict_in_generate=True
    )
    with pytest.raises(RuntimeError, match="read-only"):
        own["target"](torch.tensor([[40]]), **{cache_argument(own["target"]): output_cache(out)})


def test_eos_of_the_models_own_config_ends_a_row():
    """A generation config without an EOS takes the model's: the second turn must know that the row ended."""
    own = make_own("llama")
    text = make_documents(1, 9, 5)[0]
    said = native(own, ids_of(own, text, bos=True) + ids_of(own, PROMPT))
    own["target"].generation_config.eos_token_id = said[0]
    pad = own["target_tokenizer"].pad_token_id
    config = GenerationConfig(max_new_tokens=NEW, min_new_tokens=None, pad_token_id=pad, return_dict_in_generate=True)
    first = attach(own["target"]).generate(
        **prompt_of(own, PROMPT), generation_config=config, past_key_values=translated(own, text)
    )
    cache = output_cache(first)
    assert first.sequences[0, -1] == said[0] and cache.pending_ids[0, 0] == said[0] and cache.pending_mask[0, 0] == 1


def test_fork_that_was_written_to_is_continued():
    own = make_own("llama")
    text = make_documents(1, 9)[0]
    fork = translated(own, text).fork()
    middle = torch.tensor([ids_of(own, SECOND)])
    with torch.no_grad():
        own["target"](middle, **{cache_argument(own["target"]): fork})
    out = own["target"].generate(**prompt_of(own, PROMPT), past_key_values=fork, max_new_tokens=NEW, do_sample=False)
    history = ids_of(own, text, bos=True) + middle[0].tolist() + ids_of(own, PROMPT)
    assert out[0, -NEW:].tolist() == native(own, history)


@pytest.mark.parametrize("where", ["call", "config"])
def test_generating_without_a_cache_is_refused(where):
    own = make_own("llama")
    cache, options = translated(own, make_documents(1, 6)[0]), {"use_cache": False}
    options = options if where == "call" else {"generation_config": GenerationConfig(**options)}
    with refused("`use_cache` is False, but a translated context exists in the cache alone. Leave it out."):
        own["target"].generate(**prompt_of(own, PROMPT), past_key_values=cache, **options)


def test_model_that_by_default_uses_no_cache_uses_this_one(own):
    """As MPT's configuration has it."""
    text = make_documents(1, 12)[0]
    own["target"].generation_config.use_cache = False
    out = attach(own["target"]).generate(
        **prompt_of(own, PROMPT), past_key_values=translated(own, text), max_new_tokens=NEW, do_sample=False
    )
    assert out[0, -NEW:].tolist() == native(own, ids_of(own, text, bos=True) + ids_of(own, PROMPT))


def test_mask_of_another_width_is_refused():
    own = make_own("llama")
    cache, prompt = translated(own, make_documents(1, 6)[0]), prompt_of(own, PROMPT)
    prompt["attention_mask"] = torch.ones(1, 3, dtype=torch.long)
    length = prompt["input_ids"].shape[1]
    with refused(
        f"`attention_mask` has a width of 3, but the prompt has {length} ids, and with the cached context "
        f"{length + cache.get_seq_length()}. Pass the mask that belongs to `input_ids`."
    ):
        own["target"].generate(**prompt, past_key_values=cache, max_new_tokens=NEW)


def test_one_context_serves_several_prompts_in_a_batch():
    own = make_own("llama")
    text = make_documents(1, 9)[0]
    cache = translated(own, text)
    with pytest.raises(RuntimeError, match="read-only"):
        cache.batch_repeat_interleave(2)
    prompts = [PROMPT, PROMPT + " a letter"]
    batch = own["target_tokenizer"](prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    out = own["target"].generate(**batch, past_key_values=cache.fork(2), max_new_tokens=NEW, do_sample=False)
    for row, prompt in enumerate(prompts):
        assert out[row, -NEW:].tolist() == native(own, ids_of(own, text, bos=True) + ids_of(own, prompt))
