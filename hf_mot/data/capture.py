"""Captures, once, what training reads of both frozen models. The form on disk is described in `data.shards`."""

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_mot.baselines.states import make_shell
from hf_mot.capture_mot import prefill, source_states
from hf_mot.compat_mot import run_decoder
from hf_mot.configuration_mot import MoTConfig
from hf_mot.contract_mot import check_model, check_tokenizer
from hf_mot.data.shards import (
    FORMAT_VERSION,
    INDEX,
    open_shard,
    read_index,
    refuse_other_pair,
    shard_bytes,
    write_index,
    write_shard,
)
from hf_mot.evaluation.answers import prompt_logits, right_pad, wrap
from hf_mot.layers_mot import input_device
from hf_mot.modeling_mot import MoTModel
from hf_mot.rows_mot import left_pad, positions_from_mask
from hf_mot.training.examples import TrainingExample
from hf_mot.versions import versions

logger = logging.get_logger(__name__)

MAX_BYTES = 20_000_000_000
SHARD_BYTES = 2**28
_HEADER = 4096  # bytes of a shard beside its tensors, the examples' names not counted


def capture_states(
    examples: Iterable[TrainingExample],
    config: MoTConfig | MoTModel,
    *,
    source: PreTrainedModel,
    target: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike,
    target_layers: Sequence[int] | None = None,
    dtype: str = "bfloat16",
    top_logits: int | None = 64,
    max_bytes: int = MAX_BYTES,
    batch_size: int = 8,
    max_shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> dict[str, Any]:
    """
    Runs both models over training examples and keeps their states in a folder. Called again with the same examples
    after a kill, it goes on behind the last whole shard, and the folder ends up the same.

    Args:
        examples (`Iterable[TrainingExample]`): As [`iterate_examples`] gives them; in the same order when resumed.
        config ([`MoTConfig`] or [`MoTModel`]): Names the pair and the source layers to keep.
        source, target (`PreTrainedModel`): The pair's models.
        source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`): Their fast tokenizers.
        folder (`str` or `os.PathLike`): Where to write; new, empty, or with states of the same pair and settings.
        target_layers (`Sequence[int]`, *optional*): Target layers whose native states are kept. By default all.
        dtype (`str`, *optional*, defaults to `"bfloat16"`): Of the states on disk; or `"float32"`, which is exact.
        top_logits (`int`, *optional*, defaults to 64): Keep so many of the native target's likeliest next tokens, for
            each scored prompt token. `None`: its last hidden states instead. 0: nothing of the prompt, which is then
            not run.
        max_bytes (`int`, *optional*, defaults to 20 GB): Ends before the shards take more.
        batch_size (`int`, *optional*, defaults to 8): Examples run at once.
        max_shard_bytes (`int`, *optional*, defaults to 256 MB): Size of a shard's tensors, held in memory until it is
            written.
        progress (`bool`, *optional*, defaults to `True`): Shows a progress bar.

    Returns:
        `dict`: The index of the folder; `complete` says whether all examples are in it.

    Raises:
        ValueError: Models, tokenizers or a folder of another pair or of other settings, other examples than those
            captured, layers that are not there, impossible sizes, NaN or infinite states.
    """
    config = config if isinstance(config, PreTrainedConfig) else config.config
    folder = Path(folder)
    fresh = _new_index(config, target, target_layers, dtype, top_logits, max_shard_bytes)
    for side, model, tokenizer in (
        ("source", source, source_tokenizer),
        ("target", target, target_tokenizer),
    ):
        check_model(getattr(config, side), model, side)
        check_tokenizer(getattr(config, side), tokenizer, f"{side}_tokenizer")
        fresh["settings"][f"{side}_dtype"] = str(model.dtype).removeprefix("torch.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be 1 or more, got {batch_size}.")
    if top_logits is None:
        _check_head(target)
    index = _open_folder(folder, fresh)
    shell = make_shell(config.source, config.target, config.source_layers)
    examples, digest = _behind_captured(iter(examples), index, folder)
    done = sum(shard["examples"] for shard in index["shards"])
    with tqdm(initial=done, unit="example", desc="Capturing", disable=not progress) as bar:
        for group, ended in _groups(examples, index, max_bytes):
            index["complete"] = ended
            rows = []
            for start in range(0, len(group), batch_size):
                batch = group[start : start + batch_size]
                rows += _capture(batch, shell, index["settings"], source, source_tokenizer, target, target_tokenizer)
                bar.update(len(batch))
            if group:
                if not index["shards"]:  # before the first: a killed run goes on where it is
                    folder.mkdir(parents=True, exist_ok=True)
                    write_index(folder, {**index, "complete": False})
                for example in group:
                    digest.update(_content(example))
                index["shards"].append(write_shard(folder, len(index["shards"]), rows))
                index["digest"] = digest.hexdigest()
                written = sum(shard["bytes"] for shard in index["shards"])
                bar.set_postfix_str(f"{written / 1e9:.2f} of {max_bytes / 1e9:.2f} GB")
            if index["shards"]:
                write_index(folder, index)
    if not index["shards"]:
        raise ValueError(
            "`examples` is empty: there is nothing to capture."
            if index["complete"]
            else f"`max_bytes` of {max_bytes:,} has no room for one example. Allow more, or keep fewer layers."
        )
    if not index["complete"]:
        logger.info(f"{folder} has reached its {max_bytes:,} bytes; the examples that follow are left out.")
    return index


def _new_index(config, target, target_layers, dtype, top_logits, max_shard_bytes) -> dict[str, Any]:
    depth = len(config.target["geometry"]["layers"])
    target_layers = list(range(depth)) if target_layers is None else [int(layer) for layer in target_layers]
    if not target_layers or sorted(set(target_layers)) != target_layers or not set(target_layers) <= set(range(depth)):
        raise ValueError(f"`target_layers` must rise within 0..{depth - 1}, got {target_layers}.")
    if not config.source_layers:
        raise ValueError("`config` has no `source_layers`: there is nothing of the source to capture. Name them.")
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"`dtype` must be 'bfloat16' or 'float32', got {dtype!r}.")
    vocab_size = target.get_output_embeddings().weight.shape[0]
    if top_logits is not None and not 0 <= top_logits <= vocab_size:
        raise ValueError(f"`top_logits` must be None or from 0 to {vocab_size}, got {top_logits}.")
    return {
        "format_version": FORMAT_VERSION,
        "source": config.source,
        "target": config.target,
        "settings": {
            "source_layers": list(config.source_layers),
            "target_layers": target_layers,
            "dtype": dtype,
            "top_logits": top_logits,
            "hidden_dim": target.get_output_embeddings().weight.shape[1],
            "max_shard_bytes": max_shard_bytes,
        },
        "shards": [],
        "digest": hashlib.sha256().hexdigest(),
        "complete": False,
        "versions": versions(),
    }


