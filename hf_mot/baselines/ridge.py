"""Full-head ridge mapping: each target layer by a linear map of its own from its own source layers."""

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.baselines.states import as_cache, key_and_value_widths, make_shell
from hf_mot.cache_mot import TranslatedCache
from hf_mot.contract_mot import identity
from hf_mot.fit.pair import Pair, held_out_rows, pair_windows
from hf_mot.fit.statistics import Moments, Statistics
from hf_mot.fit.windows import batched
from hf_mot.modeling_mot import MoTModel

if TYPE_CHECKING:  # which makes arms of baselines, and so imports them
    from hf_mot.evaluation.batch import Batch

RIDGE = 0.01  # absolute, on sums over rows of raw features, as the rival has it
LAYER_COUNTS = (4, 8, 12)
DEFAULT_TOKENS = 65_536
_HELD_ROWS = 2048


@dataclass
class LayerMap:
    """`states @ weight + bias` from the keys (or values) of `layers` to those of one target layer."""

    layers: list[int]
    weight: torch.Tensor
    bias: torch.Tensor


class Ridge:
    """
    The rival: per target layer, for keys and values apart, ridge regression from all heads of its own k source layers,
    those that alone explain it best.

    Args:
        shell (`MoTModel`): A translator of the pair that captures all source layers that are read.
        maps (`list[LayerMap]`): For keys, then values, of each target layer.
        report (`dict`): How it was fitted.
    """

    about = "a full-head ridge map of the source's cache"
    is_fitted = True

    def __init__(self, shell: MoTModel, maps: Sequence[LayerMap], report: dict[str, Any]):
        self.shell, self.maps, self.report = shell, list(maps), report
        self.source_layers = shell.config.source_layers

    def __call__(self, batch: "Batch") -> TranslatedCache:
        inputs = batch.inputs(self.shell)
        layers = self.source_layers
        geometries = [self.shell.source_geometry.layers[layer_idx] for layer_idx in layers]
        parts = inputs.source_states.split(key_and_value_widths(geometries), dim=-1)
        states = []
        for number, own in enumerate(self.maps):
            places = [2 * layers.index(layer_idx) + number % 2 for layer_idx in own.layers]
            features = torch.cat([parts[place] for place in places], dim=-1)
            states.append(features @ own.weight.to(features) + own.bias.to(features))
        return as_cache(batch, self.shell, inputs, states)

    def flops(self, context_length: int) -> float:
        return 2 * sum(own.weight.numel() for own in self.maps) * context_length

    @classmethod
    def fit(cls, documents: Iterable[str], **options: Any) -> "Ridge":
        """As [`fit_ridge`]."""
        return fit_ridge(documents, **options)

    def save(self, path: str | Path) -> None:
        """Writes all maps to one safetensors file, whole or not at all."""
        tensors = {}
        for number, own in enumerate(self.maps):
            tensors[f"{number}.weight"], tensors[f"{number}.bias"] = own.weight.contiguous(), own.bias.contiguous()
        about = {"report": self.report, "layers": [own.layers for own in self.maps]}
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        save_file(tensors, partial, {"ridge": json.dumps(about)})
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path, translator: MoTModel) -> "Ridge":
        """
        Reads what [`save`] wrote.

        Raises:
            ValueError: If it was fitted for another pair than the translator's.
        """
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["ridge"])
            maps = [
                LayerMap(layers, file.get_tensor(f"{number}.weight"), file.get_tensor(f"{number}.bias"))
                for number, layers in enumerate(about["layers"])
            ]
        if about["report"]["pair"] != _pair_of(translator.config):
            raise ValueError(f"{path} was fitted for another pair of models. Remove it, and it is fitted anew.")
        return cls(_shell_for(maps, translator.config), maps, about["report"])


def _pair_of(config) -> list[Any]:
    """What a fitted map belongs to."""
    return [identity(side) for side in (config.source, config.target)]


def _shell_for(maps: Sequence[LayerMap], config) -> MoTModel:
    return make_shell(config.source, config.target, sorted({layer_idx for own in maps for layer_idx in own.layers}))


