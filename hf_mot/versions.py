"""The versions that a result was made with."""

import platform

import torch
import transformers


def versions() -> dict[str, str]:
    from . import __version__

    return {
        "hf_mot": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
