"""The oracle: the target's own cache through the whole path gives the target's own logits."""

import pytest
import torch
from conftest import FAMILIES, make_documents, make_model, make_tokenizer
from transformers import DynamicCache

from hf_mot import MoTModel
from hf_mot.compat_mot import cache_argument
from hf_mot.rows_mot import left_pad

PROMPT = " the captain wrote a letter"
TOLERANCE = 1e-4


@pytest.fixture(params=FAMILIES)
def own(request):
    """A target with its tokenizer, as keyword arguments of `handoff` from itself to itself."""
    tokenizer = make_tokenizer(merges=40)
    model = make_model(request.param, tokenizer)
    return {"source": model, "target": model, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}


def own_ids(own, text):
    tokenizer = own["target_tokenizer"]
    return [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]


def prompt_ids(own):
    return own["target_tokenizer"](PROMPT, add_special_tokens=False, return_tensors="pt")["input_ids"]


def logits_after(model, ids, cache=None):
    """Logits of the prompt's positions, with nothing or a cache before it."""
    kwargs = {} if cache is None else {cache_argument(model): cache}
    with torch.no_grad():
        return model(ids, **kwargs).logits


@pytest.mark.parametrize("words", [3, 60], ids=["short", "beyond the window"])
def test_identity_gives_the_targets_own_logits(own, words):
    model, text, prompt = own["target"], make_documents(1, words)[0], prompt_ids(own)
    translated = MoTModel.identity(model, own["target_tokenizer"]).handoff(text, **own)
    ids = torch.tensor([own_ids(own, text)])
    native = logits_after(model, torch.cat([ids, prompt], 1))[:, ids.shape[1] :]
    no_context = logits_after(model, torch.cat([ids[:, :1], prompt], 1))[:, 1:]
    ours = logits_after(model, prompt, translated.fork())
    assert translated.get_seq_length() == ids.shape[1]
    torch.testing.assert_close(ours, native, atol=TOLERANCE, rtol=0)
    assert (no_context - native).abs().max() > 0.5


def test_left_padded_batch_equals_row_by_row(own):
    model, texts = own["target"], [make_documents(1, words, seed)[0] for words, seed in ((30, 1), (9, 2), (55, 3))]
    mot = MoTModel.identity(model, own["target_tokenizer"])
    batch = mot.handoff(texts, **own)
    length = batch.get_seq_length()
    for row, text in enumerate(texts):
        alone = mot.handoff(text, **own)
        kept = batch.prefix_mask[row].bool()
        assert kept.sum() == alone.get_seq_length() and kept[length - alone.get_seq_length() :].all()
        for ours, theirs in zip(batch.layers, alone.layers, strict=True):
            torch.testing.assert_close(ours.keys[row][:, kept], theirs.keys[0], atol=TOLERANCE, rtol=1e-4)
            torch.testing.assert_close(ours.values[row][:, kept], theirs.values[0], atol=TOLERANCE, rtol=1e-4)


def test_ready_cache_equals_handoff(own):
    """`source(**inputs)` gives the cache, plain or from a generate call whose last id is in no cache."""
    model, text = own["target"], make_documents(1, 8)[0]
    mot = MoTModel.identity(model, own["target_tokenizer"])
    ids = torch.tensor([own_ids(own, text)])
    cache = DynamicCache()
    logits_after(model, ids, cache)
    tokenizers = {name: own[name] for name in ("source_tokenizer", "target_tokenizer")}
    before = [layer.keys.clone() for layer in cache.layers]
    for given in (ids, torch.cat([ids, ids[:, -1:]], 1)):
        translated = mot.translate(cache, given, target=model, **tokenizers)
        for ours, theirs in zip(translated.layers, mot.handoff(text, **own).layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=TOLERANCE, rtol=1e-4)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_left_padded_ready_cache_equals_row_by_row(own):
    model = own["target"]
    mot = MoTModel.identity(model, own["target_tokenizer"])
    tokenizers = {name: own[name] for name in ("source_tokenizer", "target_tokenizer")}
    texts = make_documents(1, 5, 4) + make_documents(1, 14, 5)
    ids, mask = left_pad([own_ids(own, text) for text in texts])
    cache = DynamicCache()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, **{cache_argument(model): cache})
    batch = mot.translate(cache, ids, source_attention_mask=mask, target=model, **tokenizers)
    for row, text in enumerate(texts):
        alone = mot.handoff(text, **own)
        kept = batch.prefix_mask[row].bool()
        for ours, theirs in zip(batch.layers, alone.layers, strict=True):
            torch.testing.assert_close(ours.keys[row][:, kept], theirs.keys[0], atol=TOLERANCE, rtol=1e-4)


