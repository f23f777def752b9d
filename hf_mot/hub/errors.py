"""What the Hub and the network raise, as one line that says what to do and holds neither token nor home folder."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants

# HTTPError: of the HTTP library that huggingface_hub is built on, which differs between its releases.
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


def private_parts(text: str, token: str | None = None) -> list[str]:
    """What `text` holds that nobody else should read: `"a token"`, `"the path of your home folder"`."""
    found = ["a token"] if _TOKEN.search(text) or (token and token in text) else []
    return found + (["the path of your home folder"] if _home().search(text) else [])


def redact(text: str, token: str | None = None) -> str:
    """`text` without tokens, and with `~` for the home folder."""
    if token:
        text = text.replace(token, "hf_…")
    return _home().sub("~", _TOKEN.sub("hf_…", text))


def _home() -> re.Pattern:
    home = str(Path.home())
    # A root directory as home would be found everywhere.
    return re.compile(re.escape(home) + r"(?![\w.-])" if len(home) > len(os.sep) else r"(?!)")


@contextmanager
def hub_errors(subject: str, token: str | None = None) -> Iterator[None]:
    """
    Turns what goes wrong on the way to the Hub into an `OSError` of one line, and keeps secrets out of any message.

    Args:
        subject (`str`): What was asked for, e.g. a repository's id.
        token (`str`, *optional*): The token in use.
    """
    try:
        yield
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise OSError(redact(_explain(error, subject), token)) from error
    except RuntimeError as error:
        # huggingface_hub wraps what happened to a large file.
        if not isinstance(error.__cause__, HTTPError):
            raise
        raise OSError(redact(_explain(error.__cause__, subject), token)) from error
    except (ValueError, OSError) as error:
        text = redact(str(error), token)
        if text == str(error):
            raise
        raise (ValueError if isinstance(error, ValueError) else OSError)(text) from error


def _explain(error: Exception, subject: str) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return f"{subject}: the Hub is not asked in offline mode. Unset HF_HUB_OFFLINE."
    if not isinstance(error, HfHubHTTPError):
        return (
            f"{subject}: the Hub ({constants.ENDPOINT}) is not reached ({type(error).__name__}). Check the network "
            "and HF_ENDPOINT, then try again."
        )
    status = error.response.status_code
    said = " ".join((error.server_message or "no reason given").split()).rstrip(".")
    if isinstance(error, RevisionNotFoundError):
        return f"{subject} has no such `revision`. Choose a branch that exists, or refs/pr/N of an open pull request."
    if status == 401:
        return (
            f"{subject}: the Hub does not know who is asking (401). Log in with `hf auth login`, or set HF_TOKEN to a "
            "valid token."
        )
    if isinstance(error, RepositoryNotFoundError):
        return f"{subject} does not exist, or is private and closed to this token. Check the id and `hf auth whoami`."
    if status == 403:
        return (
            f"{subject}: the token may not do this (403: {said}). Use one with write access, or propose the files in "
            "a pull request (`--create-pr`)."
        )
    return f"{subject}: the Hub answered {status} ({said}). Try again later."
