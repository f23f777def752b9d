"""The package's public names, known to transformers' Auto classes."""

from transformers import AutoConfig, AutoModel

from .cache_mot import TranslatedCache
from .configuration_mot import MoTConfig
from .generation_mot import attach, detach
from .modeling_mot import MoTModel
from .replay_mot import ReplayPlan

__all__ = ["MoTConfig", "MoTModel", "ReplayPlan", "TranslatedCache", "attach", "detach"]

AutoConfig.register("mot", MoTConfig)
AutoModel.register(MoTConfig, MoTModel)
MoTConfig.register_for_auto_class()
MoTModel.register_for_auto_class("AutoModel")
