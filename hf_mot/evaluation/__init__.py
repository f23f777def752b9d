"""How much of a context's worth a translation keeps: tasks, windows, arms, metrics, verdict, cost, reports."""

from hf_mot.evaluation.arms import ARMS
from hf_mot.evaluation.curve import default_plans
from hf_mot.evaluation.files import save_report
from hf_mot.evaluation.gate import Gate
from hf_mot.evaluation.runner import evaluate
from hf_mot.evaluation.settings import DEFAULT_ARMS
from hf_mot.evaluation.store import ResultStore
from hf_mot.evaluation.tasks import TASKS, Example, load_examples

__all__ = [
    "ARMS",
    "DEFAULT_ARMS",
    "TASKS",
    "Example",
    "Gate",
    "ResultStore",
    "default_plans",
    "evaluate",
    "load_examples",
    "save_report",
]
