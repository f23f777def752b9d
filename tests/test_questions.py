"""Tasks in all arms: what is scored equals one plain forward over context, prompt and answer."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import make_model, make_tokenizer
from evaluation_pair import make_examples, make_pair

from hf_mot import MoTModel
from hf_mot.cli.evaluate_lines import task_lines
from hf_mot.evaluation import evaluate
from hf_mot.evaluation.prompts import Prompter
from hf_mot.evaluation.question_answering import named_choice
from hf_mot.evaluation.report import plain_words, table
from hf_mot.evaluation.store import ResultStore
from hf_mot.evaluation.tasks import TASKS, Example

ARMS = ["native", "no_context", "translated", "identity", "wrong_document"]


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setitem(TASKS, "squad", replace(TASKS["squad"], max_new_tokens=6))


@pytest.fixture(scope="module")
def examples():
    return make_examples(7)


def run(pair, task, examples, **options):
    """The report's part on a task, and each example's results by arm."""
    store = ResultStore()
    report = evaluate(tasks={task: examples}, results=store, **{**pair, "arms": ARMS, "seed": 3, **options})
    arms = set(report["tasks"][task]["intervals"])
    return report["tasks"][task], {arm: store.results(task, arm) for arm in arms}


def prompter_of(pair, side="target"):
    return Prompter.of(pair[f"{side}_tokenizer"], pair["translator"].config.to_dict()[side]["prefix_ids"])


def plain_losses(model, ids, answer_ids):
    """NLL of each answer token by one forward over all ids, written out."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*ids, *answer_ids]])).logits[0].log_softmax(-1)
    return [-logits[len(ids) + place - 1, token].item() for place, token in enumerate(answer_ids)]


def test_answer_nll_equals_a_plain_forward(pair, examples):
    _, results = run(pair, "squad", examples)
    for example in examples:
        question = prompter_of(pair).question(TASKS["squad"], example)
        for arm, ids in (("native", question.context_ids), ("no_context", question.context_ids[:1])):
            losses = plain_losses(pair["target"], [*ids, *question.prompt_ids], question.answer_ids[0])
            assert results[arm][example.id]["nll"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_identity_answers_as_native_does_and_no_context_otherwise(pair, examples):
    _, results = run(pair, "squad", examples)
    for example in examples:
        native, identity, none = (results[arm][example.id] for arm in ("native", "identity", "no_context"))
        assert identity["nll"] == pytest.approx(native["nll"], abs=1e-4)
        assert identity["answer"] == native["answer"]
        assert abs(none["nll"] - native["nll"]) > 1e-3


@pytest.mark.parametrize("target", ["llama", "gemma3", "gpt2"])
def test_answers_are_what_generate_says_natively(target, examples):
    pair = make_pair(target=target)
    _, results = run(pair, "squad", examples, arms=["native"])
    tokenizer, said = pair["target_tokenizer"], []
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    for example in examples:
        question = prompter_of(pair).question(TASKS["squad"], example)
        ids = torch.tensor([question.context_ids + question.prompt_ids])
        output = pair["target"].generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TASKS["squad"].max_new_tokens,
            do_sample=False,
            eos_token_id=[tokenizer.eos_token_id, *newline],
            pad_token_id=tokenizer.pad_token_id,
        )
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        said.append(text.strip().partition("\n")[0].strip())
        assert results["native"][example.id]["answer"] == said[-1]
    assert len(set(said)) > 1


def test_closed_set_is_decided_by_the_likelihood_of_each_choice(pair):
    examples = make_examples(6, closed=True)
    figures, results = run(pair, "pubmedqa", examples)
    right = []
    for example in examples:
        question = prompter_of(pair).question(TASKS["pubmedqa"], example)
        prompt = question.context_ids + question.prompt_ids
        likelihoods = [-sum(plain_losses(pair["target"], prompt, ids)) for ids in question.answer_ids]
        own = results["native"][example.id]
        assert own["log_likelihoods"] == pytest.approx(likelihoods, abs=1e-3)
        assert own["prediction"] == example.choices[likelihoods.index(max(likelihoods))]
        right.append(own["prediction"] == example.answers[0])
    assert figures["native"] == pytest.approx(sum(right) / len(right))
    assert figures["metric"] == "accuracy" and "em" not in figures


