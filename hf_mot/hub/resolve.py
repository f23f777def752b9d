"""Models, tokenizers and translators by name: a Hub id, a local directory, a GGUF file, or a packaged model."""

import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import extract_commit_hash

from hf_mot.hub.packaged import PACKAGED_MODELS, gguf_arguments, packaged_model
from hf_mot.names import closest

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_GGUF_MAGIC = b"GGUF"


def load_model(name: str | os.PathLike, dtype: str | torch.dtype = "float32", **kwargs: Any) -> PreTrainedModel:
    """
    Loads a causal language model, ready to read (`eval` mode).

    Args:
        name (`str` or `os.PathLike`): A Hub id, a local directory, a GGUF file, or a key of
            `hf_mot.hub.packaged.PACKAGED_MODELS`; such a model's `name_or_path` is that key. What comes from the Hub
            has its commit in `config._commit_hash`, where a translator's contract finds it.
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"float32"`): `"float32"`, `"bfloat16"`, `"float16"`, or
            `"fp32"`, `"bf16"`, `"fp16"`.
        kwargs: Passed to `AutoModelForCausalLM.from_pretrained`, e.g. `revision` or `device_map`.

    Returns:
        `PreTrainedModel`

    Raises:
        FileNotFoundError: If `name` is a path at which there is nothing.
        OSError: If the Hub has no such model, or is not reached.
        ValueError: If `name` is a file or directory without a readable model or an unknown demo name, or `dtype` is no
            float type.
    """
    dtype = _dtype(dtype)
    path, gguf = _locate(name)
    arguments = {} if gguf is None else gguf_arguments(gguf)
    model = _load(AutoModelForCausalLM, name, path, dtype=dtype, **arguments, **kwargs)
    if name in PACKAGED_MODELS:
        model.name_or_path = model.config.name_or_path = name
    elif model.name_or_path == path and not os.path.exists(path):  # not an adapter's base, loaded by its own name
        model.config._commit_hash = _commit(path, **kwargs)
    return model.eval()


def load_tokenizer(name: str | os.PathLike, **kwargs: Any) -> PreTrainedTokenizerBase:
    """
    Loads a model's tokenizer.

    Args:
        name (`str` or `os.PathLike`): As in [`load_model`].
        kwargs: Passed to `AutoTokenizer.from_pretrained`, e.g. `revision`.

    Returns:
        `PreTrainedTokenizerBase`: A fast one.

    Raises:
        ValueError: If the model has a slow tokenizer only; else as [`load_model`].
    """
    path, gguf = _locate(name)
    arguments = {} if gguf is None else {"gguf_file": gguf.name}
    tokenizer = _load(AutoTokenizer, name, path, **arguments, **kwargs)
    if not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer of {name} is slow ({type(tokenizer).__name__}), but two tokenizations are aligned by the "
            "character offsets that only a fast one gives. Save it with a tokenizer.json, or choose another model."
        )
    if name in PACKAGED_MODELS:
        tokenizer.name_or_path = name
    return tokenizer


def load_translator(name: str | os.PathLike, **kwargs: Any) -> PreTrainedModel:
    """
    Loads a translator, ready to translate (`eval` mode).

    Args:
        name (`str` or `os.PathLike`): A Hub id, or the directory that a fit wrote.
        kwargs: Passed to `AutoModel.from_pretrained`, e.g. `revision`, `token`, or `subfolder="no_source"` for the
            twin. Offline (`HF_HUB_OFFLINE=1`) what was loaded once comes from the local cache.

    Returns:
        `PreTrainedModel`: A [`MoTModel`], with its `fit_report`.

    Raises:
        FileNotFoundError: If `name` is a path at which there is nothing.
        OSError: If the Hub has no such translator or revision, or is not reached.
        ValueError: If there is no translator, or its weights are damaged.
    """
    load_translator_config(name, **kwargs)
    if _is_path(name):
        name = Path(name).expanduser().absolute()
    return _load(AutoModel, name, name, **kwargs).eval()


