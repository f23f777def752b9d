"""Finds translators on the Hub by the tags of their cards."""

from dataclasses import dataclass

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.utils import get_session

from hf_mot.hub.errors import hub_errors
from hf_mot.hub.metadata import SOURCE_TAG, TAG, TARGET_TAG


@dataclass(frozen=True)
class Entry:
    """
    A translator on the Hub.

    Args:
        repo_id (`str`): Its repository.
        source (`str`, *optional*): Id of its source model, if its card says it.
        target (`str`, *optional*): Id of its target model, likewise.
        downloads (`int`, *optional*): Downloads of the last month, if the Hub says it.
        private (`bool`): Whether it is private.
    """

    repo_id: str
    source: str | None
    target: str | None
    downloads: int | None
    private: bool


def find_translators(
    source: str | None = None, target: str | None = None, *, limit: int = 20, token: str | None = None
) -> list[Entry]:
    """
    Lists translators, those downloaded most first.

    Args:
        source (`str`, *optional*): Only those of this source model, by its id.
        target (`str`, *optional*): Only those of this target model, by its id.
        limit (`int`, *optional*, defaults to 20): As many at most.
        token (`str`, *optional*): For private ones. By default the one of `hf auth login` or HF_TOKEN.

    Returns:
        `list[Entry]`

    Raises:
        `ValueError`: `limit` is below 1.
        `OSError`: the Hub is not reached, or refuses.
    """
    if limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}.")
    tags = [TAG]
    tags += [f"{SOURCE_TAG}{source}"] if source else []
    tags += [f"{TARGET_TAG}{target}"] if target else []
    token = token or get_token()
    with hub_errors("The list of translators", token):
        # The listing itself asks again for half a minute, in silence, where there is no network.
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        models = list(HfApi(token=token).list_models(filter=tags, sort="downloads", limit=limit))
    return [
        Entry(
            repo_id=model.id,
            source=_value(model.tags, SOURCE_TAG),
            target=_value(model.tags, TARGET_TAG),
            downloads=model.downloads,
            private=bool(model.private),
        )
        for model in models
    ]


def _value(tags: list[str] | None, prefix: str) -> str | None:
    return next((tag.removeprefix(prefix) for tag in tags or [] if tag.startswith(prefix)), None)
