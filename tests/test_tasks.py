import csv
import gzip
import json
import re
import sys

import pytest
from conftest import changed, make_tokenizer
from evaluation_pair import make_examples, write_examples

from hf_mot.evaluation import hub_tasks
from hf_mot.evaluation.hub_tasks import load_hub_examples
from hf_mot.evaluation.prompts import Prompter, cut_to_fit
from hf_mot.evaluation.tasks import TASKS, find_task, load_examples

ROW = {"id": "squad/1", "context": "Ada lives in Bern.", "question": "Where?", "answers": ["Bern"], "choices": None}


def folder_with(tmp_path, task, rows, name="dev.jsonl"):
    (tmp_path / task).mkdir()
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    data = text.encode()
    (tmp_path / task / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return tmp_path


@pytest.mark.parametrize("name", ["dev.jsonl", "dev.jsonl.gz"])
def test_examples_are_read_from_lines(tmp_path, name):
    row = {**ROW, "task": "squad"}
    (example,) = load_examples(folder_with(tmp_path, "squad", [row, ""], name), "squad")
    assert (example.id, example.context, example.question) == ("squad/1", "Ada lives in Bern.", "Where?")
    assert (example.answers, example.choices, example.category) == (("Bern",), None, None)


def test_category_is_the_middle_of_the_id():
    even, odd = make_examples(2)
    assert (even.category, odd.category) == ("even", "odd")


@pytest.mark.parametrize("key", ["id", "context", "question", "answers", "choices", "task"])
def test_missing_key_names_file_line_and_key(tmp_path, key):
    good = {**ROW, "task": "squad"}
    bad = {name: value for name, value in good.items() if name != key}
    with pytest.raises(ValueError, match=rf"squad.dev\.jsonl, line 3: the key '{key}' is missing"):
        load_examples(folder_with(tmp_path, "squad", [good, "", bad]), "squad")


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("squad", {"context": " "}, "line 1: 'context' must be a text that is not empty, got ' '"),
        ("squad", {"answers": []}, r"line 1: 'answers' must be a list of texts that are not empty, got \[\]"),
        ("squad", {"answers": "Bern"}, "line 1: 'answers' must be a list"),
        ("boolq", {}, "line 1: 'choices' must be a list"),
        ("boolq", {"choices": ["yes", "no"]}, r"'answers' must be one of 'choices' \['yes', 'no'\], got \['Bern'\]"),
    ],
)
def test_wrong_values_are_named(tmp_path, task, change, message):
    with pytest.raises(ValueError, match=message):
        load_examples(folder_with(tmp_path, task, [{**ROW, "task": task, **change}]), task)


def test_what_is_no_json_or_damaged_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"dev\.jsonl, line 2, is not JSON"):
        load_examples(
            folder_with(
                tmp_path,
                "squad",
                [{**ROW, "task": "squad"}, '{"id": '],
            ),
            "squad",
        )
    (tmp_path / "boolq").mkdir()
    (tmp_path / "boolq" / "dev.jsonl.gz").write_bytes(gzip.compress(b"{}" * 500)[:20])
    with pytest.raises(ValueError, match=r"dev\.jsonl\.gz is gzipped, but damaged"):
        load_examples(tmp_path, "boolq")


def test_task_that_is_empty_twice_there_or_not_there(tmp_path):
    folder_with(tmp_path, "squad", [""])
    with pytest.raises(ValueError, match="The task squad is empty"):
        load_examples(tmp_path, "squad")
    with pytest.raises(FileNotFoundError, match="has no folder boolq for the task; there are squad"):
        load_examples(tmp_path, "boolq")
    row = {**ROW, "task": "hotpotqa"}
    with pytest.raises(ValueError, match="the id 'squad/1' is there twice"):
        load_examples(folder_with(tmp_path, "hotpotqa", [row, row]), "hotpotqa")


def test_unknown_task_is_named_with_the_one_meant():
    with pytest.raises(ValueError, match="'sqad', which is no task. Did you mean squad"):
        find_task("sqad")


