"""The command line: one file per command, each with `HELP`, `add_arguments(parser)` and `run(args) -> int`.

What a command's file imports at its top must be light, so that `--help` answers at once: torch, transformers and the
rest of the package are imported inside `run`.
"""

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_mot.names import did_you_mean

PLANS = "none, full, full:6-11, sparse:128, bottom:6, tokens:32, uncertain:32, resume:5 or bottom:6+tokens:32"
AUTO = "or by the measured curve auto, auto:0.25 (of native FLOPs) or auto:recovery=0.9"


def named_model(args: argparse.Namespace, translator: Any, side: str) -> tuple[str, dict[str, str]]:
    """The model that `--source` or `--target` names, by default the one the translator was made for; and the commit of
    that one, as an argument to load it with."""
    given, contract = getattr(args, side), getattr(translator.config, side)
    if given is not None:
        return given, {}
    if contract["id"] is None:
        raise ValueError(
            f"`--{side}` is needed: the translator was made with a local {side} model, whose path is not recorded. "
            f"Give --{side} a folder, a GGUF file, a Hub id or a demo name."
        )
    return contract["id"], {"revision": contract["revision"]} if contract["revision"] else {}


def load_pair(args: argparse.Namespace, translator: Any) -> dict[str, Any]:
    """The models and tokenizers of a command on a translator: those that `--source` and `--target` name, else its own,
    at their commits. A translator that reads no source gets none."""
    from hf_mot.hub.resolve import load_model, load_tokenizer

    sides = ("source", "target") if translator.config.source_layers else ("target",)
    # Both names first: what is missing must not cost a load.
    named = {side: named_model(args, translator, side) for side in sides}
    pair: dict[str, Any] = {"source": None, "source_tokenizer": None}
    for side, (name, revision) in named.items():
        pair[side] = load_model(name, dtype=args.dtype, **revision)
        pair[f"{side}_tokenizer"] = load_tokenizer(name, **revision)
    return pair


def check_output_file(path: str | None, argument: str) -> None:
    """Refuses a file that cannot be written, before any work is done for it."""
    if path is None:
        return
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"`{argument}` names a file in a folder that does not exist: {path}. Create it first.")
    if Path(path).is_dir():
        raise ValueError(f"`{argument}` must name a file, got the folder {path}.")


def check_output_folder(path: str | None, argument: str) -> None:
    """Refuses a folder that is a file, or would lie in one, before any work is done for it; it is made later."""
    if path is None:
        return
    folder = Path(path).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir():
        raise ValueError(f"`{argument}` must name a folder, got {path}, and {there} is a file. Give another name.")


def check_choice(value: str, choices: Sequence[str], argument: str) -> None:
    """Refuses a name that is none of `choices`, with the one that was probably meant."""
    if value not in choices:
        hint = did_you_mean(value, choices)
        raise ValueError(f"`{argument}` is {value!r}. {hint}Choose from {', '.join(choices)}.")


def read_json(path: str, argument: str) -> dict[str, Any]:
    """The object in a JSON file that an argument names."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"`{argument}` must name a JSON file, but {path} is none ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"`{argument}` must name a file with a JSON object, but {path} holds none.")
    return value


def given_options(args: argparse.Namespace, *names: str) -> list[str]:
    """Those of some options that are given, as they are written on the command line."""
    given = [name for name in names if getattr(args, name) is not None and getattr(args, name) is not False]
    return ["--" + name.replace("_", "-") for name in given]


def split_names(given: str | None) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in (given or "").split(",") if name.strip()]


def load_tasks(given: str | None, data: str | None) -> dict[str, Any]:
    """The examples of the tasks that `--tasks` names, from the folder `--data` or from the Hub."""
    from hf_mot.evaluation.hub_tasks import load_hub_examples
    from hf_mot.evaluation.tasks import find_task, load_examples

    names = split_names(given)
    for name in names:
        find_task(name)
    return {name: load_hub_examples(name) if data is None else load_examples(data, name) for name in names}


def command_line(argv: Sequence[str], program: Sequence[str] = ("hf-mot",)) -> str:
    """The command for a report: files and folders of this machine by their names alone."""
    parts = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    local = [
        os.path.basename(part.rstrip("/")) if os.path.exists(part) or os.path.isabs(part) else part for part in parts
    ]
    return shlex.join([*program, *local])
