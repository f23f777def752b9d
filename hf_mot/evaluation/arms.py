"""Arms: the ways in which the target can come by a context, each from windows to a cache, and how that is scored."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.capture_mot import prefill
from hf_mot.compat_mot import cache_argument
from hf_mot.evaluation.windows import Window

# Rows of logits that are normalised at a time: with 262k tokens in the vocabulary one row in fp32 takes 1 MB.
LOGIT_ROWS = 32


@dataclass(frozen=True)
class Models:
    """
    All that an arm may use.

    Args:
        source (`PreTrainedModel`, *optional*): The model whose cache is translated.
        target (`PreTrainedModel`): The model that reads the translation.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*): The source's tokenizer.
        target_tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        translator (`MoTModel`): The translator that is judged.
        no_source (`MoTModel`, *optional*): Its twin, fitted without source features.
        identity (`MoTModel`, *optional*): The translator from the target to itself.
        prefix_ids (`list[int]`): The target's leading special tokens.
        replay (`str`): The replay plan.
    """

    source: PreTrainedModel | None
    target: PreTrainedModel
    source_tokenizer: PreTrainedTokenizerBase | None
    target_tokenizer: PreTrainedTokenizerBase
    translator: PreTrainedModel
    no_source: PreTrainedModel | None
    identity: PreTrainedModel | None
    prefix_ids: list[int]
    replay: str = "none"


@dataclass(frozen=True)
class Batch:
    """
    Windows that are read together. What several arms use is computed once.

    Args:
        models (`Models`): All that an arm may use.
        windows (`list[Window]`): One a document.
    """

    models: Models
    windows: list[Window]

    @cached_property
    def context_ids(self) -> torch.Tensor:
        """Shape `(batch, context_length)`, on the target's device."""
        return torch.tensor([window.context_ids for window in self.windows], device=self.models.target.device)

    @cached_property
    def native_cache(self) -> Cache:
        """The target has read the context itself."""
        return prefill(self.models.target, self.context_ids)

    @cached_property
    def translated_cache(self) -> Cache:
        """The source has read the context's text, and its cache is translated."""
        return self.handoff(self.models.translator, self.models.source, self.models.source_tokenizer)

    def handoff(self, translator, source, source_tokenizer) -> Cache:
        return translator.handoff(
            [window.text for window in self.windows],
            source=source,
            target=self.models.target,
            source_tokenizer=source_tokenizer,
            target_tokenizer=self.models.target_tokenizer,
            target_input_ids=self.context_ids,
            replay=self.models.replay,
        )


@dataclass(frozen=True)
class Arm:
    """
    One way to come by a context.

    Args:
        about (`str`): What the target then reads, for a table.
        cache (`Callable[[Batch], Cache]`): From windows to a cache that is free to be written to.
        wrong (`bool`, *optional*, defaults to `False`): Whether the cache is judged on the document before its own in
            the seeded order: for that document it is the cache of the next one.
    """

    about: str
    cache: Callable[[Batch], Cache]
    wrong: bool = False


def native(batch: Batch) -> Cache:
    """The target reads the context itself."""
    return copy.deepcopy(batch.native_cache)


def no_context(batch: Batch) -> Cache:
    """The target reads its leading special tokens alone, or nothing if it has none."""
    prefix_ids = batch.models.prefix_ids
    if not prefix_ids:
        return DynamicCache()
    return prefill(batch.models.target, batch.context_ids[:, : len(prefix_ids)])


def translated(batch: Batch) -> Cache:
    """The source reads the context's text, and its cache is translated."""
    return batch.translated_cache.fork()


def identity(batch: Batch) -> Cache:
    """The target's own cache through the same path as a translation: must equal native."""
    # The same ids on both sides: the text alone can be tokenised otherwise at the cut, which would not be an oracle.
    return batch.models.identity.translate(
        batch.native_cache,
        batch.context_ids,
        target=batch.models.target,
        source_tokenizer=batch.models.target_tokenizer,
        target_tokenizer=batch.models.target_tokenizer,
        target_input_ids=batch.context_ids,
        text=[window.text for window in batch.windows],
    ).fork()


def no_source(batch: Batch) -> Cache:
    """The twin's translation, made from the target's token embeddings alone."""
    return batch.handoff(batch.models.no_source, None, None).fork()


ARMS = {
    "native": Arm("the context itself", native),
    "no_context": Arm("nothing", no_context),
    "translated": Arm("the source's cache of the context, translated", translated),
    "identity": Arm("its own cache, through the translator's path: must equal native", identity),
    "wrong_document": Arm("the translation of another document", translated, wrong=True),
    "native_wrong_document": Arm("another document itself", native, wrong=True),
    "no_source": Arm("what a twin without source makes of its own embeddings", no_source),
}


def continuation_nll(target: PreTrainedModel, cache: Cache, continuation_ids: torch.Tensor) -> torch.Tensor:
    """
    How well the target goes on from a cache: the mean NLL of y_2 .. y_n, teacher-forced.

    Args:
        target (`PreTrainedModel`): The target, with its LM head.
        cache (`Cache`): The context's cache; it is written to.
        continuation_ids (`torch.Tensor` of shape `(batch, n)`): y_1 .. y_n.

    Returns:
        `torch.Tensor` of shape `(batch,)`: Nats per token, in fp32, on the CPU.
    """
    continuation_ids = continuation_ids.to(target.device)
    logits = target(input_ids=continuation_ids[:, :-1], **{cache_argument(target): cache}).logits
    labels = continuation_ids[:, 1:]
    rows = zip(logits.flatten(0, 1).split(LOGIT_ROWS), labels.flatten().split(LOGIT_ROWS), strict=True)
    losses = [
        F.cross_entropy(row_logits.float(), row_labels.to(row_logits.device), reduction="none")
        for row_logits, row_labels in rows
    ]
    return torch.cat(losses).view(labels.shape).mean(dim=1).cpu()