def load_translator_config(name: str | os.PathLike, **kwargs: Any) -> PreTrainedConfig:
    """A translator's [`MoTConfig`] alone. Arguments and errors as in [`load_translator`]."""
    given = name
    if _is_path(name):
        name = Path(name).expanduser().absolute()
        path = name / kwargs.get("subfolder", "")
        given = Path(given) / kwargs.get("subfolder", "")
        if not path.exists():
            raise FileNotFoundError(
                f"{given} does not exist. Check the path, or fit a translator first (`hf-mot fit`)."
            )
        if not (path / "config.json").is_file():
            raise ValueError(f"{given} holds no translator: it has no config.json. Give what `hf-mot fit` wrote.")
    config = _load(AutoConfig, name, name, **kwargs)
    if config.model_type != "mot":
        raise ValueError(
            f"{given} holds a model of type {config.model_type}, not a translator (mot). Give a translator's "
            "directory or Hub id; models are given as `source` and `target`."
        )
    return config


def _locate(name: str | os.PathLike) -> tuple[str, Path | None]:
    """What `from_pretrained` takes for a model's name, and the GGUF file if it is one."""
    if name in PACKAGED_MODELS:
        return str(packaged_model(name)), None
    # Absolute, so that a model does not take a folder's name for its Hub id.
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            files = sorted(path.glob("*.gguf"))
            way_out = f"Give its GGUF file, {files[0]}." if files else "Give a directory that save_pretrained wrote."
            raise ValueError(f"{name} holds no model: it has no config.json. {way_out}")
        return str(path), None
    if path.is_file():
        with open(path, "rb") as file:
            if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
                raise ValueError(f"{name} is a file, but no GGUF file. Give a GGUF file, a directory or a Hub id.")
        return str(path.parent), path
    if _is_path(name):
        raise FileNotFoundError(f"{name} does not exist. Check the path, or give a Hub id (owner/name).")
    if str(name).startswith("demo/"):
        close = closest(name, PACKAGED_MODELS)
        hint = f"Did you mean {close}?" if close else f"There are {' and '.join(PACKAGED_MODELS)}."
        raise ValueError(f"{name} is no model of the demo. {hint}")
    return str(name), None


def _is_path(name: str | os.PathLike) -> bool:
    """Whether a name can only be meant as a local path: a Hub id is `name` or `owner/name`."""
    text = str(name)
    return (
        isinstance(name, os.PathLike)
        or os.path.exists(name)
        or text.startswith((".", "~", os.sep))
        or text.endswith(".gguf")
        or text.count("/") > 1
        or "\\" in text
    )


def _load(auto_class: type, name: str | os.PathLike, path: str | os.PathLike, **kwargs: Any) -> Any:
    """`from_pretrained`, which says in several lines that something is not there; here it is one."""
    try:
        return auto_class.from_pretrained(path, **kwargs)
    except OSError as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        way_out = "Check the directory."
        if not os.path.exists(path):
            way_out = (
                "Check the id (owner/name), the network, the revision if one was given and, for a private or gated "
                "repository, `hf auth login`; or give a local directory."
            )
        raise OSError(f"{name} cannot be loaded: {said} {way_out}") from error
    except SafetensorError as error:
        raise ValueError(f"The weights of {name} are truncated or damaged ({error}). Download them again.") from error


def _commit(
    name: str,
    revision: str | None = None,
    subfolder: str = "",
    cache_dir: Any = None,
    gguf_file: str | None = None,
    **_,
) -> str | None:
    """The commit of a Hub model that was just loaded, by its folder in the local cache: transformers keeps none."""
    file = os.path.join(subfolder, gguf_file or "config.json")
    found = try_to_load_from_cache(name, file, cache_dir=cache_dir, revision=revision)
    return extract_commit_hash(found, None) if isinstance(found, str) else None


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, _DTYPES.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"`dtype` must be float32, bfloat16 or float16, got {dtype!r}.")
    return found
