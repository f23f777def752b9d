"""Raw copy: the source's cache as it is, the floor of what any fit must beat."""

from typing import TYPE_CHECKING, Any

from torch.nn import functional as F

from hf_mot.baselines.states import as_cache, key_and_value_widths, make_shell
from hf_mot.cache_mot import TranslatedCache
from hf_mot.channels_mot import depth_ratio
from hf_mot.modeling_mot import MoTModel

if TYPE_CHECKING:  # which makes arms of baselines, and so imports them
    from hf_mot.evaluation.batch import Batch


class RawCopy:
    """
    Each target layer gets the states of the source layer at the same relative depth, keys at the target's positions,
    channel by channel. Where the two differ in width, channels are left out or filled with zeros.

    Args:
        translator (`MoTModel`): A translator of the pair.
    """

    about = "the source's cache, copied channel by channel"
    is_fitted = False
    report: dict[str, Any] = {}

    def __init__(self, translator: MoTModel):
        depths = (len(side.layers) for side in (translator.source_geometry, translator.target_geometry))
        self.mapping = depth_ratio(*depths)
        self.source_layers = sorted(set(self.mapping))
        self.shell = make_shell(translator.config.source, translator.config.target, self.source_layers)

    def __call__(self, batch: "Batch") -> TranslatedCache:
        inputs = batch.inputs(self.shell)
        source_layers = [self.shell.source_geometry.layers[layer_idx] for layer_idx in self.source_layers]
        parts = inputs.source_states.split(key_and_value_widths(source_layers), dim=-1)
        places = [2 * self.source_layers.index(layer_idx) + part for layer_idx in self.mapping for part in range(2)]
        widths = key_and_value_widths(self.shell.target_geometry.layers)
        states = [
            F.pad(parts[place][..., :width], (0, max(0, width - parts[place].shape[-1])))
            for place, width in zip(places, widths, strict=True)
        ]
        return as_cache(batch, self.shell, inputs, states)

    def flops(self, context_length: int) -> float:
        return 0