def fit_ridge(
    documents: Iterable[str],
    *,
    source: PreTrainedModel,
    target: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    layer_counts: Sequence[int] = LAYER_COUNTS,
    max_tokens: int = DEFAULT_TOKENS,
    stride: int = 1,
    batch_tokens: int = 2048,
    held_out_documents: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> Ridge:
    """
    Fits the rival on text, by its published recipe: keys without positions, values as they are; source layers ranked
    by the R² of a regression on each alone; λ = 0.01. Two departures: the number of layers is chosen by held-out R² of
    the states, not by the cosine of attention outputs; and of the tokens read each is a row, where the recipe reads
    512,000 and keeps every fourth.

    Args:
        documents (`Iterable[str]`): What the translator was fitted on.
        source, target (`PreTrainedModel`): The frozen models.
        source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`): Their fast tokenizers.
        layer_counts (`Sequence[int]`, *optional*, defaults to `(4, 8, 12)`): Numbers of source layers to choose from.
        max_tokens (`int`, *optional*, defaults to 65,536): Target tokens to read, at most.
        stride (`int`, *optional*, defaults to 1): One token of so many is a row of the regression.
        batch_tokens (`int`, *optional*, defaults to 2048): Tokens a forward pass; does not change the fit.
        held_out_documents (`int`, *optional*, defaults to 32): Documents set apart for both choices.
        seed (`int`, *optional*, defaults to 0): Order and windows.
        progress (`bool`, *optional*, defaults to `True`): Shows a progress bar.

    Raises:
        ValueError: On a size below 1, or too little text.
    """
    sizes = {"max_tokens": max_tokens, "stride": stride, "layer_counts": min(layer_counts, default=0)}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    pair = Pair(source, target, source_tokenizer, target_tokenizer)
    depth = len(pair.source_geometry.layers)
    shell = make_shell(pair.source_contract, pair.target_contract, range(depth))
    windows, held_out, _ = pair_windows(pair, documents, held_out_documents, max_tokens, seed)
    source_widths = key_and_value_widths(pair.source_geometry.layers)
    target_widths = key_and_value_widths(pair.target_geometry.layers)
    statistics = [Statistics(target_widths[part::2]) for part in range(2)]  # of keys, of values
    with tqdm(total=max_tokens, unit="token", desc="Fitting ridge", disable=not progress) as bar:
        for batch in batched(windows, batch_tokens):
            x, y = pair.rows(shell, [window.text for window in batch])
            bar.update(len(x))
            x, y = x[::stride], y[::stride]
            for part in range(2):
                statistics[part].add(_part(x, source_widths, part), _part(y, target_widths, part))
    held_x, held_y = held_out_rows(pair, shell, held_out)
    kept = torch.linspace(0, len(held_x) - 1, min(_HELD_ROWS, len(held_x))).long()
    held = [(_part(held_x[kept], source_widths, part), _part(held_y[kept], target_widths, part)) for part in range(2)]
    solvers = [
        _Solver(statistics[part].moments(), source_widths[part::2], target_widths[part::2], *held[part])
        for part in range(2)
    ]
    heads = [layer.kv_heads for layer in pair.target_geometry.layers]
    single = torch.stack(  # [target layer, source layer]
        [
            torch.stack([sum(s.r2(j, [i], heads[j]) for s in solvers) / 2 for i in range(depth)])
            for j in range(len(heads))
        ]
    )
    order = single.argsort(dim=1, descending=True).tolist()
    counts = sorted({min(count, depth) for count in layer_counts})
    scores = {
        count: sum(s.r2(j, order[j][:count], heads[j]).item() for j in range(len(heads)) for s in solvers)
        / (2 * len(heads))
        for count in counts
    }
    count = max(scores, key=scores.get)
    maps = [solver.solve(j, sorted(order[j][:count])) for j, solver in itertools.product(range(len(heads)), solvers)]
    report = {
        "pair": _pair_of(shell.config),
        "layer_count": count,
        "held_out_r2": {str(key): value for key, value in scores.items()},
        "ridge": RIDGE,
        "rows": solvers[0].moments.count,
        "stride": stride,
        "seed": seed,
    }
    return Ridge(_shell_for(maps, shell.config), maps, report)


def _part(states: torch.Tensor, widths: list[int], part: int) -> torch.Tensor:
    """The keys (0) or values (1) of all layers."""
    return torch.cat(states.split(widths, dim=1)[part::2], dim=1)


@dataclass
class _Solver:
    """Regressions between layers, of keys or of values, from the moments of all of them."""

    moments: Moments
    source_widths: list[int]
    target_widths: list[int]
    held_x: torch.Tensor
    held_y: torch.Tensor

    def __post_init__(self):
        bounds = [0, *itertools.accumulate(self.source_widths)]
        self.source = [torch.arange(*pair) for pair in itertools.pairwise(bounds)]
        bounds = [0, *itertools.accumulate(self.target_widths)]
        self.target = [torch.arange(*pair) for pair in itertools.pairwise(bounds)]
        self._factors: dict[tuple[int, ...], torch.Tensor] = {}

    def solve(self, target_layer: int, layers: list[int]) -> LayerMap:
        """The map from some source layers to one target layer, in the models' own units."""
        columns = torch.cat([self.source[layer_idx] for layer_idx in layers])
        outputs, moments = self.target[target_layer], self.moments
        factor = self._factors.get(tuple(layers))
        if factor is None:
            gram = moments.xx[columns][:, columns]
            # λ on sums of raw features, in the units of normalised means
            gram.diagonal().add_(RIDGE / (moments.count * moments.x_scale[columns].double().square()))
            factor = torch.linalg.cholesky(gram)
            if len(layers) == 1:  # those of several are used once
                self._factors[tuple(layers)] = factor
        weight = torch.cholesky_solve(moments.xy[columns][:, outputs], factor)
        weight = weight / moments.x_scale[columns][:, None] * moments.y_scale[outputs]
        bias = moments.y_mean[outputs] - moments.x_mean[columns] @ weight
        return LayerMap(list(layers), weight.float(), bias.float())

    def r2(self, target_layer: int, layers: list[int], heads: int) -> torch.Tensor:
        """Held-out R², averaged over heads."""
        found = self.solve(target_layer, layers)
        outputs = self.target[target_layer]
        x = self.held_x[:, torch.cat([self.source[layer_idx] for layer_idx in layers])]
        y = self.held_y[:, outputs]
        error = (y - x @ found.weight - found.bias).square().sum(0)
        spread = (y - self.moments.y_mean[outputs].float()).square().sum(0)
        error, spread = (part.unflatten(0, (heads, -1)).sum(1) for part in (error, spread))
        return (1 - error / spread.clamp(min=1e-12)).mean()