def test_sliding_cache_that_lost_keys_is_refused():
    tokenizer = make_tokenizer()
    model = make_model("gemma3", tokenizer)
    mot = MoTModel.identity(model, tokenizer)
    ids = torch.tensor([[tokenizer.bos_token_id, *range(40, 100)]])
    cache = DynamicCache(config=model.config)
    logits_after(model, ids, cache)
    with pytest.raises(ValueError, match=r"`source_cache` has lost keys: layer 0 .*DynamicCache\(\)"):
        mot.translate(cache, ids, target=model, source_tokenizer=tokenizer, target_tokenizer=tokenizer)


def run_padded(own, texts, side, positions=True):
    """A ready cache over padded rows: cache, ids and mask."""
    model = own["target"]
    ids, mask = left_pad([own_ids(own, text) for text in texts])
    if side == "right":
        for row, pads in enumerate((mask == 0).sum(1).tolist()):
            ids[row], mask[row] = ids[row].roll(-pads), mask[row].roll(-pads)
    kwargs = {cache_argument(model): DynamicCache(), "attention_mask": mask}
    if positions:
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, **kwargs)
    return kwargs[cache_argument(model)], ids, mask


def test_right_padded_ready_cache_equals_row_by_row(own):
    texts = make_documents(1, 5, 4) + make_documents(1, 9, 5)
    mot = MoTModel.identity(own["target"], own["target_tokenizer"])
    tokenizers = {name: own[name] for name in ("source_tokenizer", "target_tokenizer")}
    cache, ids, mask = run_padded(own, texts, "right")
    batch = mot.translate(cache, ids, source_attention_mask=mask, target=own["target"], **tokenizers)
    for row, text in enumerate(texts):
        kept = batch.prefix_mask[row].bool()
        alone = mot.handoff(text, **own)
        for ours, theirs in zip(batch.layers, alone.layers, strict=True):
            torch.testing.assert_close(ours.keys[row][:, kept], theirs.keys[0], atol=TOLERANCE, rtol=1e-4)


def test_padded_cache_at_positions_that_count_the_pads_is_refused():
    tokenizer = make_tokenizer(merges=40)
    model = make_model("llama", tokenizer)
    own = {"target": model, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    cache, ids, mask = run_padded(own, make_documents(1, 5, 4) + make_documents(1, 9, 5), "left", positions=False)
    mot = MoTModel.identity(model, tokenizer)
    with pytest.raises(ValueError, match="`source_cache` was made at positions that count the pads"):
        mot.translate(cache, ids, source_attention_mask=mask, **own)


def test_rows_of_cache_ids_and_mask_must_agree(own):
    mot = MoTModel.identity(own["target"], own["target_tokenizer"])
    tokenizers = {name: own[name] for name in ("source_tokenizer", "target_tokenizer")}
    cache, ids, mask = run_padded(own, make_documents(2, 5), "left")
    with pytest.raises(ValueError, match="`source_cache` has 2 rows, but `source_input_ids` has 1"):
        mot.translate(cache, ids[:1], target=own["target"], **tokenizers)
    with pytest.raises(ValueError, match="`source_attention_mask` covers 3 of the"):
        mot.translate(cache, ids, source_attention_mask=mask[:, :3], target=own["target"], **tokenizers)
