"""A learning rate of its own for the translator's linear path."""

import re

import torch
from torch import nn

# What a closed-form fit gives: the maps of `ReducedRankTranslator`, wherever the translator holds it.
LINEAR_PATH = re.compile(r"(source_in|embedding_in|up)\.weight$|(translator|linear)\.bias$")


def set_linear_learning_rate(optimizer: torch.optim.Optimizer, model: nn.Module, learning_rate: float) -> None:
    """
    Moves the linear path's weights of `model` to parameter groups of their own, before the first step.

    Raises:
        `ValueError`: none of them is trained.
    """
    linear = {id(weight) for name, weight in model.named_parameters() if LINEAR_PATH.search(name)}
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
