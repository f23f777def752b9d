"""lm-evaluation-harness on a translated cache: the native arm is its own model, and the other arms differ from it."""

import json
import logging
import runpy
from pathlib import Path

import pytest
import torch
from conftest import make_documents, make_model, make_pair, make_tokenizer, make_translator, save_pair

pytest.importorskip("lm_eval", reason="an extra: pip install lm-eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model, model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hf_mot import MoTConfig, MoTModel
from hf_mot.compat_mot import cache_argument
from hf_mot.evaluation.lm_eval_harness import HARNESS_ARMS, TranslatedLM

EXAMPLES = Path(__file__).parent.parent / "examples" / "lm_eval"
DOCUMENTS = make_documents(4, words=7)
# Two questions about one context, a continuation that ends a word, and a text that cannot be split.
CHOICES = [
    (f"{DOCUMENTS[0]}\nQuestion: river?\nAnswer:", " stone"),
    (f"{DOCUMENTS[0]}\nQuestion: river?\nAnswer:", " silver lantern"),
    (f"{DOCUMENTS[0]}\nQuestion: letter?\nAnswer:", " no"),
    (f"{DOCUMENTS[1][:25]}\n\nQuestion: garden?\nAnswer: vill", "age"),
    (f"{DOCUMENTS[2]}\n\nmarket ", "engine"),
]
WHOLE = [("river stone", " lantern"), ("", " winter")]


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, own, index) for index, own in enumerate(arguments)]


@pytest.fixture(scope="module")
def pair():
    return make_pair("llama", "gemma3")


@pytest.fixture(scope="module")
def translator(pair):
    return make_translator(pair)


def wrapped(translator, pair, **options) -> TranslatedLM:
    return TranslatedLM(translator, **{"batch_size": 2, **pair, **options})


def likelihoods(model, arguments=CHOICES):
    return model.loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True)


def values(answers) -> torch.Tensor:
    return torch.tensor([value for value, _ in answers])


def own_model(model, tokenizer) -> HFLM:
    """The oracle: the harness's own model, with a BOS before each text, as ours."""
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, add_bos_token=True)


@pytest.mark.parametrize("target", ["gemma3", "llama", "gpt2"])
def test_native_equals_the_harness_own_model(target):
    pair = make_pair("llama", target)
    native = likelihoods(wrapped(make_translator(pair), pair, arm="native"), CHOICES + WHOLE)
    expected = likelihoods(own_model(pair["target"], pair["target_tokenizer"]), CHOICES + WHOLE)
    torch.testing.assert_close(values(native), values(expected), atol=1e-4, rtol=0)
    assert [greedy for _, greedy in native] == [greedy for _, greedy in expected]


def test_continuation_that_is_greedy_is_said_to_be():
    tokenizer = make_tokenizer(merges=40)
    model = make_model("llama", tokenizer)
    pair = {side: model for side in ("source", "target")}
    pair |= {f"{side}_tokenizer": tokenizer for side in ("source", "target")}
    lm = wrapped(MoTModel.identity(model, tokenizer), pair)
    context, ids = CHOICES[0][0], tokenizer(CHOICES[0][0])["input_ids"]
    with torch.no_grad():
        order = model(torch.tensor([ids])).logits[0, -1].argsort(descending=True).tolist()
    asked = [((context, ""), ids, [token]) for token in order[:2]]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(asked, disable_tqdm=True)] == [True, False]


def test_identity_equals_native_and_controls_do_not(translator, pair):
    found = {arm: values(likelihoods(wrapped(translator, pair, arm=arm))) for arm in HARNESS_ARMS}
    torch.testing.assert_close(found["identity"], found["native"], atol=1e-4, rtol=0)
    for arm in set(HARNESS_ARMS) - {"identity", "native"}:
        assert (found[arm] - found["native"]).abs().max() > 0.5, arm
    for arm in set(HARNESS_ARMS) - {"translated"}:
        assert (found[arm] - found["translated"]).abs().max() > 0.5, arm


