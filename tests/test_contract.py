"""A translator refuses what it was not made for, and names the field."""

import copy

import pytest
import torch
from conftest import make_documents, make_llama, make_pair, make_tokenizer, make_translator
from transformers import DynamicCache

from hf_mot import MoTConfig, MoTModel
from hf_mot.compat_mot import cache_argument
from hf_mot.contract_mot import check_model, check_tokenizer, describe_model

TEXT = make_documents(1, 5)[0]


@pytest.fixture(scope="module")
def pair():
    pair = make_pair()
    return {**pair, "mot": make_translator(pair)}


def handoff(pair, text=TEXT, **changes):
    arguments = {**pair, **changes}
    mot = arguments.pop("mot")
    return mot.handoff(text, **arguments)


def ready(pair, text=TEXT):
    tokenizer = pair["source_tokenizer"]
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
    cache = DynamicCache()
    with torch.no_grad():
        pair["source"](ids, **{cache_argument(pair["source"]): cache})
    return cache, ids


def translate(pair, cache, ids, **kwargs):
    tokenizers = {name: pair[name] for name in ("source_tokenizer", "target_tokenizer")}
    return pair["mot"].translate(cache, ids, target=pair["target"], **tokenizers, **kwargs)


def test_the_pair_itself_is_taken(pair):
    assert handoff(pair).get_seq_length() > 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("source", "`source` has other weights .*Load that model, or the translator of your pair"),
        ("target", "`target` has other weights"),
        ("source_tokenizer", "`source_tokenizer` does not match .*`tokenizer_fingerprint`"),
        ("target_tokenizer", "`target_tokenizer` does not match .*`tokenizer_fingerprint`"),
    ],
)
def test_other_model_or_tokenizer_is_refused(pair, changed, message):
    if changed.endswith("tokenizer"):
        other = make_tokenizer(merges=41, bos="<s>")
    else:
        other = copy.deepcopy(pair[changed])
        with torch.no_grad():
            for weight in other.parameters():
                weight.add_(1e-3)
    with pytest.raises(ValueError, match=message):
        handoff(pair, **{changed: other})


def test_another_pad_token_is_the_same_tokenizer(pair):
    tokenizer = copy.deepcopy(pair["source_tokenizer"])
    tokenizer.pad_token = tokenizer.eos_token
    check_tokenizer(pair["mot"].config.source, tokenizer, "source_tokenizer")


def test_models_swapped_are_refused(pair):
    with pytest.raises(ValueError, match="`source` does not match .*`model_type` is 'gemma3_text', expected 'llama'"):
        handoff(pair, source=pair["target"], source_tokenizer=pair["target_tokenizer"])


def test_other_revision_is_refused(pair):
    source = copy.deepcopy(pair["source"])
    source.config._commit_hash = "b" * 40
    contract = {**pair["mot"].config.source, "revision": "a" * 40, "id": None}
    with pytest.raises(ValueError, match="`source` does not match .*`revision` is 'bbb.*expected 'aaa"):
        check_model(contract, source, "source")
    check_model({**contract, "revision": "b" * 40}, source, "source")


def test_changed_rope_is_refused(pair):
    config = copy.deepcopy(pair["source"].config)
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    other = type(pair["source"])(config).eval()
    other.load_state_dict(pair["source"].state_dict())
    with pytest.raises(ValueError, match="`source` has another cache geometry .*`rotary`"):
        handoff(pair, source=other)


def reload(model, folder, dtype):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtype_of_the_same_weights_is_taken(pair, dtype, tmp_path):
    check_model(pair["mot"].config.source, reload(pair["source"], tmp_path, dtype), "source")


def test_translated_cache_has_the_targets_dtype(pair, tmp_path):
    cache = handoff(pair, target=reload(pair["target"], tmp_path, torch.bfloat16))
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}


def test_model_whose_rotary_frequencies_were_rounded_is_refused(pair):
    """`model.to(dtype)` rounds them too: its keys are turned by other angles than those that were recorded."""
    with pytest.raises(ValueError, match=r"`source` has another cache geometry .*from_pretrained\(\.\.\., dtype="):
        handoff(pair, source=copy.deepcopy(pair["source"]).to(torch.bfloat16))


def test_slow_and_missing_tokenizers_are_refused(pair):
    class Slow:
        is_fast = False

    contract = pair["mot"].config.source
    with pytest.raises(ValueError, match="`source_tokenizer` must be a fast tokenizer"):
        check_tokenizer(contract, Slow(), "source_tokenizer")
    with pytest.raises(ValueError, match="`source_tokenizer` is required"):
        handoff(pair, source_tokenizer=None)