def test_newsqa_is_read_as_its_authors_publish_it(tmp_path):
    text = "By Ann -- The ferry sank. Nobody was hurt, she said."
    span = {"s": text.index("ferry"), "e": text.index(" sank")}
    questions = [
        {"q": " What sank?", "consensus": span, "validatedAnswers": [{**span, "s": span["s"] - 4, "count": 1}]},
        {"q": "Why?", "consensus": {"noAnswer": True}},
        {"q": "x", "consensus": {"badQuestion": True}},
    ]
    stories = [
        {"storyId": "./cnn/stories/ab12.story", "type": "test", "text": text, "questions": questions},
        {"storyId": "./cnn/stories/cd34.story", "type": "train", "text": text, "questions": questions},
    ]
    (tmp_path / "newsqa").mkdir()
    file = tmp_path / "newsqa" / "combined-newsqa-data-v1.json"
    file.write_text(json.dumps({"data": stories, "version": "1"}))
    (example,) = load_examples(tmp_path, "newsqa")
    assert (example.id, example.question) == ("newsqa/ab12-0", "What sank?")
    assert (example.answers, example.context) == (("ferry", "The ferry"), text)
    file.write_text(json.dumps({"data": [{"type": "test"}]}))
    with pytest.raises(ValueError, match="story 0: the key 'text' is missing"):
        load_examples(tmp_path, "newsqa")


# As in `NEWSQA_STORY`; the last has no validators, and a line end that the ranges count as one character.
NEWSQA_STORY = "By Ann --\nThe ferry sank. Nobody was hurt, she said."
NEWSQA_QUESTIONS = [  # question, the annotators' ranges, the validators' votes
    (" What sank?", "14:19|10:19|None", {"14:20": 2, "10:19": 1}),
    ("What?", "14:19|None", {"none": 2, "14:19": 1}),
    ("x", "14:19|None", {"bad_question": 2, "none": 1}),
    ("Which?", "14:19|10:19|None", {"14:19": 1, "10:19": 1, "none": 1}),
    ("Who spoke?", "3:6|3:6,0:6", None),
    ("Why?", "None|None", None),
]
NEWSQA_SPANS = {0: [(14, 20), (14, 20), (10, 19)], 4: [(3, 6)]}  # what the scripts' rule makes of them


def newsqa_json(tmp_path, story_ids):
    """The JSON of the stories, with the consensus that the scripts find."""
    questions = []
    for index, (question, _, votes) in enumerate(NEWSQA_QUESTIONS):
        start, end = NEWSQA_SPANS.get(index, [(None, None)])[0]
        consensus = {"noAnswer": True} if start is None else {"s": start, "e": end}
        own = {"q": question, "consensus": consensus}
        if votes:
            named = {"none": {"noAnswer": True}, "bad_question": {"badQuestion": True}}
            own["validatedAnswers"] = [
                {**(named.get(key) or dict(zip("se", map(int, key.split(":")), strict=True))), "count": count}
                for key, count in votes.items()
            ]
        questions.append(own)
    stories = [
        {"storyId": story_id, "type": "test", "text": NEWSQA_STORY, "questions": questions} for story_id in story_ids
    ]
    file = tmp_path / "newsqa" / "combined-newsqa-data-v1.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"data": stories, "version": "1"}))


