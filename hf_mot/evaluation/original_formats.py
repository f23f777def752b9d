"""NewsQA and Doc2Dial from the files that their authors publish: their text may not be shipped, so users bring it."""

import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEWSQA_JSON, NEWSQA_CSV = "combined-newsqa-data-v1.json", "combined-newsqa-data-v1.csv"
NEWSQA_SPLIT = "{}_story_ids.csv"
DOC2DIAL_FILES = ("doc2dial_doc.json", "doc2dial_dial_validation.json")

Span = tuple[int, int]


def read_newsqa(folder: Path, split: str = "test") -> Iterator[dict[str, Any]]:
    """
    The questions of NewsQA (Trischler et al., 2017) that their annotators agreed on, from either file that Maluuba's
    scripts write; without those found bad or without an answer. Both give the same rows.

    Args:
        folder (`Path`): Where `combined-newsqa-data-v1.json` is or, if it is not, `combined-newsqa-data-v1.csv`.
        split (`str`, *optional*, defaults to `"test"`): Stories of this split. The CSV does not name it: it is that of
            the scripts' list `test_story_ids.csv`, if that lies beside it, else all stories are taken.

    Raises:
        FileNotFoundError: If neither file is there.
        ValueError: If it has not the published form; the message names the place and the key or column.
    """
    read = _newsqa_json if (folder / NEWSQA_JSON).is_file() else _newsqa_csv
    for name, text, question, spans in read(folder, split):
        answers = [text[start:end].strip(" \n.,") for start, end in spans]
        answers = [answer for answer in dict.fromkeys(answers) if answer]
        if answers:
            yield {
                "id": f"newsqa/{name}",
                "context": text,
                "question": question.strip(),
                "answers": answers,
                "choices": None,
                "task": "newsqa",
            }


def _newsqa_json(folder: Path, split: str) -> Iterator[tuple[str, str, str, list[Span]]]:
    """Name, story, question and the spans of its answers, the consensus first; none if there is no consensus."""
    path = folder / NEWSQA_JSON
    for number, story in enumerate(_need(_read(path), "data", path, list)):
        where = f"{path}, story {number}"
        if _need(story, "type", where) != split:
            continue
        text, name = _need(story, "text", where, str), Path(_need(story, "storyId", where, str)).stem
        for index, question in enumerate(_need(story, "questions", where, list)):
            own = f"{where}, question {index}"
            consensus = _need(question, "consensus", own, dict)
            # Without a start it is a bad question, or one without an answer.
            others = _need(question, "validatedAnswers", own, list) if "validatedAnswers" in question else []
            found = [consensus, *others] if "s" in consensus else []
            found = [span for span in found if not isinstance(span, dict) or "s" in span]
            spans = [(_need(span, "s", own, int), _need(span, "e", own, int)) for span in found]
            yield f"{name}-{index}", text, _need(question, "q", own, str), spans


def _newsqa_csv(folder: Path, split: str) -> Iterator[tuple[str, str, str, list[Span]]]:
    """The same from the CSV, a question a row."""
    path, listed = folder / NEWSQA_CSV, folder / NEWSQA_SPLIT.format(split)
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds neither {NEWSQA_JSON} nor {NEWSQA_CSV}. Put one of them there, as Maluuba's scripts "
            "write it."
        )
    stories = {_need(row, "story_id", where) for where, row in _rows(listed)} if listed.is_file() else None
    counts: Counter[str] = Counter()
    for where, row in _rows(path):
        story_id = _need(row, "story_id", where)
        name = f"{Path(story_id).stem}-{counts[story_id]}"
        counts[story_id] += 1
        if stories is None or story_id in stories:
            # The ranges count a line end as one character.
            text = _need(row, "story_text", where).replace("\r\n", "\n")
            yield name, text, _need(row, "question", where), _agreed_spans(row, where)


def _agreed_spans(row: dict[str, str], where: str) -> list[Span]:
    """
    The spans of a row as the JSON has them, by the scripts' rule: validators, asked where the first annotators did not
    agree, must have given one answer at least half of their votes; without validators the most frequent answer counts.
    """
    validated = _need(row, "validated_answers", where)
    if validated:
        votes = _votes(validated, where)
        consensus = max(votes, key=votes.get, default="none")
        agreed = votes.get(consensus, 0) >= sum(votes.values()) / 2
        ranges = [consensus, *votes] if agreed else []
    else:
        said = _need(row, "answer_char_ranges", where).replace("|", ",").split(",")
        ranges = [consensus] = [Counter(said).most_common(1)[0][0]]
    if not ranges or ":" not in consensus:
        return []
    return [_span(text, where) for text in ranges if ":" in text]


