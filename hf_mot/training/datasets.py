"""Text as a stream of training examples."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from hf_mot.contract_mot import special_prefix
from hf_mot.data import read_documents
from hf_mot.data.states import StatesDataset
from hf_mot.replay_mot import ReplayPlan

from .arguments import MoTTrainingArguments
from .examples import CONTEXT_LENGTH, TrainingExample, iterate_examples


class TextFiles:
    """
    The documents of text files, read anew each time.

    Args:
        paths (`Sequence[str]`): The files, as [`read_documents`] takes them.
        lines (`bool`, *optional*, defaults to `False`): One document a line.
    """

    def __init__(self, paths: Sequence[str], lines: bool = False):
        self.paths, self.lines = paths, lines
        iter(self)  # a file that is not there is missed here

    def __iter__(self) -> Iterator[str]:
        return read_documents(self.paths, lines=self.lines)


class TextDataset(IterableDataset):
    """
    Endless examples from documents, in an order that depends on the seed alone: pass after pass, each shuffled anew.
    So a run that was killed goes on at its place: the Trainer passes over what it has seen.

    Args:
        documents (`Iterable[str]` or a `datasets` dataset with a column `text`): Read once a pass, so it must be
            re-iterable (a list, a dataset, an object with `__iter__`), not an iterator.
        tokenizer (`PreTrainedTokenizerBase`): The target's fast tokenizer.
        passes (`int`, *optional*): Passes over the documents. By default there is no end.
        limit (`int`, *optional*): Examples of a pass, at most.
        kwargs: `length`, `context_length`, `shuffle_buffer`, `seed`, `copy_share` and `name` of [`iterate_examples`].

    Raises:
        `TypeError`: an iterator, which can be read once only.
        `ValueError`: while iterating, if no document gives an example.
    """

    def __init__(
        self,
        documents: Iterable[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        passes: int | None = None,
        limit: int | None = None,
        seed: int = 0,
        **kwargs: Any,
    ):
        if isinstance(documents, Iterator):
            raise TypeError(
                "`documents` must be readable again (a list, a dataset, an object with `__iter__`), got an iterator: "
                "a resumed run reads from the start. Pass list(documents)."
            )
        self.documents, self.tokenizer, self.passes, self.limit, self.seed = documents, tokenizer, passes, limit, seed
        self.kwargs = {"prefix_ids": special_prefix(tokenizer)[0], **kwargs}
        self._head: list[TrainingExample] = []
        iterate_examples([], tokenizer, **self.kwargs)  # refuses impossible settings here, not in the first step

    @classmethod
    def from_args(
        cls, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, args: MoTTrainingArguments, **kwargs: Any
    ) -> "TextDataset":
        """The examples that `args` describes. `kwargs` overrides them."""
        settings = {
            "length": args.length,
            "context_length": args.context_range,
            "copy_share": args.copy_share,
            "shuffle_buffer": args.shuffle_buffer,
            "seed": args.seed if args.data_seed is None else args.data_seed,
        }
        return cls(documents, tokenizer, **{**settings, **kwargs})

    @property
    def least_context(self) -> int:
        """Tokens of the shortest context, prefix included."""
        length = self.kwargs.get("context_length", CONTEXT_LENGTH)
        return length if isinstance(length, int) else min(length)

    def head(self, count: int) -> list[TrainingExample]:
        """The first examples, at most `count`. They are kept: the first one costs a full shuffle buffer."""
        if len(self._head) < count:
            self._head = list(itertools.islice(iter(self), count))
        return self._head[:count]

    def __iter__(self) -> Iterator[TrainingExample]:
        worker = get_worker_info()
        examples = itertools.chain.from_iterable(self._pass(number) for number in self._passes())
        return examples if worker is None else itertools.islice(examples, worker.id, None, worker.num_workers)

    def _passes(self) -> Iterable[int]:
        return itertools.count() if self.passes is None else range(self.passes)

    def _pass(self, number: int) -> Iterator[TrainingExample]:
        examples = iterate_examples(self.documents, self.tokenizer, seed=self.seed + number, **self.kwargs)
        return itertools.islice(examples, self.limit)


def check_contexts(dataset: Any, plan: ReplayPlan, prefix: int) -> None:
    """
    Refuses contexts that the target runs to their last token, where their lengths are known before text is read.

    Args:
        dataset: What is trained or evaluated on.
        plan ([`ReplayPlan`]): What the target computes itself.
        prefix (`int`): Special tokens that each context starts with, which are never translated.

    Raises:
        `ValueError`: names the shortest context.
    """
    if isinstance(dataset, TextDataset | StatesDataset):
        shortest = dataset.least_context
    elif isinstance(dataset, list) and dataset and isinstance(dataset[0], TrainingExample):
        shortest = min(len(example.context_ids) for example in dataset)
    else:
        return
    most = shortest - prefix - 1
    if plan.tokens > most:
        raise ValueError(
            f"`replay` {plan} leaves nothing to translate of a context of {shortest} tokens, {prefix} of them special "
            f"ones. Choose tokens:{most} or fewer, or longer contexts."
        )
