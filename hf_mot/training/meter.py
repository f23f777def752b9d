"""Weighted means of what is logged."""

import torch
from accelerate import Accelerator


class Meter:
    """Running means of named figures, over all processes."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, figures: dict[str, torch.Tensor], weights: dict[str, float]) -> None:
        """Adds a figure with the weight of its name."""
        for name, figure in figures.items():
            weight = torch.tensor(float(weights[name]), dtype=torch.float64)
            pair = torch.stack([figure.detach().double().cpu() * weight, weight])
            self.sums[name] = self.sums.get(name, 0) + pair

    def drain(self, accelerator: Accelerator) -> dict[str, float]:
        """The means so far; the next ones start anew."""
        means = {}
        for name in sorted(self.sums):
            total, weight = accelerator.reduce(self.sums[name].float().to(accelerator.device), "sum").tolist()
            means[name] = total / weight
        self.sums.clear()
        return means
