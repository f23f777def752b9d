"""Tiny random models and tokenizers: CPU, offline, seconds. Weights are large, so that context matters."""

import copy
import functools
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import configuration, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_mot import MoTConfig, MoTModel
from hf_mot.contract_mot import describe_model

configuration.set_hypothesis_home_dir(Path(__file__).parent.parent / ".pytest_cache" / "hypothesis")
settings.register_profile("ci", max_examples=60, derandomize=True, deadline=None, database=None)
settings.register_profile("long", max_examples=10_000, deadline=None, database=None, print_blob=True)
settings.load_profile("ci")  # another one by `pytest --hypothesis-profile=long`

WORDS = (
    "river stone lantern village winter market engine silver garden mountain letter captain bridge café 你好 🙂"
).split()


def make_documents(count: int, words: int = 60, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=words)) for _ in range(count)]


def make_tokenizer(merges: int = 0, bos: str | None = "<bos>", adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `merges` merges; with `adds_bos` it puts its BOS in front, as Gemma's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [token for token in (bos, "<eos>", "<pad>") if token]
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special) + merges,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_documents(8), trainer)
    if bos and adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def make_llama(vocab_size: int, layers: int = 3) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=512,
        tie_word_embeddings=False,  # tied ones make random models repeat themselves
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def make_gemma3(vocab_size: int, window: int = 16) -> Gemma3ForCausalLM:
    config = Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=window,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        initializer_range=0.3,
        max_position_embeddings=512,
        tie_word_embeddings=False,  # tied ones make random models repeat themselves
        eos_token_id=None,
        bos_token_id=None,
    )
    return Gemma3ForCausalLM(config).eval()


def make_gpt2(vocab_size: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=512,
        n_embd=32,
        n_layer=3,
        n_head=4,
        initializer_range=0.3,
        tie_word_embeddings=False,  # tied ones make random models repeat themselves
        eos_token_id=None,
        bos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


FAMILIES = {"llama": make_llama, "gemma3": make_gemma3, "gpt2": make_gpt2}


def make_model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0):
    torch.manual_seed(seed)
    return FAMILIES[family](len(tokenizer))


def make_own(family: str) -> dict:
    """A model as source and target of itself, with its tokenizer, as keyword arguments of `handoff`."""
    tokenizer = make_tokenizer(merges=40)
    model = make_model(family, tokenizer)
    return {"source": model, "target": model, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}


def make_pair(source: str = "llama", target: str = "gemma3") -> dict:
    """A source and a target with different tokenizers, as keyword arguments of `handoff`."""
    source_tokenizer, target_tokenizer = make_tokenizer(), make_tokenizer(merges=40)
    return {
        "source": make_model(source, source_tokenizer),
        "target": make_model(target, target_tokenizer, seed=1),
        "source_tokenizer": source_tokenizer,
        "target_tokenizer": target_tokenizer,
    }


def save_pair(pair: dict, folder: Path) -> None:
    """Writes models and tokenizers to `folder/source` and `folder/target`."""
    for side in ("source", "target"):
        pair[side].save_pretrained(folder / side)
        pair[f"{side}_tokenizer"].save_pretrained(folder / side)


def make_translator(pair: dict, source_layers=(0, 2), rank: int | None = 8, embedding_window: int = 2) -> MoTModel:
    """A translator for a pair, with random weights."""
    contracts = {side: describe_model(pair[side], pair[f"{side}_tokenizer"]) for side in ("source", "target")}
    mot = MoTModel(
        MoTConfig(**contracts, source_layers=list(source_layers), rank=rank, embedding_window=embedding_window)
    )
    torch.manual_seed(2)
    with torch.no_grad():
        for name, weight in mot.named_parameters():
            weight.normal_(1.0 if name.endswith("gain") else 0.0, 0.3)
    return mot.eval()


def changed(values: dict, path: Sequence, value) -> dict:
    """A copy of nested dicts and lists with another value at a path; without what is there if the value is `...`."""
    values = copy.deepcopy(values)
    holder = functools.reduce(lambda part, key: part[key], path[:-1], values)
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return values


@pytest.fixture(autouse=True)
def no_deprecated_transformers_call(caplog):
    """transformers logs its own deprecations instead of warning: they fail the test that causes them."""
    logger = transformers.utils.logging.get_logger("transformers")
    propagates, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.WARNING, logger="transformers"):
        yield
    logger.propagate = propagates
    # At teardown `caplog.records` are those of the teardown itself.
    said = [record.getMessage() for record in caplog.get_records("call")]
    # Assisted decoding of transformers calls its own assistant in this way.
    own = "Passing `generation_config` together with generation-related arguments=({'"
    deprecated = [text for text in said if "deprecat" in text.lower() and not text.startswith(own)]
    assert not deprecated, deprecated


def make_random_translator(pair: dict, **fields) -> MoTModel:
    """A translator of a pair with random weights, in which no part counts for nothing."""
    mot = MoTModel.from_pair(**pair, **{"method": "reduced_rank", "rank": 8, "embedding_window": 2, **fields})
    torch.manual_seed(2)
    with torch.no_grad():
        for name, weight in mot.named_parameters():
            weight.normal_(1.0 if name.endswith("gain") else 0.0, 0.3)
    return mot.eval()
