"""What else `generate` can be asked for, through the hook, the `custom_generate` callable and a saved recipe."""

import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import make_documents, make_model, make_own, make_pair, make_translator, save_pair
from tokenizers import processors
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)

import hf_mot
from hf_mot import MoTModel, attach, detach
from hf_mot.compat_mot import cache_argument, output_cache

NEW = 8
PROMPT, LONG_PROMPT, SECOND = " the captain wrote", " the captain wrote a long letter to the village", " and said"


@pytest.fixture(params=["llama", "gemma3"])
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
    options = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    out = type(own["target"]).generate(own["target"], ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, ids.shape[1] :].tolist()


def prompt_of(own, *texts):
    return own["target_tokenizer"](list(texts), return_tensors="pt", padding=True, return_token_type_ids=False)


def history(own, text, prompt=PROMPT):
    return ids_of(own, text, bos=True) + ids_of(own, prompt)


@pytest.mark.parametrize("as_dict", [False, True])
def test_unequal_prompts_equal_row_by_row_also_on_sliding_windows(own, as_dict):
    texts, prompts = make_documents(3, 20, 3), [PROMPT, LONG_PROMPT, PROMPT]
    prompt = prompt_of(own, *prompts)
    out = attach(own["target"]).generate(
        **prompt,
        past_key_values=translated(own, texts),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=as_dict,
    )
    sequences = out.sequences if as_dict else out
    length = prompt["input_ids"].shape[1]
    assert torch.equal(sequences[:, :length], prompt["input_ids"])
    said = [native(own, history(own, text, row)) for text, row in zip(texts, prompts, strict=True)]
    assert sequences[:, length:].tolist() == said
    if as_dict:
        again = own["target"].generate(
            **prompt_of(own, SECOND, SECOND, SECOND),
            past_key_values=output_cache(out),
            max_new_tokens=NEW,
            do_sample=False,
        )
        for row in range(3):
            expected = native(own, history(own, texts[row], prompts[row]) + said[row] + ids_of(own, SECOND))
            assert again[row, -NEW:].tolist() == expected


def test_unequal_prompts_with_several_sequences_each(own):
    texts, prompts = make_documents(2, 20, 3), [LONG_PROMPT, PROMPT]
    out = attach(own["target"]).generate(
        **prompt_of(own, *prompts),
        past_key_values=translated(own, texts),
        max_new_tokens=NEW,
        do_sample=False,
        num_beams=3,
        num_return_sequences=2,
    )
    for row in range(2):
        ids = torch.tensor([history(own, texts[row], prompts[row])])
        expected = type(own["target"]).generate(
            own["target"],
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            num_beams=3,
            num_return_sequences=2,
        )
        assert torch.equal(out[2 * row : 2 * row + 2, -NEW:], expected[:, ids.shape[1] :])


def test_second_turn_after_a_row_that_ended_early(own):
    """Pads of the ended row are taken out of the cache: a sliding window would count them."""
    for seed in range(30):
        texts = make_documents(1, 9, seed) + make_documents(1, 16, seed + 100)
        said = [native(own, history(own, text)) for text in texts]
        only = [i for i in range(NEW - 2) if said[0][i] not in said[0][:i] + said[1]]
        if only:
            break
    end = only[-1]
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": own["target_tokenizer"].pad_token_id}
    first = attach(own["target"]).generate(
        **prompt_of(own, PROMPT, PROMPT),
        past_key_values=translated(own, texts),
        eos_token_id=said[0][end],
        return_dict_in_generate=True,
        **options,
    )
    options["return_dict_in_generate"] = True
    prompt = prompt_of(own, SECOND, LONG_PROMPT)
    out = own["target"].generate(**prompt, past_key_values=output_cache(first), **options)
    third = own["target"].generate(**prompt_of(own, PROMPT, SECOND), past_key_values=output_cache(out), **options)
    for row, (text, prompt, last) in enumerate(zip(texts, (SECOND, LONG_PROMPT), (PROMPT, SECOND), strict=True)):
        told = history(own, text) + (said[0][: end + 1] if row == 0 else said[1]) + ids_of(own, prompt)
        expected = native(own, told)
        assert out.sequences[row, -NEW:].tolist() == expected
        assert third.sequences[row, -NEW:].tolist() == native(own, told + expected + ids_of(own, last))


