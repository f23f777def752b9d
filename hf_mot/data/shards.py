"""
The form of captured states on disk: a folder of safetensors shards and an index.

In a shard the rows of all its examples stand one after the other, without pads. Widths: a layer's states are all key
channels, then all value channels, position-free. `context`, `prompt` and `scored` count tokens of the target; the
scored ones are all of a prompt but its first.

    context_lengths, prompt_lengths   [examples]          int32
    context_ids, prompt_ids           [context], [prompt] int32, the target's prefix (BOS) first
    source_states                     [context, width]    of the source layers, aligned with the target's tokens
    native_states                     [context, width]    of the target layers, the target's own
    top_ids, top_log_probs            [scored, k]         int32, float16: the native target's likeliest tokens; or
    native_hidden                     [scored, hidden]    its last hidden states, from which its head makes the logits

Log-probabilities rather than logits: in float16 they are the more exact the likelier the token is. The metadata hold
the examples' names, a JSON list. The index has both contracts, the settings and the shards' sizes, is written last,
and names nothing of the machine that wrote it.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_mot.contract_mot import IDENTITY
from hf_mot.geometry_mot import ModelGeometry

INDEX = "index.json"
FORMAT_VERSION = 1


def shard_layout(index: dict[str, Any]) -> dict[str, tuple[str, int | None, torch.dtype]]:
    """Each tensor of a shard: what it has a row for, its width (`None`: one number a row) and its dtype."""
    settings, dtype = index["settings"], getattr(torch, index["settings"]["dtype"])
    geometries = {side: ModelGeometry.from_dict(index[side]["geometry"]) for side in ("source", "target")}
    layout: dict[str, tuple[str, int | None, torch.dtype]] = {
        f"{part}_{what}": ("examples" if what == "lengths" else part, None, torch.int32)
        for part in ("context", "prompt")
        for what in ("lengths", "ids")
    }
    for side, name in (("source", "source_states"), ("target", "native_states")):
        width = sum(geometries[side].layers[layer_idx].width for layer_idx in settings[f"{side}_layers"])
        layout[name] = ("context", width, dtype)
    top = settings["top_logits"]
    if top is None:
        layout["native_hidden"] = ("scored", settings["hidden_dim"], dtype)
    elif top:
        layout["top_ids"] = ("scored", top, torch.int32)
        layout["top_log_probs"] = ("scored", top, torch.float16)
    return layout


def shard_bytes(index: dict[str, Any], examples: int, context_tokens: int, prompt_tokens: int) -> int:
    """Bytes of a shard's tensors."""
    counts = _row_counts(examples, context_tokens, prompt_tokens)
    layout = shard_layout(index).values()
    return sum(counts[rows] * (1 if width is None else width) * dtype.itemsize for rows, width, dtype in layout)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder of captured states. Raises `ValueError` where there is none, or not one of ours."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{folder} holds no captured states: it has no {INDEX}. Capture states into it first.")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version = index["format_version"]
        if version == FORMAT_VERSION:
            shard_layout(index)
            for shard in index["shards"]:
                sizes = [shard[name] for name in ("bytes", "examples", "context_tokens", "prompt_tokens")]
                if not all(isinstance(size, int) for size in sizes) or Path(shard["file"]).name != shard["file"]:
                    raise ValueError(f"{shard} is no shard")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has the format {version}, but this release of hf_mot reads {FORMAT_VERSION}.")
    return index


def open_shard(folder: Path, index: dict[str, Any], number: int):
    """An open shard, its header checked against the index. Raises `ValueError` for a missing or damaged file."""
    shard = index["shards"][number]
    path = folder / shard["file"]
    if not path.is_file():
        raise ValueError(f"{path} is missing, but {INDEX} names it. Copy it again, or capture into another folder.")
    if path.stat().st_size != shard["bytes"]:
        raise damaged(path, f"it has {path.stat().st_size} bytes, expected {shard['bytes']}")
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error
    counts = _row_counts(shard["examples"], shard["context_tokens"], shard["prompt_tokens"])
    expected = {
        name: [counts[rows]] if width is None else [counts[rows], width]
        for name, (rows, width, _) in shard_layout(index).items()
    }
    came = {name: file.get_slice(name).get_shape() for name in file.keys()}
    if came != expected or "documents" not in (file.metadata() or {}):
        raise damaged(path, f"it holds {came}, expected {expected}")
    return file


def write_shard(folder: Path, number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Writes the examples `rows` (`document`, and the tensors but the lengths) under another name first: a killed run
    leaves no half of a shard. Returns its entry in the index."""
    names = [name for name in rows[0] if name != "document"]
    tensors = {name: torch.cat([row[name] for row in rows]).contiguous() for name in names}
    for part in ("context", "prompt"):
        lengths = [len(row[f"{part}_ids"]) for row in rows]
        tensors[f"{part}_lengths"] = torch.tensor(lengths, dtype=torch.int32)
    path = folder / f"states-{number:05d}.safetensors"
    documents = json.dumps([row["document"] for row in rows], ensure_ascii=False)
    save_file(tensors, f"{path}.tmp", metadata={"documents": documents})
    os.replace(f"{path}.tmp", path)
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "examples": len(rows),
        "context_tokens": len(tensors["context_ids"]),
        "prompt_tokens": len(tensors["prompt_ids"]),
    }


def write_index(folder: Path, index: dict[str, Any]) -> None:
    path = folder / f"{INDEX}.tmp"
    path.write_text(json.dumps(index, indent=1, ensure_ascii=False), encoding="utf-8")
    os.replace(path, folder / INDEX)


def refuse_other_pair(folder: Path, index: dict[str, Any], source: dict[str, Any], target: dict[str, Any]) -> None:
    """Refuses states of another pair than that of two contracts, by the field that differs. Raises `ValueError`."""
    for side, contract in (("source", source), ("target", target)):
        for field in ("model_type", *IDENTITY, "adds_prefix", "geometry"):
            captured, came = index[side].get(field), contract.get(field)
            if not _same(field, captured, came):
                raise ValueError(
                    f"{folder} holds states of another pair: its `{side}` has `{field}` {_short(captured)}, but this "
                    f"pair's has {_short(came)}. Choose the folder of your pair, or capture into another one."
                )


def _same(field: str, captured: Any, came: Any) -> bool:
    if field in ("fingerprint", "adapter") and captured and came:  # a hash for each dtype that the weights can have
        common = captured.keys() & came.keys()
        return bool(common) and all(captured[dtype] == came[dtype] for dtype in common)
    if field != "geometry":
        return captured == came
    captured, came = ModelGeometry.from_dict(captured), ModelGeometry.from_dict(came)
    ours, theirs = (
        [number for part in side.rotary for number in (*part.inv_freq, part.scaling, part.interleaved)]
        for side in (captured, came)
    )
    return (captured.layers, captured.embedding_dim, len(ours)) == (
        came.layers,
        came.embedding_dim,
        len(theirs),
    ) and all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(ours, theirs, strict=True))


def _row_counts(examples: int, context_tokens: int, prompt_tokens: int) -> dict[str, int]:
    return {
        "examples": examples,
        "context": context_tokens,
        "prompt": prompt_tokens,
        "scored": prompt_tokens - examples,
    }


def damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged ({why}). Copy it again, or capture into another folder.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}…"
