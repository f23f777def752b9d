"""The translator that a training starts from: a new one, or one that a closed form has fitted."""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.configuration_mot import MoTConfig
from hf_mot.contract_mot import describe_model
from hf_mot.modeling_mot import MoTModel


def pair_contracts(
    source: PreTrainedModel,
    target: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
) -> dict[str, dict[str, Any]]:
    """The contracts of both models, as a config holds them."""
    return {"source": describe_model(source, source_tokenizer), "target": describe_model(target, target_tokenizer)}


def new_translator(
    contracts: dict[str, dict[str, Any]], *, num_source_layers: int | None = None, seed: int = 0, **settings: Any
) -> MoTModel:
    """
    A translator with random weights.

    Args:
        contracts (`dict`): Of `source` and `target`: from [`pair_contracts`], or the index of captured states.
        num_source_layers (`int`, *optional*): Reads so many source layers, evenly spaced, instead of one a channel.
        seed (`int`, *optional*, defaults to 0): Of the weights.
        settings: Of [`MoTModel.from_contracts`]: the channel window, and fields of [`MoTConfig`].
    """
    if num_source_layers is not None and num_source_layers < 1:
        raise ValueError(f"`num_source_layers` must be at least 1, got {num_source_layers}.")
    if num_source_layers is not None and "source_layers" not in settings:
        depth = len(contracts["source"]["geometry"]["layers"])
        count = min(num_source_layers, depth)
        settings["source_layers"] = [round(index * (depth - 1) / max(1, count - 1)) for index in range(count)]
    torch.manual_seed(seed)
    return MoTModel.from_contracts(contracts["source"], contracts["target"], **settings)


def continue_from(init: MoTModel, *, seed: int = 0, **settings: Any) -> MoTModel:
    """
    A translator that starts where another ends: a closed form's weights become the linear path of one that has any;
    else the two must have the same weights.

    Args:
        init ([`MoTModel`]): The fitted or trained translator.
        seed (`int`, *optional*, defaults to 0): Of the weights that are new.
        settings: Fields of [`MoTConfig`] that differ from `init`'s. Without any, `init` itself is trained on.

    Raises:
        `ValueError`: the new translator has no linear path, or other weights.
    """
    fields = {name: getattr(init.config, name) for name in type(init.config).__annotations__ if name != "model_type"}
    if not {name: value for name, value in settings.items() if fields.get(name) != value}:
        return init
    torch.manual_seed(seed)
    model = MoTModel(MoTConfig(**{**fields, **settings}))
    if init.config.method == "reduced_rank":
        model.load_linear_path(init)
    else:
        shapes = [{name: weight.shape for name, weight in each.state_dict().items()} for each in (init, model)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"`init` is a trained translator ({init.config.method}) whose weights do not fit the new settings "
                f"{settings}. Leave out what changes their number or size, or train a new one."
            )
        model.load_state_dict(init.state_dict())
    model.fit_report = init.fit_report
    return model
