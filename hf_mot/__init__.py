"""Lets one language model read what another has already read: KV cache translation as `PreTrainedModel`s."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["MoTConfig", "MoTModel", "ReplayPlan", "TranslatedCache", "attach", "custom_generate", "detach"]

# `hf-mot --help` must not wait for torch and transformers: for the command alone, they load when a command runs.
_IS_COMMAND = Path((sys.argv or [""])[0]).stem == "hf-mot" or sys.orig_argv[1:3] == ["-m", "hf_mot"]

if TYPE_CHECKING or not _IS_COMMAND:
    from ._api import MoTConfig, MoTModel, ReplayPlan, TranslatedCache, attach, custom_generate, detach


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import _api

    return getattr(_api, name)
