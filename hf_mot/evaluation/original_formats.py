"""NewsQA and Doc2Dial from the files that their authors publish: their text may not be shipped, so users bring it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEWSQA_FILE = "combined-newsqa-data-v1.json"
DOC2DIAL_FILES = ("doc2dial_doc.json", "doc2dial_dial_validation.json")


def read_newsqa(folder: Path, split: str = "test") -> Iterator[dict[str, Any]]:
    """
    Questions of `combined-newsqa-data-v1.json` (Trischler et al., 2017), as Maluuba's scripts write it, that their
    annotators agreed on; without those found bad or without an answer.

    Args:
        folder (`Path`): Where the file is.
        split (`str`, *optional*, defaults to `"test"`): Stories of this `type`.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: If it is no JSON, or lacks a key.
    """
    path = folder / NEWSQA_FILE
    for number, story in enumerate(_need(_read(path), "data", path)):
        where = f"{path}, story {number}"
        if _need(story, "type", where) != split:
            continue
        text, name = _need(story, "text", where), Path(_need(story, "storyId", where)).stem
        for index, question in enumerate(_need(story, "questions", where)):
            consensus = _need(question, "consensus", f"{where}, question {index}")
            if "s" not in consensus:  # a bad question, or one without an answer
                continue
            spans = [consensus, *question.get("validatedAnswers", [])]
            answers = [text[span["s"] : span["e"]].strip(" \n.,") for span in spans if "s" in span]
            answers = [answer for answer in dict.fromkeys(answers) if answer]
            if answers:
                yield {
                    "id": f"newsqa/{name}-{index}",
                    "context": text,
                    "question": _need(question, "q", f"{where}, question {index}").strip(),
                    "answers": answers,
                    "choices": None,
                    "task": "newsqa",
                }


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
    for domain, of_domain in _need(_read(dialogues_path), "dial_data", dialogues_path).items():
        for doc_id, dialogues in of_domain.items():
            document = _need(_need(documents, domain, documents_path), doc_id, f"{documents_path}, {domain}")
            where = f"{documents_path}, {domain}, {doc_id}"
            text, spans = _need(document, "doc_text", where), _need(document, "spans", where)
            for dialogue in dialogues:
                where = f"{dialogues_path}, {domain}, {doc_id}"
                yield from _turns(dialogue, text, spans, domain, where)


def _turns(dialogue, text: str, spans, domain: str, where: str) -> Iterator[dict[str, Any]]:
    dial_id, turns = _need(dialogue, "dial_id", where), _need(dialogue, "turns", where)
    where = f"{where}, dialogue {dial_id}"
    said = []
    for turn, following in zip(turns, turns[1:], strict=False):
        said.append(f"{_need(turn, 'role', where)}: {_need(turn, 'utterance', where)}")
        references = _need(following, "references", where)
        if turn["role"] != "user" or following["role"] != "agent" or not references:
            continue
        grounds = [
            _need(spans, _need(reference, "sp_id", where), f"{where}, the document's spans")
            for reference in references
        ]
        answer = text[min(span["start_sp"] for span in grounds) : max(span["end_sp"] for span in grounds)].strip()
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


def _need(holder: Any, key: str, where: Any) -> Any:
    if not isinstance(holder, dict) or key not in holder:
        raise ValueError(f"{where}: the key {key!r} is missing, so this is not the published format.")
    return holder[key]
