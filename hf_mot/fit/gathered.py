"""
What a pass over the text gathers for a fit, kept in a file: the pass goes on after a kill or with more tokens, and
serves fits of other ranks, budgets and weights.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from ..contract_mot import identity
from ..geometry_mot import ModelGeometry
from ..modeling_mot import MoTModel
from .norms import KeyLengths
from .pair import Pair
from .statistics import Statistics
from .weights import output_blocks
from .windows import Window, batched

SAVE_SECONDS = 600


@dataclass
class Gathered:
    """
    Moments of features and outputs, and the lengths of the target's keys.

    Args:
        geometry ([`ModelGeometry`]): The target's, with the layers that are fitted alone.
        settings (`dict`): What it is gathered of, as [`gathering_settings`] names it.
        source_layers (`list[int]`): The source layers that are read.
        windows (`set[int]`): Keys of the calibration windows that are in.
        restored (`Sequence[int]`, *optional*, defaults to `()`): Layers of that geometry of which one state is fitted,
            see [`output_blocks`].
    """

    geometry: ModelGeometry
    settings: dict[str, Any]
    source_layers: list[int]
    windows: set[int] = field(default_factory=set)
    restored: Sequence[int] = ()

    def __post_init__(self):
        self.statistics = Statistics(output_blocks(self.geometry, self.restored))
        self.lengths = KeyLengths(self.geometry, self.restored)

    def add(self, x: torch.Tensor, y: torch.Tensor, y_in_metric: torch.Tensor, windows: Iterable[int]) -> None:
        """Adds rows `[rows, features]`, `[rows, outputs]`, and the outputs in the metric of errors."""
        self.statistics.add(x, y_in_metric)
        self.lengths.add(y)
        self.windows.update(windows)

    def check(
        self, path: str | os.PathLike, sample: Sequence[Window], source_layers: Sequence[int] | None, count: int
    ) -> None:
        """
        Refuses to go on with other text, of which `sample` is the beginning, or other source layers than were read,
        or than so many where none are named.

        Raises:
            `ValueError`: they are others.
        """
        if not any(window.key in self.windows for window in sample):
            raise ValueError(
                f"`statistics` names {path}, which was gathered with other `documents`. Choose another name, or give "
                "the same text in the same order."
            )
        if source_layers is not None and list(source_layers) != self.source_layers:
            raise ValueError(
                f"`statistics` names {path}, of the source layers {self.source_layers}, but `source_layers` is "
                f"{source_layers}. Leave it out, or choose another name."
            )
        if source_layers is None and len(self.source_layers) != count:
            raise ValueError(
                f"`statistics` names {path}, of {len(self.source_layers)} source layers, but `num_source_layers` is "
                f"{count}. Give {len(self.source_layers)}, or choose another name."
            )

    def save(self, path: str | os.PathLike) -> None:
        """Writes it to a safetensors file, whole or not at all."""
        path = Path(path)
        tensors = {
            **{f"statistics.{name}": tensor for name, tensor in self.statistics.tensors().items()},
            **{f"lengths.{name}": tensor for name, tensor in self.lengths.tensors().items()},
            "windows": torch.tensor(sorted(self.windows)),
        }
        about = {"settings": self.settings, "source_layers": self.source_layers}
        partial = path.with_name(f".{path.name}.partial")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, {"fit": json.dumps(about)})
        os.replace(partial, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        geometry: ModelGeometry,
        settings: dict[str, Any],
        restored: Sequence[int] = (),
    ) -> "Gathered":
        """
        Reads what [`save`] wrote.

        Raises:
            `ValueError`: a file of something else, or one that was gathered with other settings.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["fit"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"`statistics` must name a file that a fit gathered, but {path} is none. Choose another name."
            ) from error
        for name, wanted in settings.items():
            if about["settings"].get(name) != wanted:
                raise ValueError(
                    f"`statistics` names {path}, which was gathered with another `{name}`. Choose another name, or "
                    "fit with the same models, text and options."
                )
        found = cls(geometry, settings, about["source_layers"], set(tensors.pop("windows").tolist()), restored)
        for part in ("statistics", "lengths"):
            prefix = f"{part}."
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            getattr(found, part).load(own)
        return found


def gathering_settings(
    contracts: Sequence[dict[str, Any]],
    held_out: Sequence[str],
    *,
    source_window: int,
    embedding_window: int,
    target_hidden_layer: int | None,
    restored_layers: Sequence[int],
    resume_layer: int | None,
    key_metric: str,
    seed: int,
) -> dict[str, Any]:
    """By what [`Gathered`] of the same models and options is known, and by the documents that are held out."""
    return {
        "pair": [[*identity(contract), contract["dtype"]] for contract in contracts],
        "documents": hashlib.sha256("\0".join(held_out).encode()).hexdigest(),
        "source_window": source_window,
        "embedding_window": embedding_window,
        "target_hidden_layer": target_hidden_layer,
        "resume_layer": resume_layer,
        "restored_layers": list(restored_layers) or None,  # files of earlier days do not tell
        "key_metric": key_metric,
        "seed": seed,
    }


def gather(
    pair: Pair,
    shell: MoTModel,
    windows: Iterable[Window],
    gathered: Gathered,
    path: str | os.PathLike | None,
    batch_tokens: int,
    bar: tqdm,
) -> None:
    """
    Adds all windows that are not in yet, and keeps what there is in the file `path`.

    Raises:
        `ValueError`: there are windows in that are not among `windows`.
    """
    known, seen = set(gathered.windows), set()  # of windows of this text

    def missing() -> Iterator[Window]:
        for window in windows:
            if window.key in known:
                seen.add(window.key)
                bar.update(window.tokens)
            else:
                yield window

    saved = time.perf_counter()
    for batch in batched(missing(), batch_tokens):
        x, y = pair.rows(shell, [window.text for window in batch])
        gathered.add(x, y, pair.in_metric(y), (window.key for window in batch))
        bar.update(len(x))
        if path is not None and time.perf_counter() - saved > SAVE_SECONDS:
            gathered.save(path)
            saved = time.perf_counter()
    if known != seen:
        raise ValueError(
            f"`statistics` names {path}, which holds {len(known) - len(seen)} windows that are not within "
            "`max_tokens` of this text. Give at least as many tokens as then, or choose another name."
        )
    if path is not None and known != gathered.windows:
        gathered.save(path)
