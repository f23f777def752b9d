"""A learning rate of its own for the translator's linear path."""

import re
from collections.abc import Iterator

import torch
from torch import nn

# What a closed-form fit gives of a `ReducedRankTranslator`, whose refinement may have weights of the same names.
LINEAR_PATH = re.compile(r"(source_in|embedding_in|up|up\.by_rank\.\d+)\.weight|bias")


def linear_path(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of the linear path, wherever the translator holds it."""
    for module in model.modules():
        # By name: a translator that was loaded as remote code has classes of its own.
        if type(module).__name__ == "ReducedRankTranslator":
            yield from (weight for name, weight in module.named_parameters() if LINEAR_PATH.fullmatch(name))


def set_linear_learning_rate(optimizer: torch.optim.Optimizer, model: nn.Module, learning_rate: float) -> None:
    """
    Moves the linear path's weights of `model` to parameter groups of their own, before the first step.

    Raises:
        `ValueError`: none of them is trained.
    """
    linear = {id(weight) for weight in linear_path(model)}
    found = False
    for group in list(optimizer.param_groups):
        own = [weight for weight in group["params"] if id(weight) in linear]
        if not own:
            continue
        found = True
        group["params"] = [weight for weight in group["params"] if id(weight) not in linear]
        optimizer.add_param_group({**group, "params": own, "lr": learning_rate})
    if not found:
        raise ValueError(
            "`linear_learning_rate` is given, but the translator has no linear path that is trained. Leave it out."
        )
