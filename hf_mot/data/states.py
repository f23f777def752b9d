"""Captured states as a dataset. The form on disk is described in `data.shards`, written by `data.capture`."""

import bisect
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hf_mot.configuration_mot import MoTConfig
from hf_mot.data.shards import damaged, open_shard, read_index, refuse_other_pair, shard_layout
from hf_mot.geometry_mot import ModelGeometry
from hf_mot.inputs_mot import TranslationInputs
from hf_mot.rows_mot import causal_window, left_pad


class StatesDataset(Dataset):
    """
    Captured states as a map-style dataset; batch them with [`collate`].

    Args:
        folder (`str` or `os.PathLike`): What [`capture_states`] wrote.
        config ([`MoTConfig`], *optional*): The translator's that reads them: the pair is checked, and only its source
            layers are given. By default all that were captured.

    Raises:
        `ValueError`: no index, a shard that is missing, truncated or damaged, states of another pair, source layers
            that were not captured.
    """

    def __init__(self, folder, config: MoTConfig | None = None):
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        captured = self.index["settings"]["source_layers"]
        self.source_layers = captured
        if config is not None:
            refuse_other_pair(self.folder, self.index, config.source, config.target)
            if not config.position_free:
                raise ValueError(
                    f"{self.folder} holds keys without positions, but the translator reads them with (`position_free` "
                    "is False). Train it from text."
                )
            self.source_layers = list(config.source_layers)
            if not set(self.source_layers) <= set(captured):
                raise ValueError(
                    f"{self.folder} holds source layers {captured}, but the translator reads `source_layers` "
                    f"{self.source_layers}. Capture them."
                )
        self.target_geometry = ModelGeometry.from_dict(self.index["target"]["geometry"])
        self.target_layers: list[int] = self.index["settings"]["target_layers"]
        self._columns = self._source_columns(captured)
        self._open: dict[int, Any] = {}
        self._starts, self._offsets, self._documents = [], [], []  # of each shard
        total = 0
        for number, shard in enumerate(self.index["shards"]):
            file = self._shard(number)
            lengths = [file.get_tensor(f"{part}_lengths").long() for part in ("context", "prompt")]
            documents = json.loads(file.metadata()["documents"])
            counts = (shard["examples"], shard["context_tokens"], shard["prompt_tokens"])
            if (len(documents), *(int(part.sum()) for part in lengths)) != counts:
                raise damaged(self.folder / shard["file"], "its examples are not those of the index")
            self._starts.append(total)
            self._offsets.append([[0, *part.cumsum(0).tolist()] for part in lengths])
            self._documents.append(documents)
            total += shard["examples"]
        self._length = total
        if not total:
            raise ValueError(f"{self.folder} holds no captured example yet. Capture states into it first.")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: int) -> dict[str, Any]:
        """One example: `document` (`str`), and the tensors of a shard, cut to it."""
        if not 0 <= item < self._length:
            raise IndexError(f"There are {self._length} examples, got {item}.")
        number = bisect.bisect_right(self._starts, item) - 1
        row = item - self._starts[number]
        (c0, c1), (p0, p1) = (offsets[row : row + 2] for offsets in self._offsets[number])
        file = self._shard(number)
        spans = {"context": slice(c0, c1), "prompt": slice(p0, p1), "scored": slice(p0 - row, p1 - row - 1)}
        found = {"document": self._documents[number][row]}
        for name, (rows, _, _) in shard_layout(self.index).items():
            if rows != "examples" and (name != "source_states" or self.source_layers):
                found[name] = file.get_slice(name)[spans[rows]]
        if self._columns is not None and self.source_layers:
            found["source_states"] = found["source_states"][:, self._columns]
        return found

    @property
    def least_context(self) -> int:
        """Tokens of the shortest context, prefix included."""
        return min(end - start for offsets, _ in self._offsets for start, end in itertools.pairwise(offsets))

    def token_ids(self) -> Iterator[torch.Tensor]:
        """The ids of all contexts, prompts and likeliest next tokens, a tensor of a shard after the other."""
        for number in range(len(self.index["shards"])):
            for name in ("context_ids", "prompt_ids", "top_ids"):
                if name in shard_layout(self.index):
                    yield self._shard(number).get_tensor(name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # open files do not travel to a worker

    def _shard(self, number: int):
        if number not in self._open:
            self._open[number] = open_shard(self.folder, self.index, number)
        return self._open[number]

    def _source_columns(self, captured: list[int]) -> torch.Tensor | None:
        if self.source_layers == captured:
            return None
        geometry = ModelGeometry.from_dict(self.index["source"]["geometry"])
        starts, width = {}, 0
        for layer_idx in captured:
            starts[layer_idx], width = width, width + geometry.layers[layer_idx].width
        spans = [(starts[layer_idx], geometry.layers[layer_idx].width) for layer_idx in self.source_layers]
        return torch.tensor([start + n for start, own in spans for n in range(own)], dtype=torch.long)


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """
    A batch of examples.

    Returns:
        `dict`: `documents` (`list[str]`); left-padded `target_ids`, `target_mask` `[batch, seq]`, `source_states`,
        `native_states` `[batch, seq, width]`; right-padded `prompt_ids`, `prompt_mask` `[batch, prompt]` and, where
        captured, `top_ids`, `top_log_probs` or `native_hidden` `[batch, prompt - 1, …]`. Pads are zeros.
    """
    target_ids, target_mask = left_pad([item["context_ids"].tolist() for item in items])
    batch = {"documents": [item["document"] for item in items], "target_ids": target_ids, "target_mask": target_mask}
    lengths = [len(item["prompt_ids"]) for item in items]
    batch["prompt_mask"] = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    for name in ("source_states", "native_states", "prompt_ids", "top_ids", "top_log_probs", "native_hidden"):
        if name not in items[0]:
            continue
        rows, side = [item[name] for item in items], "left" if name.endswith("_states") else "right"
        batch[name] = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    batch["prompt_ids"] = batch["prompt_ids"].long()
    return batch


def translation_inputs(
    batch: dict[str, Any], config: MoTConfig, table: nn.Module | None = None, dtype: torch.dtype = torch.float32
) -> TranslationInputs:
    """
    What a translator reads of a batch, as `MoTModel.prepare` gives it, without running a model.

    Args:
        batch (`dict`): From [`collate`].
        config ([`MoTConfig`]): The translator's.
        table (`nn.Module`, *optional*): The target's `get_input_embeddings()`, for a translator with an embedding
            window: the window is not stored.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): The translator's.
    """
    embeddings = None
    ids, mask = batch["target_ids"], batch["target_mask"]
    if config.embedding_window:
        if table is None:
            raise ValueError("`table` is required: the translator reads a window of the target's token embeddings.")
        with torch.no_grad():
            found = table(ids.to(table.weight.device)).to(mask.device)
        embeddings = causal_window(found, mask, config.embedding_window).to(dtype)
    states = batch["source_states"].to(dtype) if config.source_layers else None
    return TranslationInputs(states, embeddings, ids, mask)
