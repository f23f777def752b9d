"""One evaluation as it goes on: its parts are measured one after the other, and its report grows."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hf_mot.alignment_mot import tokenize_with_spans
from hf_mot.evaluation.arms import ARMS, find_arm
from hf_mot.evaluation.batch import Models
from hf_mot.evaluation.context_nll import CONTEXT_NLL, measure_documents
from hf_mot.evaluation.cost import measure_cost
from hf_mot.evaluation.curve import curve_points
from hf_mot.evaluation.describe import (
    describe_dtype,
    describe_pair,
    describe_translator,
    fingerprint,
    pair_fingerprint,
)
from hf_mot.evaluation.gate import Gate, judge
from hf_mot.evaluation.measure import CRASHES, describe_crash, grouped
from hf_mot.evaluation.overlap import count_overlap
from hf_mot.evaluation.question_answering import Questions
from hf_mot.evaluation.store import ResultStore
from hf_mot.evaluation.task_figures import measure_task
from hf_mot.evaluation.windows import Window, Windows, cut_windows, joined_window
from hf_mot.replay_mot import ReplayPlan
from hf_mot.versions import versions

# From this length on, documents are few, and each gives several windows.
LONG_CONTEXT, WINDOWS_OF_LONG_CONTEXT = 1024, 4


@dataclass
class Run:
    """
    What every part of an evaluation measures with, and what was found so far.

    Args:
        models (`Models`): All that an arm may use.
        arms (`list[str]`): Names of arms, as in `find_arm`.
        plans (`list[str]`): The replay plans of the curve; empty without one.
        store (`ResultStore`): Keeps the results of each example.
        seed (`int`): Seed of the order of documents and of the bootstrap.
        batch_size (`int`): Contexts per forward.
        progress (`bool`): Whether to show a progress bar.

    Attributes:
        report (`dict`): As far as it has got.
        missing (`dict`): By part, then by arm, why it has no figures.
    """

    models: Models
    arms: list[str]
    plans: list[str]
    store: ResultStore
    seed: int
    batch_size: int
    progress: bool
    report: dict[str, Any] = field(init=False)
    missing: dict[str, dict[str, str]] = field(init=False, default_factory=dict)

    def __post_init__(self):
        translator, models = self.models.translator, self.models
        # By these results are known, whatever they are of: others cannot be gone on with.
        self._settings = {
            "pair": pair_fingerprint(translator),
            "translator": fingerprint(translator),
            "replay": models.replay,
            "dtype": describe_dtype(models.source, models.target),
            "seed": self.seed,
        }
        self.report = {
            "pair": describe_pair(translator),
            "translator": describe_translator(translator),
            **{name: self._settings[name] for name in ("replay", "dtype", "seed")},
        }
        made = {name: baseline.report for name, baseline in models.baselines.items() if baseline.report}
        self.report |= {"baselines": made} if made else {}
        self._tested: dict[str, dict[str, str]] = {}  # the contexts, by part and name
        self._by_plan: dict[str, dict[str, dict[str, Any]]] = {}  # the figures of tasks, by task and plan
        self._costs: dict[str, dict[str, float]] = {}  # by plan
        self._cost_window: Window | None = None  # what cost is measured on

    def measure_documents(
        self, documents: list[str], context_length: int, limit: int | None, cost_context_length: int | None
    ) -> None:
        """Context-NLL. Arguments as in `evaluate`."""
        models, own_arms = self.models, [arm for arm in self.arms if not find_arm(arm).tasks_only]
        found = _cut(models, documents, context_length, limit, self.seed)
        self._cost_window = found.windows[0]
        if cost_context_length not in (None, context_length):
            self._cost_window = joined_window(
                documents, models.target_tokenizer, prefix_ids=models.prefix_ids, context_length=cost_context_length
            )
        self._tested[CONTEXT_NLL] = {str(window.document): documents[window.document] for window in found.windows}
        settings = {**self._settings, "context_length": context_length}
        figures, failed = measure_documents(
            models, found, own_arms, self.store, settings, self.batch_size, self.progress
        )
        self.report |= figures
        self.missing |= {CONTEXT_NLL: failed} if failed else {}

    def measure_task(self, name: str, questions: Questions, closed_sets: str) -> None:
        """The questions of a task. Arguments as in `evaluate`."""
        # Only what concerns the wrong document in general is of no use for questions.
        own_arms = [arm for arm in self.arms if arm != "native_wrong_document"]
        self._tested[name] = {question.id: question.example.context for question in questions.items}
        first = questions.items[0]
        self._cost_window = self._cost_window or Window(0, first.text, first.context_ids, first.prompt_ids)
        figures, failed = measure_task(
            name,
            self.models,
            questions,
            own_arms,
            self.store,
            self._settings,
            closed_sets,
            self.batch_size,
            self.progress,
        )
        self._by_plan[name] = figures
        self.report.setdefault("tasks", {})[name] = figures[self.models.replay]
        self.missing |= {name: failed} if failed else {}

    def count_overlap(self, fit_corpus: Iterable[str]) -> None:
        """Test contexts that share runs of words with the fit's documents."""
        self.report["overlap"] = count_overlap(self._tested, fit_corpus)

    def judge(self, gate: Gate) -> None:
        """The verdict on what was measured."""
        self.report["gate"] = judge({**self.report, "missing": self.missing}, gate)

    @property
    def _length(self) -> int:
        """Tokens of context that FLOPs are counted for: those of the recovery beside them."""
        return self.report.get("context_length", len(self._cost_window.context_ids))

    def count_flops(self) -> None:
        """By arm its FLOPs as a share of the target's own reading."""
        flops = {arm: ARMS[arm].flops for arm in self.arms if arm in ARMS and ARMS[arm].flops is not None}
        native = ARMS["native"].flops(self.models, self._length)
        self.report["flops_ratios"] = {arm: of(self.models, self._length) / native for arm, of in flops.items()}

    def measure_cost(self) -> None:
        """Times and sizes, of each plan that there are tokens enough for; a crash is one of the translator."""
        own = len(self._cost_window.context_ids) - len(self.models.prefix_ids)
        plans = [plan for plan in self.plans if ReplayPlan.parse(plan).run_tokens <= own]
        try:
            cost = measure_cost(self.models, self._cost_window, plans=plans)
        except CRASHES as error:
            self.missing["cost"] = {"translated": describe_crash(error)}
            return
        self._costs = cost.pop("by_plan", {})
        self.report["cost"] = cost

    def add_curve(self) -> None:
        """What was measured by each plan."""
        config = self.models.translator.config
        shares = {plan: ReplayPlan.parse(plan).flops_share(config, self._length) for plan in self.plans}
        self.report["curve"] = curve_points(self.report, shares, self._by_plan, self._costs)

    def finish(self) -> dict[str, Any]:
        """The report."""
        return {**self.report, **({"missing": self.missing} if self.missing else {}), "versions": versions()}


def _cut(models: Models, documents: list[str], context_length: int, limit: int | None, seed: int) -> Windows:
    """The windows of context-NLL that the source has positions for, those of one document next to each other."""
    most = None if models.source is None else models.translator.source_geometry.max_positions
    found = cut_windows(
        documents,
        models.target_tokenizer,
        prefix_ids=models.prefix_ids,
        context_length=context_length,
        limit=limit,
        seed=seed,
        per_document=1 if context_length < LONG_CONTEXT else WINDOWS_OF_LONG_CONTEXT,
        fits=lambda text: most is None or _source_tokens(models, text) <= most,
    )
    found.windows = grouped(found.windows)
    return found


def _source_tokens(models: Models, text: str) -> int:
    """Tokens of a context that the source reads."""
    prefix_ids = models.translator.config.source["prefix_ids"]
    return len(prefix_ids) + len(tokenize_with_spans(models.source_tokenizer, text)[0])
