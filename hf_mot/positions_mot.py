"""Take the rotary position encoding off keys, and put it on at other positions.

Shapes: keys are `[batch, kv_heads, seq, head_dim]`, positions `[batch, seq]`.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class RotaryEncoding:
    """
    One rotary position encoding, self-contained, so that keys can be stripped without the model that made them.

    Args:
        inv_freq (`tuple[float, ...]`): Angle per position of each rotated pair, in radians.
        scaling (`float`, *optional*, defaults to 1.0): Factor on the rotated keys (YaRN's attention scaling).
        interleaved (`bool`, *optional*, defaults to `False`):
            Whether a pair is two neighbouring channels (GPT-J, Cohere) instead of channel i and i + half (Llama).
    """

    inv_freq: tuple[float, ...]
    scaling: float = 1.0
    interleaved: bool = False

    def apply(self, key_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Rotates position-free keys to `position_ids`. Channels past the rotary width pass unchanged."""
        cos, sin = self._cos_sin(key_states, position_ids)
        return self._rotate(key_states, cos * self.scaling, sin * self.scaling)

    def strip(self, key_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Undoes `apply`: rotated keys at `position_ids` become position-free."""
        cos, sin = self._cos_sin(key_states, position_ids)
        return self._rotate(key_states, cos / self.scaling, -sin / self.scaling)

    def _cos_sin(self, key_states, position_ids):
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=key_states.device)
        # [batch, 1, seq, pairs]; angles in fp32, as the models compute them
        angles = position_ids.to(key_states.device)[:, None, :, None].float() * inv_freq
        return angles.cos(), angles.sin()

    def _rotate(self, key_states, cos, sin):
        pairs = len(self.inv_freq)
        states = key_states.float()
        rotary, rest = states[..., : 2 * pairs], states[..., 2 * pairs :]
        if self.interleaved:
            first, second = rotary[..., 0::2], rotary[..., 1::2]
        else:
            first, second = rotary[..., :pairs], rotary[..., pairs:]
        rotated = (first * cos - second * sin, second * cos + first * sin)
        rotary = torch.stack(rotated, dim=-1).flatten(-2) if self.interleaved else torch.cat(rotated, dim=-1)
        return torch.cat((rotary, rest), dim=-1).to(key_states.dtype)

    def to_dict(self) -> dict[str, Any]:
        return {"inv_freq": list(self.inv_freq), "scaling": self.scaling, "interleaved": self.interleaved}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RotaryEncoding":
        return cls(tuple(values["inv_freq"]), values["scaling"], values["interleaved"])


@torch.no_grad()
def find_rotary_encodings(model: nn.Module) -> list[RotaryEncoding]:
    """
    The candidate rotary encodings of a model, read from the cosines of its own rotary modules, one a layer type and
    pair layout. Which layer uses which one (or none) is not decided here: `geometry_mot.probe` tries them.
    """
    found: list[RotaryEncoding] = []
    for name, module in model.named_modules():
        if not name.endswith("rotary_emb") or "position_ids" not in inspect.signature(module.forward).parameters:
            continue
        takes_layer_type = "layer_type" in inspect.signature(module.forward).parameters
        layer_types = sorted(set(model.config.get_text_config().layer_types)) if takes_layer_type else [None]
        for layer_type in layer_types:
            config = model.config.get_text_config()
            last = getattr(config, "max_position_embeddings", None) or 2**10
            inv_freq, scaling = _read_frequencies(module, layer_type, last - 1, next(model.parameters()).device)
            backwards = tuple(-frequency for frequency in inv_freq)  # NanoChat
            for frequencies in (inv_freq, backwards):
                for interleaved in (False, True):
                    encoding = RotaryEncoding(frequencies, scaling, interleaved)
                    if encoding not in found:
                        found.append(encoding)
    return found


def _read_frequencies(module: nn.Module, layer_type: str | None, last: int, device: torch.device):
    """Angles per position, from the module's own (cos, sin) at positions 1, 2, 4, … up to 1024 or `last`: each
    doubling refines the angle read at the one before, so the result is as exact as the module's fp32 table."""
    positions = torch.tensor([[0] + [2**k for k in range(11) if 2**k <= max(last, 1)]], device=device)
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    table = module(torch.zeros(1, 1, 1, device=device), positions, **kwargs)  # [1, positions, rotary width] each
    cos, sin = (table.real, table.imag) if isinstance(table, torch.Tensor) else table  # complex: DeepSeek-V2, Llama-4
    if not bool(cos[0, 0].any()):  # (sin, cos): GPT-J
        cos, sin = sin, cos
    scaling = cos[0, 0, 0].item()
    cos, sin = cos[0, 1:].double().cpu(), sin[0, 1:].double().cpu()
    width = cos.shape[-1]
    if torch.equal(cos[:, : width // 2], cos[:, width // 2 :]):  # cat(freqs, freqs)
        cos, sin = cos[:, : width // 2], sin[:, : width // 2]
    elif torch.equal(cos[:, 0::2], cos[:, 1::2]):  # repeat_interleave(freqs, 2)
        cos, sin = cos[:, 0::2], sin[:, 0::2]
    angle = torch.atan2(sin[0], cos[0])
    for step in range(1, cos.shape[0]):
        predicted = angle * 2**step
        measured = torch.atan2(sin[step], cos[step])
        turns = torch.round((predicted - measured) / (2 * torch.pi))
        angle = (measured + 2 * torch.pi * turns) / 2**step
    return tuple(angle.tolist()), scaling