def test_translated_equals_a_handoff_written_out(translator, pair):
    context, prompt = DOCUMENTS[0], "\nQuestion: river?\nAnswer:"
    encode = pair["target_tokenizer"]
    prompt_ids, answer_ids = (encode(text, add_special_tokens=False)["input_ids"] for text in (prompt, " stone"))
    cache = translator.handoff(context, **pair)
    with torch.no_grad():
        ids = torch.tensor([prompt_ids + answer_ids])
        logits = pair["target"](input_ids=ids, **{cache_argument(pair["target"]): cache.fork()}).logits
    steps = logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
    expected = sum(step[token].item() for step, token in zip(steps, answer_ids, strict=True))
    assert likelihoods(wrapped(translator, pair), CHOICES[:1])[0][0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("arm", ["translated", "wrong_document"])
def test_batch_size_changes_nothing(translator, pair, arm):
    asked = CHOICES + WHOLE
    alone, together = (likelihoods(wrapped(translator, pair, arm=arm, batch_size=size), asked) for size in (1, "8"))
    torch.testing.assert_close(values(alone), values(together), atol=1e-4, rtol=0)
    options = {"until": ["e"], "max_gen_toks": 6}
    alone, together = (
        wrapped(translator, pair, arm=arm, batch_size=size).generate_until(
            requests("generate_until", [(context, options) for context, _ in asked]), disable_tqdm=True
        )
        for size in (1, 8)
    )
    assert alone == together


@pytest.mark.parametrize("until", [[], ["a", "zz"], "st"])
def test_generate_until_equals_the_harness_own_model(translator, pair, until):
    asked = [(context, {"until": until, "max_gen_toks": 12, "do_sample": False}) for context, _ in CHOICES + WHOLE]
    asked[1] = (asked[1][0], {**asked[1][1], "max_gen_toks": 5, "temperature": 0.0})
    native, translated, expected = (
        model.generate_until(requests("generate_until", asked), disable_tqdm=True)
        for model in (
            wrapped(translator, pair, arm="native"),
            wrapped(translator, pair),
            own_model(pair["target"], pair["target_tokenizer"]),
        )
    )
    assert native == expected
    assert translated != native


def test_split_is_shown_and_what_has_none_is_counted(translator, pair, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)  # which the harness ends when it sets them up
    with caplog.at_level(logging.INFO, logger="lm_eval"):
        likelihoods(wrapped(translator, pair), CHOICES + WHOLE)
    assert r"the prompt is '\nQuestion: river?\nAnswer:'" in caplog.text
    assert "2 of 6 texts have no place" in caplog.text


def test_split_of_the_user_is_used(translator, pair):
    default, own = (values(likelihoods(wrapped(translator, pair, split=split))) for split in (None, r"\nAnswer"))
    assert (default - own).abs().min() > 1e-3


def test_perplexity_is_refused_with_the_way_out(translator, pair):
    with pytest.raises(NotImplementedError, match=r"hf-mot evaluate TRANSLATOR --text FILE"):
        wrapped(translator, pair).loglikelihood_rolling([])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"arm": "translatd"}, r"`arm` must be one of native, no_context, translated, .*, got 'translatd'"),
        ({"arm": "ridge"}, r"`arm` must be one of .*, got 'ridge'"),
        ({"split": "("}, r"`split` must be a regular expression"),
        ({"batch_size": "auto"}, r"`batch_size` must be a number of contexts, at least 1, got 'auto'"),
        ({"batch_size": 0}, r"`batch_size` must be a number of contexts"),
        ({"replay": "half"}, r"`replay`"),
        ({"target": None}, r"`target` is needed: the translator was made with a local target model"),
        ({"target_tokenizer": None}, r"`target_tokenizer` is needed beside a loaded `target`"),
    ],
)
def test_bad_arguments_are_refused(translator, pair, options, error):
    with pytest.raises(ValueError, match=error):
        wrapped(translator, pair, **options)


def test_plan_is_by_default_the_translators_own(translator, pair):
    window = MoTConfig(**translator.config.to_dict() | {"target_layers": [1], "replay": "full"})
    assert wrapped(MoTModel(window).eval(), pair).models.replay == "full:1-1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_device_that_the_command_line_assumes_is_not_needed(translator, pair):
    assert wrapped(translator, pair, device="cuda:0").models.target.device.type == "cpu"


