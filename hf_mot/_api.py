"""The package's public names, known to transformers' Auto classes."""

from transformers import AutoConfig, AutoModel

from .cache_mot import TranslatedCache
from .configuration_mot import MoTConfig
from .generation_custom_mot import custom_generate
from .generation_mot import attach, detach
from .modeling_mot import MoTModel
from .replay_mot import ReplayPlan

__all__ = ["MoTConfig", "MoTModel", "ReplayPlan", "TranslatedCache", "attach", "custom_generate", "detach"]

AutoConfig.register("mot", MoTConfig)
AutoModel.register(MoTConfig, MoTModel)
MoTConfig.register_for_auto_class()
MoTModel.register_for_auto_class("AutoModel")
