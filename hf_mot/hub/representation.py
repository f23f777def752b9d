"""What a translator gives the target in place of keys and values, in words, with what it saves."""

from hf_mot.configuration_mot import MoTConfig
from hf_mot.geometry_mot import ModelGeometry


def describe_restored(config: MoTConfig) -> list[str]:
    """Lines on layers whose keys and values are restored (MoT-h), none where there are none: which, and how much
    narrower the one state is than both, or that it is not."""
    layers = config.restored_layers
    if not layers:
        return []
    geometry = ModelGeometry.from_dict(config.target["geometry"])
    widths = [geometry.layers[layer_idx].width for layer_idx in layers]
    both = " to ".join(f"{width:,}" for width in sorted({min(widths), max(widths)}))
    narrower = geometry.hidden_dim * len(layers) < sum(widths)
    return [
        f"what goes into the attention of target layers {', '.join(map(str, layers))}, which makes their keys and "
        "values itself",
        f"{'narrower than these' if narrower else 'which saves nothing'}: {geometry.hidden_dim:,} channels a token, "
        f"where keys and values together have {both}",
    ]
