"""How much of a context's worth a translation keeps: windows, arms, metrics, cost."""

from hf_mot.evaluation.arms import ARMS
from hf_mot.evaluation.runner import DEFAULT_ARMS, evaluate, save_report

__all__ = ["ARMS", "DEFAULT_ARMS", "evaluate", "save_report"]