def newsqa_csv(tmp_path, story_ids, **changes):
    columns = ("story_id", "question", "answer_char_ranges", "is_answer_absent", "is_question_bad")
    with open(tmp_path / "newsqa" / "combined-newsqa-data-v1.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, "validated_answers", "story_text"])
        writer.writeheader()
        for question, ranges, votes in NEWSQA_QUESTIONS:  # the rows of a story need not be together
            for story_id in story_ids:
                row = dict(zip(columns, (story_id, question, ranges, "0.25", "?"), strict=True))
                row["validated_answers"] = json.dumps(votes) if votes else ""
                writer.writerow({**row, "story_text": NEWSQA_STORY.replace("\n", "\r\n"), **changes})


def test_newsqa_as_csv_gives_what_its_json_gives(tmp_path):
    story_ids = ["./cnn/stories/ab12.story", "./cnn/stories/cd34.story"]
    newsqa_json(tmp_path / "a", story_ids)
    (tmp_path / "b" / "newsqa").mkdir(parents=True)
    newsqa_csv(tmp_path / "b", story_ids)
    expected, found = load_examples(tmp_path / "a", "newsqa"), load_examples(tmp_path / "b", "newsqa")
    assert [example.id for example in expected] == [
        f"newsqa/{name}-{index}" for name in ("ab12", "cd34") for index in (0, 4)
    ]
    assert sorted(found, key=lambda example: example.id) == expected
    assert (expected[0].answers, expected[1].answers) == (("ferry", "The ferry"), ("Ann",))
    (tmp_path / "b" / "newsqa" / "test_story_ids.csv").write_text("story_id\n./cnn/stories/cd34.story\n")
    assert load_examples(tmp_path / "b", "newsqa") == expected[2:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validated_answers": "[1]"}, r"row 1: the column 'validated_answers' must be empty or .* got '\[1\]'"),
        ({"validated_answers": '{"4-9": 2}', "answer_char_ranges": "3:6"}, "The task newsqa is empty"),
        ({"validated_answers": '{"4:x": 2}'}, "row 1: a range must be like 294:297, got '4:x'"),
    ],
)
def test_newsqa_csv_of_another_form_is_named(tmp_path, changes, message):
    (tmp_path / "newsqa").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds neither combined-newsqa-data-v1\.json nor combined-.*\.csv"):
        load_examples(tmp_path, "newsqa")
    newsqa_csv(tmp_path, ["a.story"], **changes)
    with pytest.raises(ValueError, match=message):
        load_examples(tmp_path, "newsqa")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("story_id,question\nab12\n", "row 1, has not the columns of the head"),
        ("story_id\nab12\n", "row 1: the key 'story_text' is missing"),
        (b"story_id\n\xff\n", r"combined-newsqa-data-v1\.csv is not CSV"),
    ],
)
def test_newsqa_csv_that_is_damaged_is_named(tmp_path, text, message):
    file = tmp_path / "newsqa" / "combined-newsqa-data-v1.csv"
    file.parent.mkdir()
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        load_examples(tmp_path, "newsqa")


def test_doc2dial_is_read_as_its_authors_publish_it(tmp_path):
    text = "Bring your card. Open at nine. Closed on Sunday."
    spans = {
        str(number): {"start_sp": text.index(part), "end_sp": text.index(part) + len(part)}
        for number, part in enumerate(["Bring your card.", "Open at nine.", "Closed on Sunday."])
    }
    turns = [
        {"turn_id": 1, "role": "user", "utterance": "When?", "references": []},
        {"turn_id": 2, "role": "agent", "utterance": "At nine.", "references": [{"sp_id": "1"}, {"sp_id": "2"}]},
        {"turn_id": 3, "role": "user", "utterance": "Thanks.", "references": []},
        {"turn_id": 4, "role": "agent", "utterance": "Bye.", "references": []},
    ]
    (tmp_path / "doc2dial").mkdir()
    document = {"doc_data": {"dmv": {"doc-1": {"doc_text": text, "spans": spans}}}}
    dialogue = {"dial_data": {"dmv": {"doc-1": [{"dial_id": "d7", "turns": turns}]}}}
    (tmp_path / "doc2dial" / "doc2dial_doc.json").write_text(json.dumps(document))
    with pytest.raises(FileNotFoundError, match=r"doc2dial_dial_validation\.json is not there"):
        load_examples(tmp_path, "doc2dial")
    (tmp_path / "doc2dial" / "doc2dial_dial_validation.json").write_text(json.dumps(dialogue))
    (example,) = load_examples(tmp_path, "doc2dial")
    assert (example.id, example.category) == ("doc2dial/dmv/d7_1", "dmv")
    assert (example.question, example.answers) == ("user: When?", ("Open at nine. Closed on Sunday.",))


# With all columns of the public data sets, in their order.
HUB_ROWS = {
    "squad": {
        "id": "7",
        "title": "T",
        "context": "c",
        "question": "q",
        "answers": {"text": ["x", "x", "y"], "answer_start": [0, 0, 4]},
    },
    "boolq": {"question": "q", "answer": False, "passage": "c"},
    "pubmedqa": {
        "pubid": 7,
        "question": "q",
        "context": {
            "contexts": ["c", "d"],
            "labels": ["METHODS", "RESULTS"],
            "meshes": ["Adult"],
            "reasoning_required_pred": ["n", "o"],
            "reasoning_free_pred": ["y", "e", "s"],
        },
        "long_answer": "what must not be read",
        "final_decision": "maybe",
    },
    "hotpotqa": {
        "id": "7",
        "question": "q",
        "answer": "x",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": ["T"], "sent_id": [1]},
        "context": {"title": ["T", "U"], "sentences": [["One.", " Two."], ["Three."]]},
    },
    "mmlu_redux": {
        "question": "q",
        "choices": ["a", "b", "c", "d"],
        "answer": 2,
        "error_type": "ok",
        "source": None,
        "correct_answer": None,
        "potential_reason": None,
    },
}