@pytest.mark.parametrize("text", ["", ["river", ""], []])
def test_empty_context_is_refused(pair, text):
    with pytest.raises(ValueError, match="`text` is empty"):
        handoff(pair, text)


def test_context_past_the_sources_positions_is_refused(pair):
    text = "x" * 600  # 600 tokens of the source, fewer of the target
    with pytest.raises(ValueError, match="The context has 601 source tokens, more than the 512 positions"):
        handoff(pair, text)


def test_context_past_the_targets_positions_is_refused(pair):
    ids = torch.full((1, 600), 50)
    no_source = MoTModel(MoTConfig(**{**pair["mot"].config.to_dict(), "source_layers": []}))
    with pytest.raises(ValueError, match="The context has 601 target tokens, more than the 512 positions"):
        handoff(pair, target_input_ids=ids, mot=no_source)


def test_cache_of_another_model_is_refused(pair):
    cache, ids = ready(pair)
    torch.manual_seed(0)
    deeper = make_llama(len(pair["source_tokenizer"]), layers=4)
    other = DynamicCache()
    with torch.no_grad():
        deeper(ids, **{cache_argument(deeper): other})
    with pytest.raises(ValueError, match="`source_cache` has 4 layers, but .* 3. Load the translator of your pair"):
        translate(pair, other, ids)
    cache.layers[2].keys = cache.layers[2].keys[..., :4]
    with pytest.raises(ValueError, match=r"Layer 2 of `source_cache` has \(kv_heads, key_dim, value_dim\)"):
        translate(pair, cache, ids)


def test_nan_and_mixed_dtypes_are_refused(pair):
    cache, ids = ready(pair)
    cache.layers[0].values[0, 0, 3, 1] = float("nan")
    with pytest.raises(ValueError, match="Layer 0 of `source_cache` holds NaN or infinite states"):
        translate(pair, cache, ids)
    cache, ids = ready(pair)
    cache.layers[2].values = cache.layers[2].values.half()
    with pytest.raises(ValueError, match=r"`source_cache` mixes dtypes \(torch.float16, torch.float32\)"):
        translate(pair, cache, ids)


def test_ids_of_another_length_are_refused(pair):
    cache, ids = ready(pair)
    with pytest.raises(ValueError, match="`source_input_ids` has .* ids, but `source_cache` holds"):
        translate(pair, cache, ids[:, :-1])


def test_cache_without_the_prefix_is_translated_with_a_warning(pair, caplog):
    ids = torch.tensor([pair["source_tokenizer"]("river stone", add_special_tokens=False)["input_ids"]])
    cache = DynamicCache()
    with torch.no_grad():
        pair["source"](ids, **{cache_argument(pair["source"]): cache})
    import logging

    logger = logging.getLogger("hf_mot.modeling_mot")
    logger.addHandler(caplog.handler)
    translate(pair, cache, ids)
    assert "`source_cache` does not start with the special ids [0]" in caplog.text


def test_unknown_plan_method_and_field_are_refused(pair):
    cache, ids = ready(pair)
    with pytest.raises(ValueError, match="`replay` must be one of none, full, .* got .half."):
        translate(pair, cache, ids, replay="half")
    with pytest.raises(ValueError, match="`method` must be one of reduced_rank, mot, mlp, identity, got 'magic'"):
        MoTConfig(method="magic")
    with pytest.raises(ValueError, match="`routers` is not a field of MoTConfig"):
        MoTConfig(routers=3)
    with pytest.raises(ValueError, match="`format_version` is 99, but this release"):
        MoTConfig(format_version=99)
    with pytest.raises(ValueError, match="`config` must hold the contracts"):
        MoTModel(MoTConfig())


@pytest.mark.parametrize("relative", [False, True])
def test_no_local_path_is_stored(pair, tmp_path, monkeypatch, relative):
    monkeypatch.chdir(tmp_path)
    folder = "models/source" if relative else str(tmp_path / "source")
    pair["source"].save_pretrained(folder)
    source = type(pair["source"]).from_pretrained(folder)
    assert describe_model(source, pair["source_tokenizer"])["id"] is None
    handoff(pair, source=source.eval())
    source.name_or_path = "org/model"
    assert describe_model(source, pair["source_tokenizer"])["id"] == "org/model"


def test_text_and_ids_that_disagree_are_refused(pair):
    cache, ids = ready(pair)
    other = torch.tensor([pair["target_tokenizer"]("something else")["input_ids"]])
    with pytest.raises(ValueError, match="`target_input_ids`"):
        translate(pair, cache, ids, target_input_ids=other)
