"""How a mixture uses its translators (paper Table 2), read off its routers while they run."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn


class RouterUsage:
    """
    Counts how often each expert of each router is chosen, in training mode and by tokens that are no pads.

    Args:
        model (`nn.Module`): The translator, or what PEFT wraps around it; its submodules named `router` are watched.
    """

    def __init__(self, model: nn.Module):
        self.counts: dict[str, torch.Tensor] = {}
        self._mask: torch.Tensor | None = None  # of the forward pass that runs
        model.register_forward_pre_hook(self._remember, with_kwargs=True)
        # By name: a translator that was loaded as remote code has classes of its own.
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == "router" and getattr(module, "routing", "uniform") != "uniform":
                module.register_forward_hook(lambda router, args, output, name=name: self._count(name, router, output))

    def _remember(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._mask = kwargs.get("attention_mask", args[2] if len(args) > 2 else None)

    def _count(self, name: str, router: nn.Module, output: tuple[torch.Tensor, Any]) -> None:
        if router.training:
            chosen = output[0].detach() > 0
            if self._mask is not None:
                chosen = chosen[self._mask.to(chosen.device).bool()]
            self.counts[name] = self.counts.get(name, 0) + chosen.flatten(0, -2).sum(dim=0).cpu()

    def drain(self, accelerator: Accelerator) -> dict[str, float]:
        """
        Means over the routers since the last call, of what all processes counted; empty without any.

        Args:
            accelerator (`Accelerator`): Of the run.

        Returns:
            `dict`: `router_cv2`, Var(I) / Mean(I)² of the selection counts I; `router_entropy`, that of the shares
            I / ΣI in nats (ln N_Tr: all are used alike).
        """
        found = []
        for name in sorted(self.counts):
            counts = accelerator.reduce(self.counts[name].to(accelerator.device), "sum").cpu().double()
            found.append((_imbalance(counts), _entropy(counts)))
        self.counts.clear()
        if not found:
            return {}
        imbalances, entropies = zip(*found, strict=True)
        return {"router_cv2": sum(imbalances) / len(found), "router_entropy": sum(entropies) / len(found)}


def _imbalance(counts: torch.Tensor) -> float:
    return (counts.var(correction=0) / counts.mean().square()).item()


def _entropy(counts: torch.Tensor) -> float:
    shares = counts / counts.sum()
    return torch.special.entr(shares).sum().item()
