"""Recovery and source value of a translator in training, on documents that it is not trained on."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.contract_mot import special_prefix
from hf_mot.data import iterate_documents
from hf_mot.evaluation.arms import Models
from hf_mot.evaluation.context_nll import CONTEXT_NLL, measure_documents
from hf_mot.evaluation.settings import check_replay, check_twin
from hf_mot.evaluation.store import ResultStore
from hf_mot.evaluation.windows import check_context_length, cut_windows
from hf_mot.modeling_mot import MoTModel
from hf_mot.replay_mot import ReplayPlan


def check_evaluation(
    translator: MoTModel,
    plan: ReplayPlan,
    documents: Iterable[str] | None,
    no_source: MoTModel | None,
    source: PreTrainedModel | None,
    target: PreTrainedModel | None,
    context_length: int,
    allow_variant: bool = False,
) -> None:
    """
    Refuses what recovery and source value cannot be measured with. Arguments as in [`ContextEvaluation`].

    Raises:
        `ValueError`: a twin without documents, or that is no control of the translator; a model that is missing; a
            plan of more tokens than the context has.
    """
    if documents is None:
        if no_source is not None:
            raise ValueError(
                "`no_source` has no effect without `eval_documents`, on which the source value is measured. Give "
                "both, or neither."
            )
        return
    for name, model in (("target", target), ("source", source)):
        if model is None and (name == "target" or translator.config.source_layers):
            raise ValueError(
                f"`{name}` is required to measure recovery on `eval_documents`, got None. Pass it with its tokenizer, "
                "or leave the documents out."
            )
    try:
        check_context_length(context_length, translator.target_geometry.max_positions)
    except ValueError as error:
        raise ValueError(f"`eval_context_length`: {error}") from error
    check_replay(translator, str(plan), context_length)
    if no_source is not None:
        check_twin(no_source, target, allow_variant)
        no_source.plan(plan)


class ContextEvaluation:
    """
    Measures context-NLL (`hf_mot.evaluation`) of one translator again and again. What does not depend on it (the
    target's own reading, no context, the twin without source) is measured once.

    Args:
        documents (`Iterable[str]`): Held-out documents.
        target, target_tokenizer: The target and its tokenizer.
        source, source_tokenizer (*optional*): The source's; needed by a translator that reads it.
        no_source ([`MoTModel`], *optional*): The translator's twin without source, for the source value.
        context_length (`int`): Target tokens of context.
        limit (`int`): Documents, at most.
        replay (`str`): Replay plan.
        batch_size (`int`): Contexts read together.
        seed (`int`): Order of the documents.

    Raises:
        `ValueError`: no document is long enough.
    """

    def __init__(
        self,
        documents: Iterable[str],
        *,
        target: PreTrainedModel,
        target_tokenizer: PreTrainedTokenizerBase,
        source: PreTrainedModel | None,
        source_tokenizer: PreTrainedTokenizerBase | None,
        no_source: MoTModel | None,
        context_length: int,
        limit: int,
        replay: str,
        batch_size: int,
        seed: int,
    ):
        prefix_ids = special_prefix(target_tokenizer)[0]
        self.windows = cut_windows(
            iterate_documents(documents),
            target_tokenizer,
            prefix_ids=prefix_ids,
            context_length=context_length,
            limit=limit,
            seed=seed,
        )
        self.models = {
            "source": source,
            "target": target,
            "source_tokenizer": source_tokenizer,
            "target_tokenizer": target_tokenizer,
            "no_source": no_source,
            "identity": None,
            "prefix_ids": prefix_ids,
            "replay": replay,
        }
        self.settings = {"context_length": context_length, "seed": seed}
        self.batch_size = batch_size
        self.constant = ["native", "no_context", *(["no_source"] if no_source is not None else [])]
        self.known: dict[str, dict[str, dict[str, Any]]] = {}

    @torch.no_grad()
    def __call__(self, translator: MoTModel) -> dict[str, float]:
        """`recovery` and, with a twin, `source_value`: each where it is defined (native clearly beats its control)."""
        store = ResultStore()
        for arm, results in self.known.items():
            store.add(CONTEXT_NLL, arm, results.items())
        figures, _ = measure_documents(
            Models(translator=translator, **self.models),
            self.windows,
            [*self.constant, "translated"],
            store,
            self.settings,
            self.batch_size,
            progress=False,
        )
        self.known = {arm: store.results(CONTEXT_NLL, arm) for arm in self.constant}
        return {name: figures[name]["value"] for name in ("recovery", "source_value") if name in figures}