def _open_folder(folder: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """The index to go on with; what a killed run has left half done is removed."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`folder` {folder} is a file. Choose another name.")
    if not (folder / INDEX).exists():
        if folder.exists() and any(path.name != f"{INDEX}.tmp" for path in folder.iterdir()):
            raise ValueError(f"`folder` {folder} holds something else than captured states. Choose another one.")
        return fresh
    index = read_index(folder)
    refuse_other_pair(folder, index, fresh["source"], fresh["target"])
    for name, wanted in fresh["settings"].items():
        if index["settings"].get(name) != wanted:
            raise ValueError(
                f"`folder` {folder} was captured with `{name}` {index['settings'].get(name)!r}, but this run has "
                f"{wanted!r}. Choose another folder, or the same setting."
            )
    known = {shard["file"] for shard in index["shards"]}
    for path in folder.glob("states-*"):
        if path.name not in known:
            path.unlink()
    for number in range(len(known)):
        open_shard(folder, index, number)
    return index


def _behind_captured(examples: Iterator[TrainingExample], index: dict[str, Any], folder: Path):
    """The examples that are not captured yet, and the digest of those that are."""
    done, digest = sum(shard["examples"] for shard in index["shards"]), hashlib.sha256()
    for example in itertools.islice(examples, done):
        digest.update(_content(example))
    if digest.hexdigest() != index["digest"]:
        raise ValueError(
            f"`examples` does not begin with the {done} examples that {folder} holds. Pass the same text, lengths and "
            "seed, or choose another folder."
        )
    return examples, digest


def _content(example: TrainingExample) -> bytes:
    return repr((example.context_ids, example.prompt_ids, example.text)).encode()


def _groups(
    examples: Iterator[TrainingExample], index, max_bytes: int
) -> Iterator[tuple[list[TrainingExample], bool]]:
    """The examples of a shard after the other, and whether these were the last. Where a shard ends depends on the
    examples alone, so that a resumed run writes the same ones."""
    group, size = [], 0
    for example in examples:
        own = shard_bytes(index, 1, len(example.context_ids), len(example.prompt_ids))
        own += 2 * len(example.document.encode()) + 8  # its name in the header
        if group and size + own > index["settings"]["max_shard_bytes"]:
            yield group, False
            group, size = [], 0
        if sum(shard["bytes"] for shard in index["shards"]) + size + own + _HEADER > max_bytes:
            yield group, False
            return
        group.append(example)
        size += own
    yield group, True


@torch.no_grad()
def _capture(
    batch: list[TrainingExample], shell: MoTModel, settings, source, source_tokenizer, target, target_tokenizer
) -> list[dict[str, Any]]:
    """Name and tensors of each example, on the CPU."""
    texts = [example.text for example in batch]
    cache, source_ids, source_mask = shell.read_source(texts, source, source_tokenizer)
    target_ids, target_mask = left_pad([example.context_ids for example in batch])
    inputs = shell.prepare(
        cache,
        source_ids,
        source_attention_mask=source_mask,
        source_tokenizer=source_tokenizer,
        target=target,
        target_tokenizer=target_tokenizer,
        target_input_ids=target_ids,
        target_attention_mask=target_mask,
        text=texts,
    )
    top, layers, dtype = settings["top_logits"], settings["target_layers"], getattr(torch, settings["dtype"])
    native = prefill(target, target_ids, target_mask, layers if top == 0 else None)
    states = source_states(native, shell.target_geometry, layers, positions_from_mask(target_mask)).cpu()
    if not bool(torch.isfinite(states[target_mask.bool()]).all()):
        raise ValueError(
            f"The target's states of {', '.join(example.document for example in batch)} hold NaN or infinite values. "
            "Check its dtype (float16 overflows in some families; use bfloat16 or float32)."
        )
    rows = []
    for number, example in enumerate(batch):
        own = target_mask[number].bool()
        rows.append(
            {
                "document": example.document,
                "context_ids": torch.tensor(example.context_ids, dtype=torch.int32),
                "prompt_ids": torch.tensor(example.prompt_ids, dtype=torch.int32),
                "source_states": inputs.source_states[number].cpu()[own].to(dtype),
                "native_states": states[number][own].to(dtype),
            }
        )
    if top == 0:
        return rows
    prompts = [example.prompt_ids for example in batch]
    wrapped = wrap(native, target_mask.to(target.device), shell.target_geometry.sliding)
    if top is None:
        hidden = _prompt_hidden(target, wrapped, [ids[:-1] for ids in prompts])
        for row, own, ids in zip(rows, hidden, prompts, strict=True):
            row["native_hidden"] = own[: len(ids) - 1].to(dtype).cpu()
        return rows
    for row, own, ids in zip(rows, prompt_logits(target, wrapped, prompts)[0], prompts, strict=True):
        own = own[: len(ids) - 1].float()
        values, found = own.topk(top)
        row["top_ids"] = found.int().cpu()
        row["top_log_probs"] = (values - own.logsumexp(-1, keepdim=True)).half().cpu()
    return rows


def _prompt_hidden(target: PreTrainedModel, cache, rows: list[list[int]]) -> torch.Tensor:
    ids, mask = right_pad(rows, input_device(target))
    whole = torch.cat([cache.prefix_mask.to(mask), mask], dim=1)
    return run_decoder(target, ids, cache.fork(), whole, positions_from_mask(whole)[:, -ids.shape[1] :])


@torch.no_grad()
def _check_head(target: PreTrainedModel) -> None:
    """Refuses to keep hidden states of a model whose logits are more than its head's output (soft caps, scaling)."""
    head, embeddings = target.get_output_embeddings(), target.get_input_embeddings().weight
    ids = torch.arange(4, device=embeddings.device)[None]
    logits = target(ids).logits.float()
    if not torch.allclose(head(run_decoder(target, ids, DynamicCache())).float(), logits, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"`top_logits` is None, but the logits of {type(target).__name__} are not its head's output alone. Keep "
            "top logits instead."
        )
