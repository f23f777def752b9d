"""Publishes a translator: files, card and figures, in one commit to one repository of the Hub."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_mot.configuration_mot import MoTConfig
from hf_mot.hub.card import minimal_card, render_card
from hf_mot.hub.errors import hub_errors, redact
from hf_mot.hub.handwriting import merge_card
from hf_mot.hub.metadata import eval_results
from hf_mot.hub.parts import (
    CARD,
    FIT_REPORT,
    as_folder,
    check_parts,
    check_private,
    find_parts,
    is_part,
    read_report,
    read_text,
)
from hf_mot.hub.resolve import load_translator_config

logger = logging.get_logger(__name__)

# What the rendering of a report of any shape can raise.
_MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class Push:
    """
    What a push did.

    Args:
        repo_id (`str`): The repository.
        url (`str`): Of the repository, or of the pull request.
        commit (`str`): The commit's hash.
        revision (`str`): Where the commit is: a branch, or `refs/pr/N`.
        changed (`bool`): Whether there was anything to commit.
        card (`str`): `"rendered"`, `"minimal"` (without figures) or `"none"` (refused, so that the earlier one stays).
        files (`list[str]`): What the repository holds of this translator now.
        removed (`list[str]`): What an earlier push had left behind.
        left_out (`dict[str, str]`): What is in the folder and was not published → why.
    """

    repo_id: str
    url: str
    commit: str
    revision: str
    changed: bool
    card: str
    files: list[str]
    removed: list[str]
    left_out: dict[str, str]


def push(
    translator: str | os.PathLike | PreTrainedModel,
    repo_id: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> Push:
    """
    Publishes a translator with its code, its twin, its card and its figures. All of it becomes one commit: a push that
    fails leaves the files of the repository as they were, and can be repeated.

    Args:
        translator (`str`, `os.PathLike` or [`MoTModel`]): The folder that a fit wrote, or a loaded translator.
        repo_id (`str`): Where to: `owner/name`. It is made if it does not exist.
        private (`bool`, *optional*, defaults to `False`): Whether it must be private.
        create_pr (`bool`, *optional*, defaults to `False`): Proposes the commit in a pull request.
        revision (`str`, *optional*, defaults to `"main"`): The branch, made if it does not exist, or `refs/pr/N`.
        token (`str`, *optional*): A token with write access. By default the one of `hf auth login` or HF_TOKEN.

    Returns:
        [`Push`]

    Raises:
        `ValueError`: the folder is not a whole translator, or holds a token or the path of the home folder; `repo_id`
            is malformed; the repository is public, but `private` was asked for.
        `OSError`: the Hub is not reached, or refuses.
    """
    token = token or get_token()
    with hub_errors(repo_id, token), as_folder(translator) as folder:
        _check_repo_id(repo_id)
        config = load_translator_config(folder)
        report, damage = read_report(folder)
        files, left_out = find_parts(folder)
        if damage:
            files, left_out = [path for path in files if path != FIT_REPORT], {**left_out, FIT_REPORT: damage}
        check_parts(folder, files, token)
        local_card = read_text(folder / CARD) if (folder / CARD).is_file() else ""
        check_private(CARD, local_card, token)
        if token is None:
            raise OSError("Publishing needs a token. Log in with `hf auth login`, or set HF_TOKEN.")

        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        head = _head(api, repo_id, revision, create_pr)
        if private and not head.private:
            raise ValueError(f"`private` was asked for, but {repo_id} exists and is public. Nothing was published.")
        remote = [sibling.rfilename for sibling in head.siblings or []]
        hub_card = read_text(Path(api.hf_hub_download(repo_id, CARD, revision=head.sha))) if CARD in remote else ""

        card, kind, figures = _make_card(config, report, damage, repo_id, [hub_card, local_card])
        contents = {path: folder / path for path in files} | {path: text.encode() for path, text in figures.items()}
        if card is not None:
            contents[CARD] = card.encode()
        removed = [path for path in remote if is_part(path) and path not in contents]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the card's metadata, checked before
            commit = api.create_commit(
                repo_id,
                [CommitOperationAdd(path, content) for path, content in contents.items()]
                + [CommitOperationDelete(path) for path in removed],
                commit_message="Upload translator",
                revision=revision,
                create_pr=create_pr,
                parent_commit=head.sha,  # what somebody else has changed meanwhile is not overwritten
            )
    return Push(
        repo_id=repo_id,
        url=commit.pr_url or str(commit.repo_url),
        commit=commit.oid,
        revision=commit.pr_revision or revision or "main",
        changed=commit.oid != head.sha,
        card=kind,
        files=sorted(contents),
        removed=sorted(removed),
        left_out=left_out,
    )


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(
            f"`repo_id` must be owner/name, of letters, digits, `-`, `_` and `.`, got {repo_id!r}."
        ) from error


def _head(api: HfApi, repo_id: str, revision: str | None, create_pr: bool) -> ModelInfo:
    """What the commit goes on top of."""
    try:
        return api.model_info(repo_id, revision=revision)
    except RevisionNotFoundError:
        if create_pr or revision.startswith("refs/"):
            raise
        api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.model_info(repo_id, revision=revision)


def _make_card(
    config: MoTConfig, report: dict[str, Any], damage: str | None, repo_id: str, existing: list[str]
) -> tuple[str | None, str, dict[str, str]]:
    """Card, its kind and the files of benchmark figures. Nothing that is wrong with them costs the weights."""
    candidates, figures = {"minimal": minimal_card(config, repo_id)}, {}
    try:
        if damage:
            raise ValueError(f"{FIT_REPORT} is {damage}")
        rendered, figures = render_card(config, report, repo_id), eval_results(report)
        candidates = {"rendered": rendered, **candidates}
    except _MALFORMED as error:
        reason = redact(f"{type(error).__name__}: {error}")
        logger.warning("The card holds no figures, since the fit report cannot be rendered (%s).", reason)
    for kind, candidate in candidates.items():
        card = merge_card(candidate, *existing)
        try:
            ModelCard(card, ignore_metadata_errors=True).validate()
            return card, kind, figures
        except ValueError as error:
            logger.warning("The Hub refuses the %s card: %s", kind, redact(" ".join(str(error).split())))
    return None, "none", figures
