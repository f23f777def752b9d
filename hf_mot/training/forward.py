"""The target's two readings of a batch that a loss compares: after the translated context, and by itself.

Shapes: keys and values are `[batch, kv_heads, seq, head_dim]`, ids and masks `[batch, seq]`; contexts are left-padded,
prompts right-padded, so that no pad stands between two tokens.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_mot.cache_mot import TranslatedCache
from hf_mot.compat_mot import cache_argument, decoder_of, run_decoder
from hf_mot.geometry_mot import ModelGeometry
from hf_mot.rows_mot import positions_from_mask


@dataclass
class Prompt:
    """
    What follows the contexts.

    Args:
        ids, mask (`torch.Tensor`): `[batch, prompt]`, right-padded.
        labels (`torch.Tensor`): `[batch, prompt]`, -100 on what is not scored, the first token among it.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor

    @property
    def scored(self) -> torch.Tensor:
        """`[batch, prompt - 1]`: whether the logits of a place are compared."""
        return self.labels[:, 1:] != -100

    @property
    def scored_labels(self) -> torch.Tensor:
        """`[scored tokens]`."""
        return self.labels[:, 1:][self.scored]


def prompt_logits(target: PreTrainedModel, cache: TranslatedCache, prompt: Prompt) -> torch.Tensor:
    """The target's logits `[scored tokens, vocab]` for a prompt after a translated context. Gradients flow to the
    cache's states."""
    whole = torch.cat([cache.prefix_mask.to(prompt.mask), prompt.mask[:, :-1]], dim=1)
    logits = _run(target, prompt.ids[:, :-1], whole, cache.fork())
    return logits[prompt.scored.to(logits.device)]


@torch.no_grad()
def native_reading(
    target: PreTrainedModel, context_ids: torch.Tensor, context_mask: torch.Tensor, prompt: Prompt | None
) -> tuple[Cache, torch.Tensor | None]:
    """The target reads contexts, and prompts if there are any, itself: the cache (of both) and the logits
    `[scored tokens, vocab]`."""
    device, cache = target.get_input_embeddings().weight.device, DynamicCache()
    context_ids, context_mask = context_ids.to(device), context_mask.to(device)
    if prompt is None:
        run_decoder(target, context_ids, cache, context_mask, positions_from_mask(context_mask))
        return cache, None
    ids = torch.cat([context_ids, prompt.ids[:, :-1].to(device)], dim=1)
    mask = torch.cat([context_mask, prompt.mask[:, :-1].to(device)], dim=1)
    logits = _run(target, ids, mask, cache, keep=prompt.ids.shape[1] - 1)
    return cache, logits[prompt.scored.to(device)]


def context_states(
    cache: Cache, layers: Sequence[int], length: int, geometry: ModelGeometry | None, mask: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Keys and values of the first `length` tokens, layer by layer; with a geometry, their positions are taken off."""
    keys, values = [], []
    for layer_idx in layers:
        pair = (cache.layers[layer_idx].keys[:, :, :length], cache.layers[layer_idx].values[:, :, :length])
        if geometry is not None:
            pair = geometry.strip_positions(layer_idx, *pair, positions_from_mask(mask).to(pair[0].device))
        keys.append(pair[0])
        values.append(pair[1])
    return tuple(keys), tuple(values)


@contextmanager
def layer_outputs(model: PreTrainedModel, wanted: bool = True) -> Iterator[list[torch.Tensor]]:
    """Collects the outputs `[batch, seq, hidden]` of the decoder layers of what runs within, lowest first."""
    found: list[torch.Tensor] = []
    hooks = []
    if wanted:
        depth = model.config.get_text_config().num_hidden_layers
        stacks = [m for m in decoder_of(model).modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
        for layer in stacks[0]:
            hooks.append(
                layer.register_forward_hook(
                    lambda module, args, output: found.append(output[0] if isinstance(output, tuple) else output)
                )
            )
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _run(target: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: Cache, keep: int | None = None):
    """Logits of a call that the end of `mask` belongs to; of its last `keep` tokens alone."""
    device = target.get_input_embeddings().weight.device
    ids, mask = ids.to(device), mask.to(device)
    accepted = inspect.signature(target.forward).parameters
    options = {"attention_mask": mask}
    if "position_ids" in accepted:
        options["position_ids"] = positions_from_mask(mask)[:, -ids.shape[1] :]
    if keep is not None and "logits_to_keep" in accepted:  # the vocabulary is wide
        options["logits_to_keep"] = keep
    logits = target(input_ids=ids, **options, **{cache_argument(target): cache}).logits
    return logits if keep is None else logits[:, -keep:]