@pytest.mark.parametrize(("task", "closed"), [("squad", False), ("boolq", True)])
def test_batch_size_changes_nothing(pair, task, closed):
    examples = make_examples(9, closed)
    arms = [*ARMS, "wrong_source", "zero_cache", "random_cache", "no_source", "source_alone"]
    _, one = run(pair, task, examples, batch_size=1, arms=arms)
    _, eight = run(pair, task, examples, batch_size=8, arms=arms)
    assert one.keys() == eight.keys() == set(arms)
    for arm in arms:
        for example in examples:
            assert one[arm][example.id]["nll"] == pytest.approx(eight[arm][example.id]["nll"], abs=1e-4), arm


def test_wrong_document_is_the_next_one_of_those_as_long(pair, examples):
    _, results = run(pair, "squad", examples)
    order = list(results["native"])  # as they were read
    questions = {example.id: prompter_of(pair).question(TASKS["squad"], example) for example in examples}
    lengths = [len(questions[name].context_ids) for name in order]
    assert lengths == sorted(lengths, reverse=True)
    for name, other in zip(order, [*order[1:], order[0]], strict=True):
        cache = pair["translator"].handoff(
            questions[other].text,
            **{key: pair[key] for key in ("source", "target", "source_tokenizer", "target_tokenizer")},
        )
        question = questions[name]
        ids = torch.tensor([[*question.prompt_ids, *question.answer_ids[0]]])
        with torch.no_grad():
            logits = pair["target"](input_ids=ids[:, :-1], cache=cache.fork()).logits[0].log_softmax(-1)
        losses = [-logits[place - 1, ids[0, place]].item() for place in range(len(question.prompt_ids), ids.shape[1])]
        assert results["wrong_document"][name]["nll"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_questions_about_one_text_are_each_others_right_document(pair, examples):
    shared = [Example(f"{example.id}b", example.context, "river?", example.answers) for example in examples]
    _, results = run(pair, "squad", [*examples, *shared], arms=["native", "native_wrong_document"])
    # The helper arm of content recovery means nothing for questions, and is not run.
    assert set(results) == {"native"}
    figures, _ = run(pair, "squad", [*examples, *shared], arms=["translated", "wrong_document"])
    assert figures["n"] == 14
    with pytest.raises(ValueError, match="needs at least 2 documents, got 1 of sufficient length"):
        run(pair, "squad", [examples[0], shared[0]])


def test_source_alone_answers_with_its_own_tokens(pair, examples):
    figures, results = run(pair, "squad", examples, arms=["native", "source_alone"])
    example = examples[0]
    question = prompter_of(pair, "source").question(TASKS["squad"], example)
    losses = plain_losses(pair["source"], question.context_ids + question.prompt_ids, question.answer_ids[0])
    assert results["source_alone"][example.id]["nll"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    # Nats a token of another tokenizer are no figure to stand beside the target's.
    assert "source_alone" not in figures["answer_nll"] and "source_alone" in figures["intervals"]


def test_text_handoff_is_the_sources_summary_read_by_the_target(pair, examples):
    _, results = run(pair, "squad", examples, arms=["text_handoff"])
    example, source = examples[0], prompter_of(pair, "source")
    ids = torch.tensor([source.context_ids(example.context) + source.encode("\n\nSummary:")])
    tokenizer = pair["source_tokenizer"]
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    output = pair["source"].generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, *newline],
        pad_token_id=tokenizer.pad_token_id,
    )
    text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip().partition("\n")[0].strip()
    target = prompter_of(pair)
    question = target.question(TASKS["squad"], example)
    losses = plain_losses(pair["target"], target.context_ids(text) + question.prompt_ids, question.answer_ids[0])
    assert results["text_handoff"][example.id]["nll"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_report_of_a_task_follows_the_contract(pair, examples):
    figures, results = run(pair, "squad", examples)
    assert (figures["metric"], figures["n"], figures["version"]) == ("f1", 7, TASKS["squad"].version)
    for arm in ARMS:
        own = [results[arm][example.id] for example in examples]
        assert figures[arm] == pytest.approx(sum(row["f1"] for row in own) / 7)
        assert figures["em"][arm] == pytest.approx(sum(row["em"] for row in own) / 7)
        assert figures["answer_nll"][arm] == pytest.approx(sum(row["nll"] for row in own) / 7)
        assert figures["intervals"][arm]["low"] <= figures[arm] <= figures["intervals"][arm]["high"]
    assert figures["counts"] is False  # random models answer nothing right
    assert set(figures["better_by"]) == {"no_context", "wrong_document"}
    assert set(figures["categories"]) == {"even", "odd"}
    assert figures["categories"]["even"]["n"] == 4
    better = figures["answer_nll"]["better_by"]["wrong_document"]["value"]
    difference = figures["answer_nll"]["wrong_document"] - figures["answer_nll"]["translated"]
    assert better == pytest.approx(difference)


def test_answers_that_are_cut_are_counted(pair, examples):
    assert TASKS["squad"].max_new_tokens == 6
    tokenizer = pair["target_tokenizer"]
    long, short = "river stone lantern village", "a"
    asked = [
        Example(f"task/{index}", example.context, example.question, answers)
        for index, (example, answers) in enumerate(
            zip(examples, [(short,), (long,), (long, short), (short, long)], strict=False)
        )
    ]
    assert len(tokenizer(f" {long}", add_special_tokens=False)["input_ids"]) > 6
    figures, _ = run(pair, "squad", asked, arms=["native"])
    assert figures["answers_longer_than_cut"] == 2  # by the first answer, which the NLL is of
    assert "squad: 4 questions, 2 answers longer than cut, plain prompt" in task_lines("squad", figures)[0]
    figures, _ = run(pair, "squad", asked[:1] + asked[3:], arms=["native"])
    assert "answers_longer_than_cut" not in figures


def test_closed_set_is_cut_only_where_it_is_generated(pair, monkeypatch):
    monkeypatch.setitem(TASKS, "boolq", replace(TASKS["boolq"], max_new_tokens=2))
    examples = make_examples(4, closed=True)  # their choices have a token a letter, or nearly
    figures, _ = run(pair, "boolq", examples, arms=["native"])
    assert "answers_longer_than_cut" not in figures
    figures, _ = run(pair, "boolq", examples, arms=["native"], closed_sets="generate")
    assert figures["answers_longer_than_cut"] == 4


def test_limit_draws_by_seed(pair, examples):
    _, first = run(pair, "squad", examples, arms=["native"], limit=3)
    _, again = run(pair, "squad", examples, arms=["native"], limit=3)
    _, other = run(pair, "squad", examples, arms=["native"], limit=3, seed=4)
    assert len(first["native"]) == 3
    assert list(first["native"]) == list(again["native"]) != list(other["native"])


def test_context_longer_than_a_model_is_skipped_or_cut_and_counted(pair, examples):
    long = Example("task/long/0", "river stone " * 60, "river?", ("stone",))  # 720 bytes, 512 positions
    figures, results = run(pair, "squad", [*examples, long])
    assert (figures["n"], figures["too_long"]) == (7, 1) and "truncated" not in figures
    figures, results = run(pair, "squad", [*examples, long], truncate=True)
    assert (figures["n"], figures["truncated"]) == (8, 1) and "too_long" not in figures
    with pytest.raises(ValueError, match="No question of squad fits: the contexts of all 1 are longer"):
        run(pair, "squad", [long])


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        ("Yes.", "yes"),
        ("yes, it is", "yes"),
        ("Maybe so", "maybe"),
        ("nothing", None),
        ("", None),
        ("it is yes", None),
        ("No way", "no way"),  # the longest
    ],
)
def test_generated_answer_names_the_choice_that_it_starts_with(answer, choice):
    assert named_choice(answer, ("yes", "no", "maybe", "no way")) == choice


