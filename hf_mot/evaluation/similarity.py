"""How alike two caches of the same tokens are, and what attention makes of them: cosines, over the layers that were
translated and those above."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from hf_mot.cache_mot import TranslatedCache
from hf_mot.evaluation.batch import Models
from hf_mot.replay_mot import ReplayPlan


def first_layer(models: Models) -> int:
    """The lowest translated layer, or the last of all: native ones have a cosine of 1, which says nothing."""
    plan = ReplayPlan.parse(models.replay)
    lowest = plan.bottom if plan.window is None else plan.window[0]
    return min(lowest, len(models.translator.target_geometry.layers) - 1)


def cache_similarity(models: Models, cache: TranslatedCache, native: TranslatedCache) -> list[dict[str, list[float]]]:
    """
    Cosines of the keys, and of the values, of each context's tokens behind the prefix, averaged over tokens and heads.

    Args:
        models (`Models`): The pair, prefix and replay plan.
        cache, native (`TranslatedCache`): What is judged, and what the target makes itself.

    Returns:
        `list[dict]`: Per context its `keys` and `values`, a figure for each layer from [`first_layer`] up.
    """
    first, mask = first_layer(models), native.prefix_mask
    kept = (mask.cumsum(-1) > len(models.prefix_ids)) & mask.bool()  # [batch, seq]
    found = {}
    for name in ("keys", "values"):
        layers = []
        for own, right in zip(cache.layers[first:], native.layers[first:], strict=True):
            cosine = torch.cosine_similarity(getattr(own, name).float(), getattr(right, name).float(), dim=-1)
            weight = kept.to(cosine.device)
            layers.append(((cosine.mean(dim=1) * weight).sum(dim=1) / weight.sum(dim=1)).cpu())
        found[name] = torch.stack(layers, dim=1).tolist()
    return [dict(zip(found, pair, strict=True)) for pair in zip(*found.values(), strict=True)]


@contextmanager
def attention_outputs(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """While open, fills a list with what each attention module puts out, `[batch, seq, hidden]`, layer by layer."""
    seen: list[torch.Tensor] = []
    names: list[str] = []
    hooks = []

    def keep(module, args, output):
        seen.append(output[0] if isinstance(output, tuple) else output)

    for name, module in model.get_decoder().named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if type(module).__name__.endswith("Attention") and not inside:
            names.append(name)
            hooks.append(module.register_forward_hook(keep))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def attention_similarity(
    models: Models, own: Sequence[torch.Tensor], native: Sequence[torch.Tensor]
) -> list[list[float]]:
    """Cosine of attention outputs over the same tokens, averaged over tokens: per context a figure for each layer from
    [`first_layer`] up."""
    first = first_layer(models)
    layers = [
        torch.cosine_similarity(left.float(), right.float(), dim=-1).mean(dim=1).cpu()
        for left, right in zip(own[first:], native[first:], strict=True)
    ]
    return torch.stack(layers, dim=1).tolist()
