"""What a configuration says of single layers: which of the target's are translated, read, restored or resumed from."""

from transformers import PreTrainedConfig


def check_layers(config: PreTrainedConfig) -> None:
    """Raises `ValueError` for layers that are out of order, or that exclude each other."""
    layers = config.target_layers
    if layers is not None and (not layers or layers != list(range(layers[0], layers[0] + len(layers)))):
        raise ValueError(
            f"`target_layers` must be contiguous layers, each once and in order, or None for all, got {layers}."
        )
    if config.resume_layer is not None:
        _check_resume_layer(config)
    if config.target_hidden_layer is not None:
        _check_target_hidden_layer(config)
    if config.restored_layers:
        _check_restored_layers(config)


def check_piece_ranks(config: PreTrainedConfig) -> None:
    """Raises `ValueError` for `piece_ranks` that are not of these layers, or above the rank."""
    first = config.target_layers[0] if config.target_layers else 0
    if any(
        len(ranks) != (1 if layer_idx in (*config.restored_layers, config.resume_layer) else 2)
        or not all(1 <= rank <= config.rank for rank in ranks)
        for layer_idx, ranks in enumerate(config.piece_ranks, first)
    ):
        raise ValueError(
            "`piece_ranks` must be [keys, values] for each target layer, [state] for one of `restored_layers` and "
            f"for a `resume_layer`, from 1 to `rank` {config.rank}, got {config.piece_ranks}."
        )


def _check_target_hidden_layer(config: PreTrainedConfig) -> None:
    layer_idx = config.target_hidden_layer
    if layer_idx < 0:
        raise ValueError(f"`target_hidden_layer` must be a layer of the target, from 0, or None, got {layer_idx}.")
    if config.method == "identity":
        raise ValueError(
            "`target_hidden_layer` is for translators: method 'identity' hands the target's own cache through, "
            f"and reads nothing else, got {layer_idx}."
        )
    if config.target_layers is None or config.target_layers[0] <= layer_idx:
        raise ValueError(
            f"`target_layers` must lie above `target_hidden_layer` {layer_idx}: the layers up to it are the "
            f"target's own. Name those from {layer_idx + 1} to the last, got {config.target_layers}."
        )


def _check_resume_layer(config: PreTrainedConfig) -> None:
    layer_idx = config.resume_layer
    if layer_idx < 1:
        raise ValueError(f"`resume_layer` must be a layer of the target, from 1, or None, got {layer_idx}.")
    if config.method == "identity":
        raise ValueError(
            "`resume_layer` is for translators: method 'identity' hands the target's own states through by every "
            f"plan, got {layer_idx}. Leave it out."
        )
    if config.target_hidden_layer is not None:
        raise ValueError(
            "`resume_layer` and `target_hidden_layer` exclude each other: the target runs above what is "
            f"translated, or below it, got {layer_idx} and {config.target_hidden_layer}. Set one of them."
        )
    if config.target_layers != list(range(layer_idx)):
        raise ValueError(
            f"`target_layers` must be all layers below `resume_layer` {layer_idx}, 0 to {layer_idx - 1}, got "
            f"{config.target_layers}."
        )


def _check_restored_layers(config: PreTrainedConfig) -> None:
    layers = config.restored_layers
    if config.method == "identity":
        raise ValueError(
            "`restored_layers` is for translators: method 'identity' hands keys and values through, got "
            f"{layers}. Leave it out."
        )
    if layers != sorted(set(layers)):
        raise ValueError(f"`restored_layers` must name each layer once and in order, got {layers}.")
    left_out = [] if config.target_layers is None else sorted(set(layers) - set(config.target_layers))
    if left_out:
        raise ValueError(
            f"`restored_layers` must be among `target_layers` {config.target_layers}, which are translated, got "
            f"{left_out} beside them."
        )
    normed = sorted(set(layers) & set(config.key_norms))
    if normed:
        raise ValueError(
            f"`key_norms` and `restored_layers` both name {normed}, but keys that the target makes itself have "
            "their length already. Name these layers in one of them."
        )