@pytest.mark.parametrize("task", HUB_ROWS)
def test_rows_of_the_hub_become_examples(task, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [HUB_ROWS[task]]
    if task == "mmlu_redux":  # a question that was found wrong is left out
        rows.append({**rows[0], "error_type": "wrong_groundtruth", "correct_answer": "3"})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset.from_list(rows))
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda repository: ["law"])
    (example,) = load_hub_examples(task)
    expected = {
        "squad": ("squad/7", "c", ("x", "y"), None),
        "boolq": ("boolq/0", "c", ("no",), ("yes", "no")),
        "pubmedqa": ("pubmedqa/7", "c\nd", ("maybe",), ("yes", "no", "maybe")),
        "hotpotqa": ("hotpotqa/7", "Passage 1:\nT\nOne. Two.\n\nPassage 2:\nU\nThree.", ("x",), None),
        "mmlu_redux": ("mmlu_redux/law/0", "q\nA. a\nB. b\nC. c\nD. d", ("c",), ("a", "b", "c", "d")),
    }[task]
    assert (example.id, example.context, example.answers, example.choices) == expected


def test_hub_without_datasets_or_task_or_column(monkeypatch):
    with pytest.raises(ValueError, match="hotpotqa_long, which is not on the Hub"):
        load_hub_examples("hotpotqa_long")
    with pytest.raises(ValueError, match="row 0: the column 'passage' is missing"):
        list(hub_tasks._converted([{"question": "q", "answer": True}], hub_tasks._boolq, "google/boolq"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install hf-mot\[data\]"):
        load_hub_examples("squad")


@pytest.mark.parametrize("task", TASKS.values(), ids=str)
def test_demonstrations_show_the_form_in_few_words(task):
    shown = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in task.demonstrations)
    assert len(shown.split()) <= 40  # at most 64 tokens of any real tokenizer
    assert task.demonstrations


def test_plain_prompt_ends_where_the_answer_begins(tmp_path):
    tokenizer = make_tokenizer(merges=20)
    (example,) = make_examples(1)
    prompter = Prompter.of(tokenizer, [tokenizer.bos_token_id])
    question = prompter.question(TASKS["squad"], example)
    prompt = prompter.prompt(TASKS["squad"], example)
    assert prompt.endswith(f"\n\nQuestion: {example.question}\nAnswer:") and example.context not in prompt
    assert question.context_ids == tokenizer(example.context)["input_ids"]  # with its BOS
    assert tokenizer.bos_token_id not in question.prompt_ids
    (answer_ids,) = question.answer_ids
    assert tokenizer.decode(question.prompt_ids + answer_ids) == f"{prompt} {example.answers[0]}"


def test_every_choice_follows_the_same_prompt():
    tokenizer = make_tokenizer()
    example = make_examples(2, closed=True)[1]
    question = Prompter.of(tokenizer, [tokenizer.bos_token_id]).question(TASKS["pubmedqa"], example)
    assert [tokenizer.decode(ids) for ids in question.answer_ids] == [" yes", " no", " perhaps"]


def test_chat_prompt_is_a_users_turn_without_a_second_bos():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "<bos>{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}{% endfor %} [bot]"
    (example,) = make_examples(1)
    prompter = Prompter.of(tokenizer, [tokenizer.bos_token_id])
    question = prompter.question(TASKS["squad"], example)
    prompt = tokenizer.decode(question.prompt_ids)
    assert prompt == f"\n\n[user] {TASKS['squad'].instruction}\n\n{example.question} [bot]"
    assert tokenizer.decode(question.answer_ids[0]) == example.answers[0]
    assert Prompter.of(tokenizer, [], "plain").style == "plain"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (  # the template adds a system message of its own
            "{% if messages[0].role != 'system' %}<|system>Be kind.<end>{% endif %}"
            "{% for turn in messages %}<|{{ turn.role }}>{{ turn.content }}<end>{% endfor %}<|assistant>",
            "\n\n<|user>Say it.<end><|assistant>",
        ),
        (  # it has no such role
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "<|user>{{ messages[0].content }}<end>",
            "\n\n<|user>Say it.<end>",
        ),
        (  # a system message becomes a part of the user's turn
            "<|user>{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
            "{{ messages[-1].content }}<end>",
            "\n\n<|user>Say it.<end>",
        ),
    ],
)
def test_no_system_message_that_nobody_asked_for_stands_before_the_question(template, expected):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert Prompter.of(tokenizer, [tokenizer.bos_token_id])._turn("Say it.") == expected


