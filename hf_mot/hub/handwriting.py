"""What a person has written in a card survives the next rendering: it stands outside two markers."""

import re
from dataclasses import dataclass
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, RepoCard, repocard
from huggingface_hub.utils import yaml_dump
from transformers.utils import logging

from hf_mot.hub.metadata import OWNED_KEYS, owns_tag

logger = logging.get_logger(__name__)

BEGIN = "<!-- hf_mot:begin. What follows is rendered anew with each push; what stands above or below is kept. -->"
END = "<!-- hf_mot:end -->"

_FRONT_MATTER = re.compile(r"\s*---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_BEGIN, _END = re.compile(r"<!-- hf_mot:begin\b.*?-->", re.DOTALL), re.compile(r"<!-- hf_mot:end\b.*?-->", re.DOTALL)
# What `push_to_hub` of transformers puts into a repository without a card.
_TRANSFORMERS = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
    "automatically generated."
)


def compose(data: dict[str, Any], body: str) -> str:
    """A card of nothing but rendered parts: front matter, and `body` between the markers."""
    return f"{_dump(data)}\n{BEGIN}\n\n{body}\n\n{END}\n"


def merge_card(rendered: str, *existing: str | None) -> str:
    """
    Puts a rendered card in the place of an earlier one.

    Args:
        rendered (`str`): What [`compose`] gave.
        existing (`str` or `None`): The cards that are there, the one that counts most first. Of their front matter,
            all keys and tags are kept but those that a rendering owns. Their text outside the markers is kept; one
            without markers is kept whole, and then the rendered text is left out.

    Returns:
        `str`: The card.
    """
    new, old = _read(rendered), [_read(text.replace("\r\n", "\n")) for text in existing if text]
    data = dict(new.data)
    tags = list(new.data.get("tags", []))
    for card in reversed(old):
        data |= {key: value for key, value in card.data.items() if key not in (*OWNED_KEYS, "tags")}
    for card in old:
        tags += [tag for tag in _tags(card.data) if tag not in tags and not owns_tag(tag)]
    data["tags"] = tags

    written = [card for card in old if card.handwriting]
    if not written:
        return f"{_dump(data)}{new.before}{new.rendered}{new.after}"
    if any(card.handwriting != written[0].handwriting for card in written[1:]):
        logger.warning(
            "Both the card on the Hub and the local README.md hold text of your own, and differ. The Hub's is kept; "
            "take over there what is missing."
        )
    if written[0].rendered:
        return f"{_dump(data)}{written[0].before}{new.rendered}{written[0].after}"
    logger.warning(
        "The card has no hf_mot markers: its text is kept as it is, and only its front matter is renewed. For the "
        "rendered text, add the two lines `%s` and `%s`.",
        BEGIN,
        END,
    )
    return f"{_dump(data)}{written[0].before}"


@dataclass(frozen=True)
class _Card:
    """A card in parts: the rendered one with its markers, empty if they are gone, and what is around it."""

    data: dict[str, Any]
    before: str
    rendered: str = ""
    after: str = ""

    @property
    def handwriting(self) -> str:
        return (self.before + self.after).strip()


def _read(text: str) -> _Card:
    data, match = {}, _FRONT_MATTER.match(text)
    if match:
        try:
            data = RepoCard(match[0]).data.to_dict()
        except (repocard.yaml.YAMLError, TypeError, ValueError) as error:  # no YAML, or no mapping of names
            reason = " ".join(str(error).split())
            logger.warning("The front matter of the card cannot be read, and is replaced: %s", reason)
        text = text[match.end() :]
    begins, ends = list(_BEGIN.finditer(text)), list(_END.finditer(text))
    if len(begins) == len(ends) == 1 and begins[0].end() <= ends[0].start():
        start, end = begins[0].start(), ends[0].end()
        return _Card(data, text[:start], text[start:end], text[end:])
    return _Card(data, "" if _is_template(text) else text)


def _is_template(text: str) -> bool:
    """Whether transformers has written it, and no person since."""
    if _TRANSFORMERS not in text:
        return False
    template = ModelCard.from_template(ModelCardData(library_name="transformers"), model_description=_TRANSFORMERS)
    return text.split() == template.text.split()


def _tags(data: dict[str, Any]) -> list[str]:
    tags = data.get("tags") or []
    return [str(tag) for tag in ([tags] if isinstance(tags, str) else tags)]


def _dump(data: dict[str, Any]) -> str:
    return f"---\n{yaml_dump(data, sort_keys=False)}---\n"
