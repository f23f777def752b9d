"""The two models of a fit, and the rows they make of text: what a translator reads, and the target's own states."""

import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..alignment_mot import tokenize_with_spans
from ..capture_mot import prefill, source_states
from ..configuration_mot import MoTConfig
from ..contract_mot import describe_model
from ..data import iterate_documents
from ..geometry_mot import ModelGeometry
from ..modeling_mot import MoTModel
from ..restore_mot import attention_inputs
from ..resume_mot import check_resumable
from ..rows_mot import causal_window, positions_from_mask
from .key_metric import KeyMetric
from .norms import KeyLengths
from .weights import channel_weights, output_blocks
from .windows import SHUFFLE_BUFFER, Window, calibration_windows, characters_per_token, shuffled

SAMPLE_TOKENS = 8_192  # for the choice of layers, and again, held out, for the ridge strength


@dataclass
class Pair:
    """
    The two frozen models of a fit and their tokenizers, the metric of errors, and the lengths of native keys.

    Attributes:
        target_hidden_layer (`int`, *optional*): The target layer whose input is read. Those above are fitted alone.
        restored_layers (`Sequence[int]`): The target layers of which the input of the attention is fitted in place of
            keys and values.
        resume_layer (`int`, *optional*): The target layer whose input is fitted beside the layers below it, which are
            fitted alone.
        fitted_geometry ([`ModelGeometry`]): The target's, with the layers that are fitted alone; a `resume_layer` is
            the last of them.
    """

    source: PreTrainedModel
    target: PreTrainedModel
    source_tokenizer: PreTrainedTokenizerBase
    target_tokenizer: PreTrainedTokenizerBase
    seconds: dict[str, float] = field(default_factory=lambda: {"forward": 0.0})
    target_hidden_layer: int | None = None
    restored_layers: Sequence[int] = ()
    resume_layer: int | None = None
    key_metric: KeyMetric | None = None
    key_lengths: tuple[KeyLengths, list[torch.Tensor]] | None = None

    def __post_init__(self):
        self.source_contract = describe_model(self.source, self.source_tokenizer)
        self.target_contract = describe_model(self.target, self.target_tokenizer)
        self.source_geometry = ModelGeometry.from_dict(self.source_contract["geometry"])
        self.target_geometry = ModelGeometry.from_dict(self.target_contract["geometry"])
        end = None if self.resume_layer is None else self.resume_layer + 1
        layers = self.target_geometry.layers[self.first_layer : end]
        self.fitted_geometry = replace(self.target_geometry, layers=layers, windows=None)
        if self.resume_layer is not None:
            check_resumable(self.target, self.target_geometry)

    @property
    def first_layer(self) -> int:
        """The lowest target layer that is fitted; those below are the target's own."""
        return 0 if self.target_hidden_layer is None else self.target_hidden_layer + 1

    @property
    def restored(self) -> list[int]:
        """The places in `fitted_geometry` of the layers of which one state is fitted: those of `restored_layers`, and
        a `resume_layer`."""
        own = [] if self.resume_layer is None else [self.resume_layer]
        return [layer_idx - self.first_layer for layer_idx in (*self.restored_layers, *own)]

    @property
    def output_blocks(self) -> list[int]:
        """Widths of the blocks of a row of outputs."""
        return output_blocks(self.fitted_geometry, self.restored)

    def channel_weights(self, piece_weights: Sequence[Sequence[float]]) -> torch.Tensor:
        """What the squared error of each channel of a row of outputs counts, `[outputs]`. Raises `ValueError` as
        [`channel_weights`]."""
        restored = [place + self.first_layer for place in self.restored]
        weights = channel_weights(piece_weights, self.target_geometry, restored)
        below = sum(layer.width for layer in self.target_geometry.layers[: self.first_layer])
        return weights[below : below + sum(self.output_blocks)]

    @property
    def beside_dims(self) -> list[int]:
        """Widths of what an embedding window of one token and the hidden state add to the source's features."""
        hidden = 0 if self.target_hidden_layer is None else self.target_geometry.hidden_dim
        return [self.target_geometry.embedding_dim, hidden]

    def config(self, **kwargs: Any) -> MoTConfig:
        """A config for these models, of the layers that are fitted."""
        own: dict[str, Any] = {"source": self.source_contract, "target": self.target_contract}
        own |= {"restored_layers": list(self.restored_layers)}
        if self.target_hidden_layer is not None:
            layers = range(self.first_layer, len(self.target_geometry.layers))
            own |= {
                "target_hidden_layer": self.target_hidden_layer,
                "target_layers": list(layers) or [self.first_layer],  # which is refused
                "replay": f"bottom:{self.first_layer}",
            }
        if self.resume_layer is not None:
            layers = list(range(self.resume_layer))
            own |= {"resume_layer": self.resume_layer, "target_layers": layers or [0]}
            own["replay"] = f"resume:{self.resume_layer - 1}"
        return MoTConfig(**own, **kwargs)

    def fits(self, text: str) -> bool:
        """Whether both models have enough positions for a text, prefix included."""
        sides = (
            (self.source_tokenizer, self.source_contract, self.source_geometry),
            (self.target_tokenizer, self.target_contract, self.target_geometry),
        )
        return all(
            geometry.max_positions is None
            or len(tokenize_with_spans(tokenizer, text)[0]) + len(contract["prefix_ids"]) <= geometry.max_positions
            for tokenizer, contract, geometry in sides
        )

    @torch.no_grad()
    def rows(self, shell: MoTModel, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (source states of the `source_window`, then the embedding window, then the target's hidden state)
        and outputs (the target's own position-free states of the layers that are fitted, or what goes into their
        attention, then what goes into a `resume_layer`) of every context token: `[tokens, features]`, `[tokens,
        outputs]`, on the CPU in fp32."""
        started = time.perf_counter()
        cache, source_ids, source_mask = shell.read_source(texts, self.source, self.source_tokenizer)
        self.seconds["forward"] += time.perf_counter() - started
        inputs = shell.prepare(
            cache,
            source_ids,
            source_attention_mask=source_mask,
            source_tokenizer=self.source_tokenizer,
            target=self.target,
            target_tokenizer=self.target_tokenizer,
            text=texts,
        )
        started = time.perf_counter()
        reads, resumed = shell.config.target_hidden_layer, self.resume_layer
        layers = None if resumed is None else range(resumed + 1)  # no further than is fitted
        with attention_inputs(self.target, self.restored_layers) as shown:
            target_cache = prefill(
                *(self.target, inputs.target_ids, inputs.target_mask, layers),
                hidden_layer=reads if resumed is None else resumed,
            )
        self.seconds["forward"] += time.perf_counter() - started
        positions = positions_from_mask(inputs.target_mask)
        outputs = [
            shown[layer_idx][0]
            if layer_idx in shown
            else source_states(target_cache, self.target_geometry, [layer_idx], positions)
            for layer_idx in shell.target_layers
        ]
        outputs += [] if resumed is None else [target_cache.hidden_states]
        # Pads and the natively run prefix are not translated.
        kept = inputs.target_mask.bool() & (positions >= len(self.target_contract["prefix_ids"]))
        read = (inputs.source_states, inputs.embeddings, None if reads is None else target_cache.hidden_states)
        features = [part for part in read if part is not None]
        if inputs.source_states is not None:
            features[0] = causal_window(features[0], inputs.target_mask, shell.config.source_window)
        x = torch.cat([part.cpu()[kept].float() for part in features], dim=-1)
        return x, torch.cat([part.cpu()[kept].float() for part in outputs], dim=-1)

    def in_metric(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs `[tokens, outputs]` in the coordinates that errors are measured in."""
        return outputs if self.key_metric is None else self.key_metric.apply(outputs)


def pair_windows(
    pair: Pair, documents: Iterable[str], held_out_documents: int, max_tokens: int, seed: int
) -> tuple[Iterator[Window], list[str], dict[str, int]]:
    """Windows that both models have positions for, the documents held out from them, and a counter of those read."""
    stream, held_out, counter = split(documents, held_out_documents, seed)
    limits = [g.max_positions for g in (pair.source_geometry, pair.target_geometry) if g.max_positions is not None]
    windows = calibration_windows(
        stream,
        pair.target_tokenizer,
        characters_per_token(held_out, pair.target_tokenizer),
        # Tokens of the source may be shorter than the target's; half leaves room for that.
        min(limits, default=2**31) // 2,
        max_tokens,
        random.Random(seed),
    )
    return (window for window in windows if pair.fits(window.text)), held_out, counter


def split(documents: Iterable[str], held_out: int, seed: int) -> tuple[Iterator[str], list[str], dict[str, int]]:
    """Sets the first documents of the shuffled stream apart; counts those that are read later."""
    counter = {"documents": 0}
    stream = shuffled(iterate_documents(documents), SHUFFLE_BUFFER, random.Random(seed))
    held = list(itertools.islice(stream, held_out))
    following = next(stream, None)
    if following is None and len(held) > 1:  # a small corpus: a quarter of it is held out
        cut = max(1, len(held) // 4)
        held, stream = held[:cut], iter(held[cut:])
        following = next(stream)
    if following is None:
        raise ValueError(
            "`documents` holds a single document, but one is held out to choose the ridge strength. Pass more text; "
            "in a file, separate documents by lines <|endoftext|>, or take each line for one (--lines)."
        )

    def counted() -> Iterator[str]:
        for document in itertools.chain([following], stream):
            counter["documents"] += 1
            yield document

    return counted(), held, counter


def held_out_rows(pair: Pair, shell: MoTModel, held_out: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the held-out documents' beginnings, about `SAMPLE_TOKENS` in all."""
    budget = max(32, SAMPLE_TOKENS // len(held_out))
    chars = int(budget * characters_per_token(held_out, pair.target_tokenizer))
    texts = [document[:chars] for document in held_out]
    for index, text in enumerate(texts):
        while not pair.fits(text):
            text = text[: len(text) // 2]
        texts[index] = text
    rows = [pair.rows(shell, [text]) for text in texts]
    return torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])
