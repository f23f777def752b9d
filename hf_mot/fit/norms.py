"""The lengths of keys: the weighted one that all native keys of a head share, where there is one, and the mean one."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from ..geometry_mot import ModelGeometry
from .solve import LinearMap
from .weights import key_blocks, output_blocks

ITERATIONS = 4000  # at most
CHECKED_EVERY = 100
TOLERANCE = 1e-6  # a weight has come to rest that moves by less between two checks, as a share of its head's largest
# Of the squared length, from key to key, in the head where it is largest. Gemma 3's lies below; SmolLM2's, whose keys
# are not normalised, at 0.10 to 0.19, where one length for all keys hurts.
LARGEST_DEVIATION = 0.1


class KeyLengths:
    """
    Accumulates the second moments of squared keys, and finds weights `w >= 0` of channels for which
    `sum_c w_c * k_c²` is as close to 1 as can be for all keys of a head (non-negative least squares).

    Args:
        geometry ([`ModelGeometry`]): The target's.
        restored (`Collection[int]`, *optional*, defaults to `()`): Its layers of which no keys are fitted, see
            [`output_blocks`].
    """

    def __init__(self, geometry: ModelGeometry, restored: Collection[int] = ()):
        self.places, self.blocks = key_blocks(geometry, restored), output_blocks(geometry, restored)
        self.layers = [geometry.layers[layer_idx] for layer_idx in self.places]
        self.count = 0
        self.sums: list[torch.Tensor] = [torch.zeros(())] * len(self.layers)
        self.products: list[torch.Tensor] = [torch.zeros(())] * len(self.layers)

    def add(self, outputs: torch.Tensor) -> None:
        """Adds rows `[rows, channels]` of the target's own position-free states."""
        self.count += len(outputs)
        for layer_idx, squares in enumerate(self._squares(outputs)):
            self.sums[layer_idx] = self.sums[layer_idx] + squares.sum(0).double()
            self.products[layer_idx] = (
                self.products[layer_idx] + torch.einsum("rhc,rhd->hcd", squares, squares).double()
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it holds, by name, for [`load`]."""
        named = {"sums": self.sums, "products": self.products}
        held = {f"{name}.{number}": own for name, owns in named.items() for number, own in enumerate(owns)}
        return {"count": torch.tensor(self.count), **held}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the place of what it holds."""
        self.count = int(tensors["count"])
        self.sums, self.products = (
            [tensors[f"{name}.{number}"] for number in range(len(self.layers))] for name in ("sums", "products")
        )

    def weights(self) -> list[torch.Tensor]:
        """`[kv_heads, key_dim]` for each target layer with keys, in fp64; 0 for channels that are always 0."""
        return [
            _non_negative(total / self.count, products / self.count)
            for total, products in zip(self.sums, self.products, strict=True)
        ]

    def constant_layers(self, weights: Sequence[torch.Tensor], outputs: torch.Tensor) -> list[int]:
        """The layers whose keys have such a length, by rows `[rows, channels]` that the weights were not made from."""
        deviations = [
            torch.einsum("rhc,hc->rh", squares.double(), own).std(0, correction=0).max().item()
            for squares, own in zip(self._squares(outputs), weights, strict=True)
        ]
        found = zip(self.places, deviations, strict=True)
        return [layer_idx for layer_idx, deviation in found if deviation <= LARGEST_DEVIATION]

    def lengthened(
        self, solution: LinearMap, weights: Sequence[torch.Tensor], x: torch.Tensor, outputs: torch.Tensor
    ) -> LinearMap:
        """
        A map whose keys have, head by head, the mean squared length of native ones: a regression makes them shorter.

        Args:
            solution ([`LinearMap`]): The regression.
            weights (`Sequence[torch.Tensor]`): Of the channels, from [`weights`].
            x, outputs (`torch.Tensor`): Features and native states of rows that it was not fitted on.
        """
        predicted = x.double() @ solution.down
        predicted = (predicted if solution.up is None else predicted @ solution.up) + solution.bias
        native, own = (
            [torch.einsum("rhc,hc->h", squares.double(), w) for squares, w in zip(found, weights, strict=True)]
            for found in (self._squares(outputs), self._squares(predicted))
        )
        factors = torch.ones_like(solution.bias)
        for layer, keys, wanted, came in zip(self.layers, self._keys(factors[None]), native, own, strict=True):
            ratio = torch.where((came > 0) & (wanted > 0), wanted / came, torch.ones_like(came)).sqrt()
            keys[0].copy_(ratio.repeat_interleave(layer.key_dim))
        if solution.up is None:
            return replace(solution, down=solution.down * factors, bias=solution.bias * factors)
        return replace(solution, up=solution.up * factors, bias=solution.bias * factors)

    def _keys(self, outputs: torch.Tensor) -> list[torch.Tensor]:
        parts = outputs.split(self.blocks, dim=1)
        return [parts[place] for place in self.places.values()]

    def _squares(self, outputs: torch.Tensor) -> list[torch.Tensor]:
        return [
            own.unflatten(1, (layer.kv_heads, layer.key_dim)).square()
            for own, layer in zip(self._keys(outputs), self.layers, strict=True)
        ]


def _non_negative(means: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Weights `[heads, channels]` by multiplicative updates, which keep them so and never raise the error, until they
    rest."""
    live = means > 1e-6 * means.amax(-1, keepdim=True)
    scale = torch.where(live, means, torch.ones_like(means))
    ones = live.to(means)  # the means of squares that were divided by them
    products = products / scale[:, :, None] / scale[:, None]
    weights, dead = (ones / ones.sum(-1, keepdim=True))[..., None], (1 - ones)[..., None]  # [heads, channels, 1]
    for _ in range(ITERATIONS // CHECKED_EVERY):
        before = weights
        for _ in range(CHECKED_EVERY):
            weights = weights / (products @ weights + dead)
        if bool(((weights - before).abs() <= TOLERANCE * weights.amax(1, keepdim=True)).all()):
            break
    return weights[..., 0] / scale