def test_bos_that_belongs_to_the_template_stays():
    tokenizer = make_tokenizer(adds_bos=False)
    tokenizer.chat_template = "<bos>{{ messages[0].content }}"
    question = Prompter.of(tokenizer, [tokenizer.bos_token_id]).question(TASKS["squad"], make_examples(1)[0])
    assert question.prompt_ids.count(tokenizer.bos_token_id) == 1


def test_prompt_style_is_checked():
    with pytest.raises(ValueError, match="`prompt_style` must be one of auto, chat, plain, got 'few'"):
        Prompter.of(make_tokenizer(), [], "few")
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        Prompter.of(make_tokenizer(), [], "chat")


def test_context_that_does_not_fit_is_cut_only_when_asked():
    wide, narrow = make_tokenizer(merges=40), make_tokenizer()  # a byte is a token of the second
    text = "river stone lantern village"
    assert cut_to_fit(text, [(wide, 100), (narrow, len(text))], truncate=False) == text
    assert cut_to_fit(text, [(wide, 100), (narrow, 10)], truncate=False) is None
    assert cut_to_fit(text, [(wide, 100), (narrow, 10)], truncate=True) == text[:10]
    assert cut_to_fit(text, [(narrow, 0)], truncate=True) is None


def test_written_examples_are_read_again(tmp_path):
    examples = make_examples(3, closed=True)
    write_examples(tmp_path, "boolq", examples)
    assert load_examples(tmp_path, "boolq") == examples


def test_what_is_cut_always_fits():
    tokenizer = make_tokenizer()  # a byte is a token: four of them are one smiling face
    for room, kept in enumerate([1, 2, 3, 4, 4, 4, 4, 5, 6, 7, 7, 7, 7, 8], 1):
        assert cut_to_fit("aaaa🙂bb🙂", [(tokenizer, room)], truncate=True) == "aaaa🙂bb🙂"[:kept]
    assert cut_to_fit("🙂", [(tokenizer, 3)], truncate=True) is None


@pytest.mark.parametrize("key", ["id", "context", "question", "answers"])
def test_half_a_character_is_named(tmp_path, key):
    row = {"id": "a", "context": "c", "question": "q", "answers": ["x"], "choices": None, "task": "squad"}
    row[key] = ["a \ud83d b"] if key == "answers" else "a \ud83d b"
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "dev.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=rf"line 1: {key!r} holds half a character"):
        load_examples(tmp_path, "squad")


def places(values, path=()):
    """The path of each value in nested dicts and lists."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in pairs:
        yield [*path, key]
        yield from places(value, (*path, key))


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, ...], ids=str)
def test_original_files_of_another_form_are_named(tmp_path, value):
    story = {"type": "test", "storyId": "./a/ab.story", "text": "The cat sat. Yes."}
    questions = [{"q": "Who?", "consensus": {"s": 4, "e": 7}, "validatedAnswers": [{"s": 4, "e": 7}]}]
    document = {"doc_text": "Open at nine.", "spans": {"1": {"start_sp": 0, "end_sp": 12}}}
    turns = [{"turn_id": 1, "role": "user", "utterance": "When?", "references": []}]
    turns.append({"turn_id": 2, "role": "agent", "utterance": "Nine.", "references": [{"sp_id": "1"}]})
    files = {
        "newsqa": {"combined-newsqa-data-v1.json": {"data": [{**story, "questions": questions}]}},
        "doc2dial": {
            "doc2dial_doc.json": {"doc_data": {"dmv": {"d1": document}}},
            "doc2dial_dial_validation.json": {"dial_data": {"dmv": {"d1": [{"dial_id": "x", "turns": turns}]}}},
        },
    }
    for task, own in files.items():
        (tmp_path / task).mkdir()
        for name, content in own.items():
            for path in places(content):
                for other, unchanged in own.items():
                    (tmp_path / task / other).write_text(json.dumps(unchanged))
                (tmp_path / task / name).write_text(json.dumps(changed(content, path, value)))
                try:
                    load_examples(tmp_path, task)  # some places may hold other things, or are not looked at
                except ValueError as error:
                    assert re.search(f"{name}|{task}", str(error)), (path, error)