def test_streamer_gives_the_text_that_is_returned(own):
    streamer = TextIteratorStreamer(own["target_tokenizer"], skip_prompt=True)
    prompt = prompt_of(own, PROMPT)
    text = make_documents(1, 12)[0]
    attach(own["target"]).generate(
        **prompt, past_key_values=translated(own, text), max_new_tokens=NEW, do_sample=False, streamer=streamer
    )
    assert "".join(streamer) == own["target_tokenizer"].decode(native(own, history(own, text)))


class _StopAfter(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_stopping_criteria(own):
    text, prompt = make_documents(1, 12)[0], prompt_of(own, PROMPT)
    length = prompt["input_ids"].shape[1] - 1  # the model is given the prompt without BOS
    out = attach(own["target"]).generate(
        **prompt,
        past_key_values=translated(own, text),
        max_new_tokens=NEW,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([_StopAfter(length + 3)]),
    )
    assert out[0, length + 1 :].tolist() == native(own, history(own, text))[:3]


def test_text_generation_pipeline(own):
    text = make_documents(1, 12)[0]
    cache = translated(own, text)
    generator = pipeline("text-generation", model=own["target"], tokenizer=own["target_tokenizer"])
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False)
    out = generator(PROMPT, past_key_values=cache, return_full_text=False, generation_config=config)
    assert out[0]["generated_text"] == own["target_tokenizer"].decode(native(own, history(own, text)))