def _votes(validated: str, where: str) -> dict[str, int]:
    try:
        votes = json.loads(validated)
    except ValueError:
        votes = None
    if not isinstance(votes, dict) or not all(isinstance(count, int) for count in votes.values()):
        raise ValueError(
            f"{where}: the column 'validated_answers' must be empty or a JSON object of votes, got {validated!r}."
        )
    return votes


def _span(text: str, where: str) -> Span:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise ValueError(f"{where}: a range must be like 294:297, got {text!r}.")
    return int(match[1]), int(match[2])


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Where a row is, and its cells by the head's columns."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 1):
                if None in row or None in row.values():  # cells without a column, columns without a cell
                    raise ValueError(f"{path}, row {number}, has not the columns of the head. Build it again.")
                yield f"{path}, row {number}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not CSV ({error}). Copy or build it again.") from error


def read_doc2dial(folder: Path) -> Iterator[dict[str, Any]]:
    """
    The user's turns of the dialogues of Doc2Dial 1.0 (Feng et al., 2020) whose answer is grounded in the document: the
    question is the dialogue so far, the answer what the agent's next turn refers to, from the first to the last span.

    Args:
        folder (`Path`): Where `doc2dial_doc.json` and `doc2dial_dial_validation.json` are.

    Raises:
        FileNotFoundError: If one of the two files is not there.
        ValueError: If one is no JSON, or lacks a key.
    """
    documents_path, dialogues_path = (folder / name for name in DOC2DIAL_FILES)
    documents = _need(_read(documents_path), "doc_data", documents_path)
    of_all = _need(_read(dialogues_path), "dial_data", dialogues_path, dict)
    for domain in of_all:
        of_domain = _need(of_all, domain, dialogues_path, dict)
        for doc_id in of_domain:
            dialogues = _need(of_domain, doc_id, f"{dialogues_path}, {domain}", list)
            document = _need(_need(documents, domain, documents_path), doc_id, f"{documents_path}, {domain}")
            where = f"{documents_path}, {domain}, {doc_id}"
            text, spans = _need(document, "doc_text", where, str), _need(document, "spans", where)
            for dialogue in dialogues:
                where = f"{dialogues_path}, {domain}, {doc_id}"
                yield from _turns(dialogue, text, spans, domain, where)


def _turns(dialogue, text: str, spans, domain: str, where: str) -> Iterator[dict[str, Any]]:
    dial_id, turns = _need(dialogue, "dial_id", where), _need(dialogue, "turns", where, list)
    where = f"{where}, dialogue {dial_id}"
    said = []
    for turn, following in itertools.pairwise(turns):
        said.append(f"{_need(turn, 'role', where)}: {_need(turn, 'utterance', where)}")
        references = _need(following, "references", where, (list, type(None)))
        if turn["role"] != "user" or _need(following, "role", where) != "agent" or not references:
            continue
        place = f"{where}, the document's spans"
        grounds = [_need(spans, _need(reference, "sp_id", where, str), place) for reference in references]
        starts, ends = ([_need(span, key, place, int) for span in grounds] for key in ("start_sp", "end_sp"))
        answer = text[min(starts) : max(ends)].strip()
        if answer:
            yield {
                "id": f"doc2dial/{domain}/{dial_id}_{_need(turn, 'turn_id', where)}",
                "context": text,
                "question": "\n".join(said),
                "answers": [answer],
                "choices": None,
                "task": "doc2dial",
            }


def _read(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there. Put the file of that name there, as its authors publish it.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). Copy or build it again.") from error


def _need(holder: Any, key: Any, where: Any, kind: type | tuple[type, ...] = object) -> Any:
    if not isinstance(holder, dict) or key not in holder:
        raise ValueError(f"{where}: the key {key!r} is missing, so this is not the published format.")
    if not isinstance(holder[key], kind):
        raise ValueError(
            f"{where}: the key {key!r} holds a {type(holder[key]).__name__}, so this is not the published format."
        )
    return holder[key]
