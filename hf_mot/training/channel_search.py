"""Window search (paper C.3): every contiguous channel window, judged by the validation loss of a single backbone."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm

from hf_mot.channels_mot import candidate_windows, window_size
from hf_mot.evaluation.store import ResultStore
from hf_mot.modeling_mot import MoTModel
from hf_mot.versions import versions

from .start import new_translator

WINDOWS, PROXY = "windows", "proxy"
# Fields that choose the target's layers themselves.
FIXED = ("target_layers", "target_hidden_layer", "resume_layer")


def search_channels(
    contracts: Mapping[str, dict[str, Any]],
    train: Callable[[MoTModel], Mapping[str, float]],
    *,
    channel_ratio: float = 0.3,
    mapping: str = "depth_ratio",
    starts: Sequence[int] | None = None,
    settings: Mapping[str, Any] | None = None,
    results: str | os.PathLike | ResultStore | None = None,
    seed: int = 0,
    progress: bool = True,
    **fields: Any,
) -> dict[str, Any]:
    """
    Trains a single backbone translator in each window, and chooses the one whose validation loss is smallest.

    Args:
        contracts (`Mapping`): Of `source` and `target`.
        train (`Callable`): Trains a proxy, and returns its figures on held-out text, `eval_loss` among them (what
            `MoTTrainer.evaluate` returns).
        channel_ratio (`float`, *optional*, defaults to 0.3): Share of the layers in a window.
        mapping (`str`, *optional*, defaults to `"depth_ratio"`): How layers are paired.
        starts (`Sequence[int]`, *optional*): Lowest target layers to try; by default every one.
        settings (`Mapping`, *optional*): What else decides the results: those of another run are not mixed in.
        results (`str`, `os.PathLike` or [`ResultStore`], *optional*): A file that keeps each window's figures: a
            search that was killed goes on where it stopped.
        seed (`int`, *optional*, defaults to 0): Of the proxies' weights, the same in each window.
        progress (`bool`, *optional*, defaults to `True`): Shows a progress bar.
        fields: Other settings of the proxies, as of [`new_translator`].

    Returns:
        `dict`: `windows`, each with its `start`, layers and figures; `best`, that with the smallest loss.

    Raises:
        ValueError: a window out of range, or a single one; fields that choose the target's layers themselves; results
            of another pair or other settings.
    """
    depths = [len(contracts[side]["geometry"]["layers"]) for side in ("source", "target")]
    for name in FIXED:
        if fields.get(name) is not None:
            raise ValueError(
                f"`{name}` {fields[name]} cannot be searched: it chooses the target's layers itself. Leave it out."
            )
    possible = [window[0] for window in candidate_windows(window_size(channel_ratio, *depths), depths[1])]
    if len(possible) == 1:
        raise ValueError(
            f"`channel_ratio` {channel_ratio} leaves a single window: there is nothing to search. "
            "Choose a smaller one."
        )
    starts = possible if starts is None else list(dict.fromkeys(starts))
    for start in starts:
        if start not in possible:
            raise ValueError(
                f"`starts` must lie in 0..{possible[-1]} for a channel ratio of {channel_ratio}, got {start}."
            )
    store = results if isinstance(results, ResultStore) else ResultStore(results)
    search = {"channel_ratio": channel_ratio, "mapping": mapping, "seed": seed}
    pair = {side: contracts[side]["fingerprint"] for side in ("source", "target")}
    store.open(WINDOWS, {**search, **pair, "fields": fields, **(settings or {})})
    windows = []
    for start in tqdm(starts, desc="Windows", disable=not progress):
        window = {"channel_ratio": channel_ratio, "mapping": mapping, "start": start}
        if str(start) not in store.results(WINDOWS, PROXY):
            proxy = new_translator(dict(contracts), seed=seed, **window, **{**fields, "num_translators": 1})
            figures = {name: value for name, value in train(proxy).items() if name.startswith("eval_")}
            layers = {"source_layers": proxy.config.source_layers, "target_layers": proxy.target_layers}
            store.add(WINDOWS, PROXY, [(str(start), {"start": start, **layers, **figures})])
        windows.append(store.results(WINDOWS, PROXY)[str(start)])
    best = min(windows, key=lambda window: window["eval_loss"])
    return {**search, "fields": fields, "windows": windows, "best": best, "versions": versions()}
