"""The cache of each arm: what the target, or the source, then has of the contexts."""

import zlib
from dataclasses import replace

import torch

from hf_mot.cache_mot import TranslatedCache
from hf_mot.capture_mot import prefill, source_states
from hf_mot.evaluation.answers import greedy_answers, read_on, wrap
from hf_mot.evaluation.batch import Batch, Models
from hf_mot.inputs_mot import TranslationInputs
from hf_mot.replay_mot import ReplayPlan
from hf_mot.rows_mot import left_pad, positions_from_mask

SUMMARY_TOKENS = 64


def native(batch: Batch) -> TranslatedCache:
    """The target reads the context itself."""
    return batch.native_cache


def no_context(batch: Batch) -> TranslatedCache:
    """The target reads its leading special tokens alone, or nothing if it has none."""
    prefix_ids, rows = batch.models.prefix_ids, len(batch.contexts)
    mask = torch.ones(rows, len(prefix_ids), dtype=torch.long, device=batch.padded[0].device)
    if not prefix_ids:
        return TranslatedCache([], [], mask)
    cache = prefill(batch.models.target, torch.tensor([prefix_ids] * rows))
    return wrap(cache, mask, batch.models.translator.target_geometry.sliding)


def translated(batch: Batch) -> TranslatedCache:
    """The source reads the context's text, and its cache is translated."""
    return batch.translated_cache


def identity(batch: Batch) -> TranslatedCache:
    """The target's own cache through the same path as a translation: must equal native."""
    # The same ids on both sides: the text alone can be tokenised otherwise at the cut, which would not be an oracle.
    ids, mask = batch.padded
    tokenizer = batch.models.target_tokenizer
    return batch.models.identity.translate(
        batch.native_cache,
        ids,
        source_attention_mask=mask,
        target=batch.models.target,
        source_tokenizer=tokenizer,
        target_tokenizer=tokenizer,
        target_input_ids=ids,
        target_attention_mask=mask,
        text=batch.texts,
        replay=ReplayPlan.parse(batch.models.replay).unguided,
    )


def no_source(batch: Batch) -> TranslatedCache:
    """The twin's translation, made from the target's token embeddings, and from its own hidden state if that is
    read."""
    return batch.twin_cache


def target_layers_only(batch: Batch) -> TranslatedCache:
    """What the target's own first layers tell: the same plan, with a translator of the layers above that reads the
    target's own states alone. For a translator that reads the target's hidden state that is the twin without a source,
    the same as `no_source`, and computed once for both. Other translators have no such control."""
    return batch.twin_cache


def wrong_source(batch: Batch) -> TranslatedCache:
    """The translator reads the right target tokens, each beside the source state of another document's token of the
    same number (from its start again where that document is shorter)."""
    models = batch.models
    own = batch.inputs(models.translator)
    other = Batch(models, batch.others).inputs(models.translator)
    prefix, states = len(models.prefix_ids), torch.zeros_like(own.source_states)
    for row, (mask, other_mask) in enumerate(zip(own.target_mask, other.target_mask, strict=True)):
        length, other_length = int(mask.sum()), int(other_mask.sum())
        index = torch.arange(length, device=states.device)
        index = torch.where(index < prefix, index, prefix + (index - prefix) % (other_length - prefix))
        states[row, -length:] = other.source_states[row, -other_length:][index]
    plan = models.plan(own)
    own = models.translator.read_target(replace(own, source_states=states), models.target, plan)
    return models.assemble(models.translator, models.translator.run(own, plan), own)


def zero_cache(batch: Batch) -> TranslatedCache:
    """A translation of zeros."""
    ids, mask = batch.padded
    return _made_up(batch, torch.zeros(*ids.shape, _width(batch.models), device=ids.device))


def random_cache(batch: Batch) -> TranslatedCache:
    """A translation of noise that has, per context and channel, mean and variance of the target's own states."""
    ids, mask = batch.padded
    geometry, positions = batch.models.translator.target_geometry, positions_from_mask(mask)
    states = source_states(batch.native_cache, geometry, range(len(geometry.layers)), positions).float()
    noise = torch.zeros_like(states)
    kept = mask.bool() & (positions >= len(batch.models.prefix_ids))
    for row, context in enumerate(batch.contexts):
        own = states[row][kept[row]]
        # By content, so that the batch it is in makes no difference.
        generator = torch.Generator().manual_seed(zlib.crc32(context.text.encode()))
        drawn = torch.randn(own.shape, generator=generator).to(own.device)
        noise[row, kept[row]] = own.mean(0) + own.std(0, correction=0) * drawn
    return _made_up(batch, noise)


def _width(models: Models) -> int:
    return sum(layer.width for layer in models.translator.target_geometry.layers)


def _made_up(batch: Batch, states: torch.Tensor) -> TranslatedCache:
    """A cache of position-free states `[batch, seq, width]`, by the way that translations take."""
    models = batch.models
    inputs = TranslationInputs(None, None, *batch.padded)
    return models.assemble(models.identity, models.identity(states, None), inputs)


def text_handoff(batch: Batch) -> TranslatedCache:
    """The target reads what the source writes about the context, without knowing the question."""
    models = batch.models
    writer = models.prompters["source"]
    prompt_ids = writer.encode(writer.summary_prompt())
    cache = read_on(models.source, batch.source_cache, [prompt_ids[:-1]] * len(batch.contexts))
    last_ids, plain = prompt_ids[-1:] * len(batch.contexts), writer.style == "plain"
    summaries = greedy_answers(models.source, models.source_tokenizer, cache, last_ids, SUMMARY_TOKENS, one_line=plain)
    rows = [models.prompters["target"].context_ids(summary) for summary in summaries]
    if not any(rows):
        return no_context(batch)
    ids, mask = left_pad(rows)
    mask = mask.to(batch.padded[1])
    return wrap(prefill(models.target, ids, mask), mask, models.translator.target_geometry.sliding)


def source_alone(batch: Batch) -> TranslatedCache:
    """The source reads the context, and answers itself."""
    return batch.source_cache