def test_chat_template_prompt(own):
    own[
        "target_tokenizer"
    ].chat_template = (
        "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    )
    chat = [{"role": "user", "content": "who wrote the letter?"}]
    prompt = own["target_tokenizer"].apply_chat_template(chat, return_tensors="pt", return_dict=True)
    prompt = {name: prompt[name] for name in ("input_ids", "attention_mask")}
    text = make_documents(1, 12)[0]
    out = attach(own["target"]).generate(
        **prompt, past_key_values=translated(own, text), max_new_tokens=NEW, do_sample=False
    )
    assert prompt["input_ids"][0, 0] == own["target_tokenizer"].bos_token_id
    expected = native(own, ids_of(own, text, bos=True) + prompt["input_ids"][0, 1:].tolist())
    assert out[0, prompt["input_ids"].shape[1] :].tolist() == expected


@pytest.mark.parametrize("where", ["call", "config", "model"])
def test_cache_implementation_is_refused(own, where):
    cache, options = translated(own, "a letter"), {"cache_implementation": "static"}
    if where == "config":
        options = {"generation_config": GenerationConfig(**options)}
    elif where == "model":
        own["target"].generation_config.cache_implementation = options.pop("cache_implementation")
    message = (
        "`cache_implementation` is 'static', but a TranslatedCache is the cache, of its own kind. Leave it out (in "
        "`target.generation_config` too)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        attach(own["target"]).generate(**prompt_of(own, PROMPT), past_key_values=cache, max_new_tokens=2, **options)


@pytest.mark.parametrize("where", ["call", "config", "positional", "model"])
def test_max_length_counts_the_ids_that_were_passed(own, where, caplog):
    prompt = prompt_of(own, PROMPT)
    length = prompt["input_ids"].shape[1] + 3
    cache = translated(own, make_documents(1, 12)[0])
    generate = attach(own["target"]).generate
    config = GenerationConfig(max_length=length)
    if where == "call":
        out = generate(**prompt, past_key_values=cache, max_length=length, do_sample=False)
    elif where == "config":
        out = generate(**prompt, past_key_values=cache, generation_config=config)
    elif where == "positional":
        out = generate(prompt["input_ids"], config, attention_mask=prompt["attention_mask"], past_key_values=cache)
    else:
        own["target"].generation_config.max_length = length
        out = generate(**prompt, past_key_values=cache)
        assert own["target"].generation_config.max_length == length
    assert config.max_length == length
    assert out.shape[1] == length
    assert "together with generation-related arguments" not in caplog.text  # deprecated: options beside a config


def test_arguments_given_twice_or_too_many_are_refused_as_by_any_generate(own):
    prompt = prompt_of(own, PROMPT)
    cache = translated(own, make_documents(1, 12)[0])
    generate = attach(own["target"]).generate
    config = GenerationConfig(max_new_tokens=2)
    with pytest.raises(TypeError, match="multiple values for argument 'generation_config'"):
        generate(prompt["input_ids"], config, generation_config=config, past_key_values=cache)
    with pytest.raises(TypeError, match="too many positional arguments"):
        generate(prompt["input_ids"], config, *[None] * 20, past_key_values=cache)


@pytest.mark.parametrize("where", ["call", "config", "model"])
def test_min_length_counts_the_ids_that_were_passed(own, where):
    """The fourth new id ends the row where three are asked for, and does not where four are."""
    for seed in range(20):
        text = make_documents(1, 12, seed)[0]
        said = native(own, history(own, text))
        if said[3] not in said[:3]:
            break
    prompt = prompt_of(own, PROMPT)
    length = prompt["input_ids"].shape[1]
    for asked in (3, 4):
        options = {"eos_token_id": said[3], "min_length": length + asked, "max_new_tokens": NEW, "do_sample": False}
        if where == "config":
            options = {"generation_config": GenerationConfig(**options)}
        elif where == "model":
            own["target"].generation_config.min_length = options.pop("min_length")
        out = attach(own["target"]).generate(**prompt, past_key_values=translated(own, text), **options)
        assert (out[0, length:].tolist() == said[:4]) == (asked == 3)


class _SameIdsTwice(LogitsProcessor):
    """Forbids ids that it has seen, and keeps what it was shown."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores):
        self.shown.append(input_ids.clone())
        return scores.scatter(1, input_ids, -float("inf"))


def stock(target, prompt, cache, **options):
    """Plain generate, by the callable; under the argument's present name, since nothing renames it here."""
    cache = {cache_argument(target): cache}
    return target.generate(**prompt, **cache, custom_generate=hf_mot.custom_generate, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 20},
        {"min_new_tokens": NEW, "eos_token_id": 40},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_return_sequences": 3, "do_sample": True, "top_k": 4},
        {"repetition_penalty": 3.0},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_custom_generate_callable_equals_the_hook(own, options):
    cache = translated(own, make_documents(2, 12))
    prompt = prompt_of(own, PROMPT, PROMPT)
    pad = own["target_tokenizer"].pad_token_id
    options = {"do_sample": False, "pad_token_id": pad, **({"max_new_tokens": NEW} | options)}
    if "max_length" in options:
        del options["max_new_tokens"]
    torch.manual_seed(3)
    expected = own["target"].generate(**prompt, past_key_values=cache, **options)
    target = detach(own["target"])
    torch.manual_seed(3)
    out = stock(target, prompt, cache, **options)
    assert "generate" not in vars(target)
    assert torch.equal(out, expected)


def test_custom_generate_callable_shows_processors_the_prompt_and_serves_a_second_turn(own):
    text = make_documents(1, 12)[0]
    cache, prompt, seen = translated(own, text), prompt_of(own, PROMPT), _SameIdsTwice()
    out = stock(
        detach(own["target"]),
        prompt,
        cache,
        max_new_tokens=NEW,
        do_sample=False,
        logits_processor=[seen],
        return_dict_in_generate=True,
    )
    assert torch.equal(seen.shown[0], prompt["input_ids"]) and torch.equal(seen.shown[-1], out.sequences[:, :-1])
    second = stock(own["target"], prompt_of(own, SECOND), output_cache(out), max_new_tokens=NEW, do_sample=False)
    said = out.sequences[0, prompt["input_ids"].shape[1] :].tolist()
    assert second[0, -NEW:].tolist() == native(own, history(own, text) + said + ids_of(own, SECOND))


def test_custom_generate_callable_refuses_what_it_cannot_do():
    own = make_own("gemma3")
    cache, target = translated(own, make_documents(2, 12)), detach(own["target"])
    with pytest.raises(ValueError, match=r"rows of unequal length.*Use attach\(target\)"):
        stock(target, prompt_of(own, PROMPT, LONG_PROMPT), cache)
    with pytest.raises(ValueError, match="`past_key_values` must be a TranslatedCache, got NoneType"):
        target.generate(**prompt_of(own, PROMPT), custom_generate=hf_mot.custom_generate, use_cache=False)


RECIPE_SCRIPT = """
import sys
sys.modules["hf_mot"] = None  # the package cannot be imported
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

folder, text, prompt = sys.argv[1:]
mot = AutoModel.from_pretrained(f"{folder}/mot", trust_remote_code=True)
source, target = (AutoModelForCausalLM.from_pretrained(f"{folder}/{name}") for name in ("source", "target"))
tokenizers = {f"{name}_tokenizer": AutoTokenizer.from_pretrained(f"{folder}/{name}") for name in ("source", "target")}
translated = mot.handoff(text, source=source, target=target, **tokenizers)
inputs = tokenizers["target_tokenizer"](prompt, return_tensors="pt", return_token_type_ids=False)
options = dict(past_key_values=translated, max_new_tokens=6, do_sample=False)
hooked = target.generate(**inputs, **options)
del target.generate
recipe = target.generate(**inputs, **options, custom_generate=f"{folder}/mot", trust_remote_code=True)
assert torch.equal(hooked, recipe) and hooked.shape[1] == inputs["input_ids"].shape[1] + 6
"""


def test_recipe_of_a_saved_translator_works_without_the_package(tmp_path):
    pair = make_pair()
    save_pair(pair, tmp_path)
    make_translator(pair).save_pretrained(tmp_path / "mot")
    done = subprocess.run(
        [sys.executable, "-c", RECIPE_SCRIPT, str(tmp_path), make_documents(1, 9)[0], PROMPT],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_another_model_than_the_cache_was_made_for_is_refused():
    own = make_own("llama")
    cache = translated(own, "a letter")
    other = attach(make_model("llama", own["target_tokenizer"], seed=5))
    with pytest.raises(ValueError, match="`target` has other weights"):
        other.generate(**prompt_of(own, PROMPT), past_key_values=cache, max_new_tokens=2)


def test_prefix_of_several_special_tokens_is_taken_off_the_prompt_whole():
    """As GLM's tokenizer, which starts every text with two of them."""
    own = make_own("llama")
    tokenizer = own["target_tokenizer"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> <eos> $A", special_tokens=[("<bos>", bos), ("<eos>", eos)]
    )
    text = make_documents(1, 12)[0]
    cache = translated(own, text)
    prompt = prompt_of(own, PROMPT)
    assert prompt["input_ids"][0, :2].tolist() == [bos, eos]
    out = own["target"].generate(**prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    assert out[0, prompt["input_ids"].shape[1] :].tolist() == native(own, [bos, eos, *history(own, text)[1:]])
    ids = torch.tensor([ids_of(own, PROMPT)[:1]])  # a prompt shorter than the prefix does not start with it
    out = own["target"].generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    assert out[0, 1:].tolist() == native(own, [bos, eos, *ids_of(own, text), *ids[0].tolist()])