def test_closed_set_by_generation(pair):
    examples = make_examples(4, closed=True)
    figures, results = run(pair, "boolq", examples, closed_sets="generate", arms=["native"])
    assert all("answer" in row and "log_likelihoods" not in row for row in results["native"].values())
    assert figures["native"] == 0  # random models say neither
    with pytest.raises(ValueError, match="`closed_sets` must be one of likelihood, generate, got 'greedy'"):
        run(pair, "boolq", examples, closed_sets="greedy")


def test_target_without_bos_starts_from_an_empty_cache(examples):
    tokenizer = make_tokenizer(adds_bos=False)
    tokenizer.bos_token = None
    target = make_model("gpt2", tokenizer)
    translator = MoTModel.identity(target, tokenizer).eval()
    assert not translator.config.target["prefix_ids"]
    own = {"translator": translator, "source": target, "target": target, "cost": False, "progress": False}
    own |= {"source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    _, results = run(own, "squad", examples, arms=["native", "no_context"])
    for example in examples:
        question = Prompter.of(tokenizer, []).question(TASKS["squad"], example)
        losses = plain_losses(target, question.prompt_ids, question.answer_ids[0])
        assert results["no_context"][example.id]["nll"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
        assert math.isfinite(results["native"][example.id]["nll"])


def test_examples_of_one_name_are_refused(pair, examples):
    with pytest.raises(ValueError, match="2 examples of squad have the id 'task/odd/1'"):
        run(pair, "squad", [*examples, replace(examples[0], id="task/odd/1")])


def test_questions_about_one_document_have_no_interval(pair, examples):
    examples = [replace(example, context=examples[0].context) for example in examples]
    arms = ["native", "no_context", "translated", "no_source"]
    report = evaluate(tasks={"squad": examples}, **{**pair, "arms": arms})
    figures = report["tasks"]["squad"]
    assert (figures["n"], figures["n_documents"]) == (7, 1)
    assert not {"intervals", "better_by", "native_minus_no_context", "counts"} & figures.keys()
    assert "better_by" not in figures["answer_nll"] and "at least 2" in figures["answer_nll"]["notes"][0]
    lines = "\n".join(task_lines("squad", figures))
    assert "7 questions about 1 contexts" in lines and "translated" in lines and "[" not in lines.splitlines()[2]
    assert [row[0] for row in table(report)[1]] == arms
    assert any("at least 2" in sentence for sentence in plain_words(report))


def test_empty_task_is_named(pair):
    with pytest.raises(ValueError, match="The task squad is empty"):
        run(pair, "squad", [])


def test_arm_for_documents_alone_says_so_on_questions(pair, examples):
    with pytest.raises(ValueError, match="`arms` holds none that has a meaning for squad"):
        run(pair, "squad", examples, arms=["native_wrong_document"])


def test_source_has_room_for_its_summary():
    pair = make_pair(source="gpt2")  # of learned positions, which end
    pair["source_tokenizer"].chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}>"
    fits = Example("a", "river stone " * 30, "river?", ("stone",))
    long = Example("b", "winter " * 58 + "river", "river?", ("stone",))  # room for an answer to the question alone
    report = evaluate(tasks={"squad": [fits, long]}, **{**pair, "arms": ["native", "text_handoff"]})
    assert "missing" not in report and report["tasks"]["squad"]["too_long"] == 1
