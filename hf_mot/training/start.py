"""The translator that a training starts from: a new one, or one that a closed form has fitted."""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.configuration_mot import MoTConfig
from hf_mot.contract_mot import describe_model
from hf_mot.modeling_mot import MoTModel


def describe_pair(
    source: PreTrainedModel,
    target: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
) -> dict[str, dict[str, Any]]:
    """The contracts of both models, as a config holds them."""
    return {"source": describe_model(source, source_tokenizer), "target": describe_model(target, target_tokenizer)}


def new_translator(
    contracts: dict[str, dict[str, Any]], *, num_source_layers: int = 10, seed: int = 0, **settings: Any
) -> MoTModel:
    """
    A translator with random weights.

    Args:
        contracts (`dict`): Of `source` and `target`: from [`describe_pair`], or the index of captured states.
        num_source_layers (`int`, *optional*, defaults to 10): Source layers to read, evenly spaced, where `settings`
            names none.
        seed (`int`, *optional*, defaults to 0): Of the weights.
        settings: Other fields of [`MoTConfig`].
    """
    if "source_layers" not in settings:
        depth = len(contracts["source"]["geometry"]["layers"])
        count = min(num_source_layers, depth)
        settings["source_layers"] = [round(index * (depth - 1) / max(1, count - 1)) for index in range(count)]
    torch.manual_seed(seed)
    return MoTModel(MoTConfig(source=contracts["source"], target=contracts["target"], **settings))


def continue_from(init: MoTModel, *, seed: int = 0, **settings: Any) -> MoTModel:
    """
    A translator that starts where a closed-form fit ends: its weights become the linear path.

    Args:
        init ([`MoTModel`]): The fitted translator.
        seed (`int`, *optional*, defaults to 0): Of the weights that are new.
        settings: Fields of [`MoTConfig`] that differ from `init`'s. Without any, `init` itself is trained on.

    Raises:
        `ValueError`: the new translator has no linear path, or one of another size.
    """
    fields = {name: getattr(init.config, name) for name in type(init.config).__annotations__ if name != "model_type"}
    if not {name: value for name, value in settings.items() if fields.get(name) != value}:
        return init
    torch.manual_seed(seed)
    model = MoTModel(MoTConfig(**{**fields, **settings}))
    own = model.state_dict()
    for name, weight in init.state_dict().items():
        places = [name.replace("translator.", "translator.linear.", 1), name]
        place = next((place for place in places if place in own and own[place].shape == weight.shape), None)
        if place is None:
            raise ValueError(
                f"`init` has the weights {name} of shape {tuple(weight.shape)}, for which the translator that is to "
                f"be trained ({model.config.method}) has no linear path. Give it one of the same rank, source layers "
                "and embedding window."
            )
        own[place].copy_(weight)
    model.fit_report = init.fit_report
    return model
