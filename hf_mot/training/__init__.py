"""Training translators with `transformers.Trainer`."""

from .arguments import MoTTrainingArguments
from .channel_search import search_channels
from .collator import PairCollator
from .datasets import TextDataset, TextFiles
from .examples import TrainingExample, iterate_examples
from .losses import LOSSES, LossInputs, weighted_sum
from .trainer import MoTTrainer

__all__ = [
    "LOSSES",
    "LossInputs",
    "MoTTrainer",
    "MoTTrainingArguments",
    "PairCollator",
    "TextDataset",
    "TextFiles",
    "TrainingExample",
    "iterate_examples",
    "search_channels",
    "weighted_sum",
]
