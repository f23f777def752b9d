"""Answers after a cache: what they cost in nats, and what a model says itself.

A batch of prompts of unequal length is run right-padded, and what was cached is packed to the right before the next
tokens: so no pad ever stands between two tokens, which a sliding window would count.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.cache_mot import TranslatedCache
from hf_mot.capture_mot import positions_from_mask
from hf_mot.compat_mot import cache_argument, run_decoder
from hf_mot.generation_mot import attach
from hf_mot.layers_mot import input_device

# Rows of logits that are normalised at a time: with 262k tokens in the vocabulary one row in fp32 takes 1 MB. glibc
# gets a block above 32 MB from the system anew each time, which takes as long as normalising it.
LOGIT_ROWS = 16


def wrap(cache, mask: torch.Tensor, sliding: bool) -> TranslatedCache:
    """A model's own cache in the form that all arms have."""
    keys, values = ([getattr(layer, name) for layer in cache.layers] for name in ("keys", "values"))
    return TranslatedCache(keys, values, mask, sliding=sliding)


def right_pad(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids as one right-padded tensor and its mask, `[batch, longest]`."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, values in enumerate(rows):
        ids[row, : len(values)] = torch.tensor(values, dtype=torch.long)
        mask[row, : len(values)] = 1
    return ids.to(device), mask.to(device)


def read_on(model: PreTrainedModel, cache: TranslatedCache, rows: list[list[int]]) -> TranslatedCache:
    """The cache after each of its rows has read some more ids, packed: pads are at the left end alone."""
    if not any(rows):
        return cache
    ids, mask = right_pad(rows, input_device(model))
    mask = torch.cat([cache.prefix_mask.to(mask), mask], dim=1)
    fork = cache.fork()
    run_decoder(model, ids, fork, mask, positions_from_mask(mask)[:, -ids.shape[1] :])
    return wrap(fork, mask, cache.sliding).packed()


def prompt_logits(
    model: PreTrainedModel, cache: TranslatedCache, rows: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Runs a prompt over a cache, which is not changed. Gradients flow to the cache.

    Args:
        model (`PreTrainedModel`): The model, with its LM head.
        cache (`TranslatedCache`): What comes before.
        rows (`list[list[int]]`): Ids, of at least two tokens each.

    Returns:
        `tuple(torch.Tensor)`: Logits after each id but the last of each row, `[batch, longest - 1, vocab]`, and the
        ids, `[batch, longest]`; both right-padded.
    """
    ids, mask = right_pad(rows, input_device(model))
    inputs = {"input_ids": ids[:, :-1]}
    whole = torch.cat([cache.prefix_mask.to(mask), mask[:, :-1]], dim=1)
    if not bool(whole.all()):
        inputs["attention_mask"] = whole
        if "position_ids" in inspect.signature(model.forward).parameters:
            inputs["position_ids"] = positions_from_mask(whole)[:, -inputs["input_ids"].shape[1] :]
    return model(**inputs, **{cache_argument(model): cache.fork()}).logits, ids


def token_losses(model: PreTrainedModel, cache: TranslatedCache, rows: list[list[int]]) -> list[torch.Tensor]:
    """
    The NLL of each token but the first of each row, teacher-forced.

    Args:
        model, cache, rows: As in [`prompt_logits`].

    Returns:
        `list[torch.Tensor]`: Per row its `len - 1` losses in nats, in fp32, on the CPU.
    """
    lengths = [len(row) - 1 for row in rows]
    scored = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # [batch, longest - 1]
    with head_at(model, scored):
        logits, ids = prompt_logits(model, cache, rows)
    if logits.shape[:2] == scored.shape:  # a head that was not heard: compiled before, or none by name
        logits = logits[scored.to(logits.device)][None]
    labels = ids[:, 1:][scored.to(ids.device)]
    return list(cross_entropy(logits, labels[None])[0].split(lengths))


@contextmanager
def head_at(model: PreTrainedModel, places: torch.Tensor) -> Iterator[None]:
    """Within it the LM head runs at some places alone, a mask `[batch, seq]`, and logits are `[1, places, vocab]`:
    those of pads are dear with a large vocabulary. A model that shows no head, or was compiled before, gives all."""
    head = model.get_output_embeddings()
    if head is None:
        yield
        return

    def choose(head, args):
        return args[0][places.to(args[0].device)][None], *args[1:]

    hook = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """NLL of each label, `[batch, seq]`, in fp32, on the CPU."""
    rows = zip(logits.flatten(0, 1).split(LOGIT_ROWS), labels.flatten().split(LOGIT_ROWS), strict=True)
    losses = [
        F.cross_entropy(row_logits.float(), row_labels.to(row_logits.device), reduction="none")
        for row_logits, row_labels in rows
    ]
    return torch.cat(losses).view(labels.shape).cpu()


def continuation_nll(target: PreTrainedModel, cache: Cache, continuation_ids: torch.Tensor) -> torch.Tensor:
    """
    How well the target goes on from a cache without pads: the mean NLL of y_2 .. y_n, teacher-forced.

    Args:
        target (`PreTrainedModel`): The target, with its LM head.
        cache (`Cache`): The context's cache; it is written to.
        continuation_ids (`torch.Tensor` of shape `(batch, n)`): y_1 .. y_n.

    Returns:
        `torch.Tensor` of shape `(batch,)`: Nats per token, in fp32, on the CPU.
    """
    continuation_ids = continuation_ids.to(input_device(target))
    logits = target(input_ids=continuation_ids[:, :-1], **{cache_argument(target): cache}).logits
    return cross_entropy(logits, continuation_ids[:, 1:]).mean(dim=1)


def line_ends(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens at which an answer of one line ends."""
    encoded = tokenizer(["\n", "\n\n"], add_special_tokens=False)["input_ids"]
    return {ids[0] for ids in encoded if len(ids) == 1}


def greedy_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: TranslatedCache,
    last_ids: list[int],
    max_new_tokens: int,
    *,
    one_line: bool = True,
) -> list[str]:
    """
    What the model says after a cache and one more token a row, greedily.

    Args:
        model (`PreTrainedModel`): The model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        cache (`TranslatedCache`): Contexts and prompts, without the prompts' last tokens.
        last_ids (`list[int]`): These.
        max_new_tokens (`int`): Length of an answer, at most.
        one_line (`bool`, *optional*, defaults to `True`): Whether it ends with its line.
    """
    eos = model.generation_config.eos_token_id
    ends = set() if eos is None else set(torch.as_tensor(eos).flatten().tolist())
    ends |= {tokenizer.eos_token_id} - {None}
    ends |= line_ends(tokenizer) if one_line else set()
    ids = torch.tensor(last_ids, device=input_device(model))[:, None]
    options = {"eos_token_id": sorted(ends), "pad_token_id": min(ends)} if ends else {}
    output = attach(model).generate(
        input_ids=ids, past_key_values=cache, max_new_tokens=max_new_tokens, do_sample=False, **options
    )
    answers = []
    for row in output[:, 1:].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row))
        text = tokenizer.decode(row[:end], skip_special_tokens=True).strip()
        answers.append(text.partition("\n")[0].strip() if one_line else text)
    return answers