def test_another_target_is_refused(translator, pair):
    with pytest.raises(ValueError, match="target"):
        wrapped(translator, {**pair, "target": pair["source"]}, arm="native")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"do_sample": True, "temperature": 0.7}, r"`gen_kwargs` asks for sampling"),
        ({"temperature": 0.7}, r"`gen_kwargs` asks for sampling"),
        ({"num_beams": 2}, r"`gen_kwargs` asks for num_beams"),
        ({"max_gen_toks": 600}, r"a text of \d+ tokens, the answer's 600 included, but the target has 512 positions"),
    ],
)
def test_generation_that_cannot_be_kept_is_refused(translator, pair, options, error):
    with pytest.raises(ValueError, match=error):
        wrapped(translator, pair).generate_until(requests("generate_until", [(CHOICES[0][0], options)]))


def test_continuation_without_a_token_is_refused(translator, pair):
    with pytest.raises(ValueError, match=r"the continuation '', which adds no token to score"):
        likelihoods(wrapped(translator, pair), [(CHOICES[0][0], "")])


def test_chat_template_is_the_targets(translator, pair):
    pair = {**pair, "target_tokenizer": make_tokenizer(merges=40)}
    pair["target_tokenizer"].chat_template = (
        "{{ bos_token }}{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"
        "{% if add_generation_prompt %}<model>{% endif %}"
    )
    lm = wrapped(translator, pair, arm="native")
    text = lm.apply_chat_template([{"role": "user", "content": "river"}])
    assert text == "<bos><user>river<model>"
    assert lm.tok_encode(text).count(lm.tokenizer.bos_token_id) == 1


@pytest.fixture(scope="module")
def folder(translator, pair, tmp_path_factory):
    """Models, translator and data of two tasks as files."""
    folder = tmp_path_factory.mktemp("harness")
    save_pair(pair, folder)
    translator.save_pretrained(folder / "translator")
    for task, choices in (("boolq", ["yes", "no"]), ("squad", None)):
        (folder / task).mkdir()
        rows = [
            {"id": str(i), "context": text, "question": "river", "answers": ["no"], "choices": choices, "task": task}
            for i, text in enumerate(DOCUMENTS)
        ]
        (folder / task / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_examples_run_through_the_registered_model(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
    assert get_model("hf_mot") is TranslatedLM
    found = lm_eval.simple_evaluate(
        model="hf_mot",
        model_args="translator=translator,source=source,target=target,arm=native,split=\\nQuestion:",
        tasks=["local_boolq", "local_squad"],
        task_manager=TaskManager(include_path=str(EXAMPLES), include_defaults=False),
        batch_size=2,
        limit=3,
        bootstrap_iters=0,
    )
    own = wrapped(MoTModel.from_pretrained(folder / "translator"), make_pair("llama", "gemma3"), arm="native")
    expected = likelihoods(
        own, [(f"{DOCUMENTS[0]}\n\nQuestion: river?\nAnswer:", answer) for answer in (" yes", " no")]
    )
    (sample,) = (sample for sample in found["samples"]["local_boolq"] if sample["doc_id"] == 0)
    assert [response[0][0] for response in sample["resps"]] == pytest.approx([v for v, _ in expected], abs=1e-4)
    assert found["results"]["local_boolq"]["acc,none"] in (0, 1 / 3, 2 / 3, 1)
    assert found["n-samples"]["local_squad"]["effective"] == 3


def test_module_run_as_a_script_is_the_harness_command_line_with_the_model(monkeypatch):
    """`lm_eval` itself has no way to load another package's model."""
    found = []
    monkeypatch.delitem(model_registry._objs, "hf_mot")  # as in a process of its own
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: found.append(get_model("hf_mot")))
    with pytest.warns(RuntimeWarning, match="found in sys.modules"):
        runpy.run_module("hf_mot.evaluation.lm_eval_harness", run_name="__main__")
    assert [model.__module__ for model in found] == ["__main__"]
