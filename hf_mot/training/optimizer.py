"""Which parameters are trained, and a learning rate of its own for the translator's linear path."""

import re
from collections.abc import Iterator

import torch
from torch import nn

# What a closed-form fit gives of a `ReducedRankTranslator`, whose refinement may have weights of the same names.
LINEAR_PATH = re.compile(r"(source_in|source_before|embedding_in|hidden_in|up|up\.by_rank\.\d+)\.weight")


def linear_path(model: nn.Module) -> Iterator[nn.Parameter]:
    """The projections of the linear path, wherever the translator holds it."""
    for module in model.modules():
        # By name: a translator that was loaded as remote code has classes of its own.
        if type(module).__name__ == "ReducedRankTranslator":
            yield from (weight for name, weight in module.named_parameters() if LINEAR_PATH.fullmatch(name))


def train_only(model: nn.Module, pattern: str) -> None:
    """
    Freezes all parameters but those whose names a regular expression is found in.

    Raises:
        `ValueError`: it is found in none, or in frozen ones alone, or is no regular expression.
    """
    try:
        chosen = {name for name, _ in model.named_parameters() if re.search(pattern, name)}
    except re.error as error:
        raise ValueError(f"`train_only` must be a regular expression, got {pattern!r} ({error}).") from error
    if not chosen:
        names = ", ".join(name for name, _ in model.named_parameters())
        raise ValueError(f"`train_only` {pattern!r} is found in no parameter's name. They are {names}.")
    if not any(weight.requires_grad for name, weight in model.named_parameters() if name in chosen):
        raise ValueError(
            f"`train_only` {pattern!r} is found in the names of frozen parameters alone, as PEFT leaves those of the "
            "model below an adapter. Name others, or unfreeze them."
        )
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad and name in chosen)


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
