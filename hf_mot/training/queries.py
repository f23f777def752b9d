"""The queries of a prefill, layer by layer, as the model's attention meets them.

Shapes: queries and keys are `[batch, heads, seq, head_dim]`, masks of attention `[batch or 1, 1 or heads, seq, seq]`.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_mot.attention_mot import intercepted_attention, scaled
from hf_mot.capture_mot import prefill


@dataclass(frozen=True)
class LayerQueries:
    """
    The queries of one layer, and how its attention uses them.

    Args:
        states (`torch.Tensor`): `[batch, query_heads, seq, head_dim]`, positions on, the model's scaling in them.
        allowed (`torch.Tensor`, *optional*): True where a query (second last) may look at a key (last). Causal by
            default.
        softcap (`float`, *optional*): Scores become `softcap * tanh(score / softcap)`.
    """

    states: torch.Tensor
    allowed: torch.Tensor | None = None
    softcap: float | None = None

    def log_attention(self, key_states: torch.Tensor) -> torch.Tensor:
        """Log of the attention that these queries pay to keys `[batch, kv_heads, seq, head_dim]`, positions on:
        `[batch, query_heads, seq, seq]`, in fp32, -inf where they may not look."""
        kv_heads = key_states.shape[1]
        # Query heads that share a key head are neighbours: [batch, kv_heads, group, seq, head_dim]
        queries = self.states.to(key_states.device).float().unflatten(1, (kv_heads, -1))
        scores = (queries @ key_states.float()[:, :, None].transpose(-1, -2)).flatten(1, 2)
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        allowed = self.allowed
        if allowed is None:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        allowed = allowed.to(scores.device)
        # A pad sees nothing; it looks everywhere instead, so that no NaN spreads from a row that does not count.
        allowed = allowed | ~allowed.any(-1, keepdim=True)
        return scores.masked_fill(~allowed, float("-inf")).log_softmax(-1)


@torch.no_grad()
def capture_queries(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> tuple[LayerQueries, ...]:
    """
    Runs a model over a context and keeps what each layer's attention asks.

    Args:
        model (`PreTrainedModel`): The model; its config and modules stay as they are.
        input_ids (`torch.Tensor`): `[batch, seq]`, left-padded.
        attention_mask (`torch.Tensor`, *optional*): `[batch, seq]`, 0 on pads.

    Returns:
        `tuple[LayerQueries, ...]`: One entry a layer, lowest first.

    Raises:
        ValueError: A family whose attention does not go through transformers' attention functions (Falcon, Bloom,
            GPT-Neo, MPT), or has sinks or a position bias.
    """
    name, found = type(model).__name__, {}

    def record(layer_idx, attend, query, key, value, mask, scaling=None, softcap=None, **options):
        for extra in ("s_aux", "position_bias"):
            if options.get(extra) is not None:
                raise ValueError(f"{name} adds `{extra}` to its attention, which is not supported here.")
        found[layer_idx] = LayerQueries(scaled(query, scaling), _allowed(mask), softcap)
        options |= {} if softcap is None else {"softcap": softcap}
        return attend(query, key, value, mask, scaling=scaling, **options)

    with intercepted_attention(model, record):
        prefill(model, input_ids, attention_mask, layers=())
    if len(found) != model.config.get_text_config().num_hidden_layers:
        raise ValueError(
            f"{name} ran {len(found)} of its layers through transformers' attention functions, so that its queries "
            "cannot be read. Leave the loss 'key_attention' out for this model."
        )
    return tuple(found[layer_idx] for layer_idx in sorted(found))


def _allowed(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    if attention_mask is None or attention_mask.dtype == torch.bool:
        return attention_mask
    return attention_mask > torch.finfo(attention_mask.dtype).min / 2  # additive
