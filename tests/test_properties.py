"""Random texts, ids, masks, configs and files: the answer is right by an oracle written out here, or refused by name.

60 examples a property; `pytest --hypothesis-profile=long tests/test_properties.py` looks at 10,000.
"""

import functools
import json
import re
import tempfile
from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from dataclasses import fields
from itertools import groupby
from pathlib import Path

import pytest
import torch
from conftest import changed, make_pair, make_tokenizer, make_translator
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_alignment import LINES, byte_fallback, byte_level, canonical, split_tokens, unigram, wrap
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import DynamicCache
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_mot import MoTConfig, MoTModel
from hf_mot.alignment_mot import align
from hf_mot.compat_mot import cache_argument
from hf_mot.pretrained_mot import FIT_REPORT

PIECES = (
    *("🙂", "👩‍👩‍👧", "🇩🇪", "𝔘𝔫𝔦", "e\u0301", "\u0301", "שלום", "مرحبا", "\u202e", "\u200d", "日本語", "İ", "ﬁ", "ß"),
    *("\r\n", "\n\n", "\t", "\x00", "\x1b[0m", "\u2028", "\ufeff", "\ufffd", " " * 9, " the", "▁", "Ġ", "##a"),
    *("<bos>", "<s>", "</s>", "<|sep|>", "<unk>", "<pad>", "<0x0A>"),
)
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), min_size=1, max_size=10).map("".join)


def word_piece():
    """As BERT has it: lower case, accents and control characters dropped, unknown words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return wrap(tokenizer)


# What they give back is not always the text; all others write every text, byte by byte if need be.
LOSSY = {"unigram", "word_piece"}
MAKERS = {
    "bytes": lambda: make_tokenizer(adds_bos=False),
    "merges": lambda: make_tokenizer(merges=40),
    "trimmed_offsets": byte_level,
    "byte_fallback": lambda: byte_fallback(False),
    "dropped_space": lambda: byte_fallback(True),
    "unigram": unigram,
    "word_piece": word_piece,
}
names = st.sampled_from(sorted(MAKERS))
randoms = st.randoms(use_true_random=False)
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


@functools.cache
def tokenizer_of(name):
    return MAKERS[name]()


@functools.cache
def special_ids(name):
    return {index for index, token in tokenizer_of(name).added_tokens_decoder.items() if token.special}


def is_byte_level(name):
    return isinstance(tokenizer_of(name).backend_tokenizer.decoder, decoders.ByteLevel)


def bytes_of(name, token):
    if is_byte_level(name):
        return bytes(BYTE_OF[character] for character in token)
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.encode()


def characters_of(data):
    """The characters of UTF-8 bytes with their first byte; what is cut or broken is one U+FFFD."""
    characters, at = [], 0
    while at < len(data):
        window = data[at : at + 4]
        character = window.decode("utf-8", "replace")[0]
        size = len(character.encode())
        try:
            window.decode()
        except UnicodeDecodeError as error:
            if error.start == 0:
                size = error.end
        characters.append((at, character))
        at += size
    return characters


def read(name, tokens):
    """The text that tokens stand for, as characters with their first byte, and each token's end, in bytes."""
    runs = [tokens]
    if not is_byte_level(name):
        runs = [list(run) for _, run in groupby(tokens, lambda token: bool(BYTE_TOKEN.fullmatch(token)))]
    characters, ends, at = [], [], 0
    for run in runs:
        data = b"".join(bytes_of(name, token) for token in run)
        found = characters_of(data)
        if not is_byte_level(name) and data.decode("utf-8", "ignore").encode() != data:
            found = [(index, "\ufffd") for index in range(len(data))]  # byte fallback gives up a whole run
        characters += [(at + start, character) for start, character in found]
        for token in run:
            at += len(bytes_of(name, token))
            ends.append(at)
    return characters, ends


def coverage(name, ids, text):
    """For each id the characters of `text` of which it holds a byte, as a range, None for a special one. None if the
    ids do not spell the text."""
    content = [token for token in ids if token not in special_ids(name)]
    characters, ends = read(name, tokenizer_of(name).convert_ids_to_tokens(content))
    spelled, text = "".join(character for _, character in characters).replace("▁", " "), text.replace("▁", " ")
    dropped = len(spelled) - len(text)  # a space that the tokenizer puts before a text, or takes off it
    if dropped not in (0, 1) or spelled != " " * dropped + text:
        return None
    starts = [start for start, _ in characters]
    ranges, begin = [], 0
    for end in ends:
        first, stop = bisect_right(starts, begin) - 1, bisect_left(starts, end)
        ranges.append(range(max(first - dropped, 0), max(stop - dropped, 0)))
        begin = end
    ranges = iter(ranges)
    return [None if token in special_ids(name) else next(ranges) for token in ids]


def expected_index(source, source_ids, target, target_ids, text):
    """For each target token the last source token that holds a piece of its last character; None for one without a
    character of its own (a space that is put before the text)."""
    held, wanted = coverage(source, source_ids, text), coverage(target, target_ids, text)
    if held is None or wanted is None:
        return None
    content = [index for index, characters in enumerate(held) if characters is not None]
    return [
        max(index for index in content if characters[-1] in held[index]) if characters else None
        for characters in wanted
    ]


def check_alignment(alignment, source, source_ids, target):
    found, text = alignment.source_index, alignment.text
    assert len(found) == len(alignment.target_ids)
    assert found == sorted(found) and found[0] >= 0
    assert not {source_ids[index] for index in found} & special_ids(source)
    expected = expected_index(source, source_ids, target, alignment.target_ids, text)
    assert expected is not None or {source, target} & LOSSY
    assert expected is None or [e if e is None else f for e, f in zip(expected, found, strict=True)] == expected


def named(error, *arguments):
    assert re.search("`({})`".format("|".join(arguments)), str(error)), str(error)


def with_specials(name, ids, random):
    """The ids with special ones in front, behind and in between."""
    ids = list(ids)
    for token in random.sample(sorted(special_ids(name)), random.randrange(3)):
        ids.insert(random.choice((0, random.randint(0, len(ids)), len(ids))), token)
    return ids


@given(text=texts, source=names, target=names, text_is_given=st.booleans(), pieces=st.booleans(), random=randoms)
def test_a_target_token_takes_the_source_token_of_its_last_character(
    text, source, target, text_is_given, pieces, random
):
    source_ids, target_ids = canonical(tokenizer_of(source), text), None
    if pieces:  # other ids of the same text, as a longer document or a model may give them
        source_ids = split_tokens(tokenizer_of(source), source_ids, random)
        if text_is_given:
            target_ids = split_tokens(tokenizer_of(target), canonical(tokenizer_of(target), text), random)
    source_ids = with_specials(source, source_ids, random)
    try:
        alignment = align(
            tokenizer_of(source),
            source_ids,
            tokenizer_of(target),
            target_ids,
            text=text if text_is_given else None,
        )
    except ValueError as error:
        named(error, "text", "source_input_ids", "target_input_ids")
        # "▁" is a space to some, so that pieces of it are another text.
        assert not text or {source, target} & LOSSY or (pieces and "▁" in text), str(error)
        return
    if text_is_given:
        assert alignment.text == text
    assert alignment.target_ids == (target_ids or canonical(tokenizer_of(target), alignment.text))
    check_alignment(alignment, source, source_ids, target)


@given(data=st.data(), source=names, target=names)
def test_any_ids_are_aligned_by_what_they_decode_to(data, source, target):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer_of(source)) - 1), max_size=24))
    try:
        alignment = align(tokenizer_of(source), ids, tokenizer_of(target))
    except ValueError as error:
        named(error, "source_input_ids")
        assert not tokenizer_of(source).decode(ids, skip_special_tokens=True) or {source, target} & LOSSY, str(error)
        return
    assert alignment.target_ids == canonical(tokenizer_of(target), alignment.text)
    check_alignment(alignment, source, ids, target)


@given(data=st.data(), name=names)
def test_equal_tokenizers_give_each_token_itself(data, name):
    tokenizer = tokenizer_of(name)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=24))
    try:
        alignment = align(tokenizer, ids, tokenizer, same_tokenizer=True)
    except ValueError as error:
        named(error, "source_input_ids")
        assert name in LOSSY or not tokenizer.decode(ids, skip_special_tokens=True), str(error)
        return
    content = [index for index, token in enumerate(ids) if token not in special_ids(name)]
    assert alignment.source_index == content
    assert alignment.target_ids == [ids[index] for index in content]


@pytest.mark.parametrize("token", [-100, 2**40])
def test_ids_that_no_tokenizer_can_have_are_refused(token):
    source, target = tokenizer_of("bytes"), tokenizer_of("merges")
    ids = canonical(source, "the dog")
    with pytest.raises(ValueError, match="`source_input_ids`"):
        align(source, [*ids, token], target)
    with pytest.raises(ValueError, match="`target_input_ids`"):
        align(source, ids, target, [*canonical(target, "the dog"), token])


@functools.cache
def own():
    """A pair and its translator."""
    pair = make_pair()
    return {**pair, "mot": make_translator(pair)}


def translate(rows, mask, run_mask=None, positions=None, **kwargs):
    """Runs the source over padded rows under `run_mask`, and translates its cache with `mask`."""
    pair, cache, run_mask = own(), DynamicCache(), mask if run_mask is None else run_mask
    if positions is None:
        positions = (run_mask.long().cumsum(1) - 1).clamp(min=0)
    argument = {cache_argument(pair["source"]): cache}
    with torch.no_grad():
        pair["source"](rows, attention_mask=run_mask.long(), position_ids=positions, **argument)
    tokenizers = {name: pair[name] for name in ("source_tokenizer", "target_tokenizer")}
    return pair["mot"].translate(
        cache, rows, source_attention_mask=mask, target=pair["target"], **tokenizers, **kwargs
    )


def assert_rows_equal(cache, rows):
    """Each row of a translated cache is what its ids give alone."""
    for row, ids in enumerate(rows):
        ids = torch.tensor([ids])
        alone = translate(ids, torch.ones_like(ids))
        kept = cache.prefix_mask[row].bool()
        assert kept.sum() == alone.get_seq_length()
        for ours, theirs in zip(cache.layers, alone.layers, strict=True):
            torch.testing.assert_close(ours.keys[row][:, kept], theirs.keys[0], atol=1e-3, rtol=1e-4)
            torch.testing.assert_close(ours.values[row][:, kept], theirs.values[0], atol=1e-3, rtol=1e-4)


def source_ids_of(text):
    tokenizer = own()["source_tokenizer"]
    return [tokenizer.bos_token_id, *canonical(tokenizer, text)]


@given(
    contents=st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3),
    pad=st.integers(3, 200),
    dtype=st.sampled_from((torch.long, torch.int32, torch.bool, torch.float32)),
    random=randoms,
)
def test_padded_rows_equal_each_row_alone(contents, pad, dtype, random):
    rows = [source_ids_of(text) for text in contents]
    width = max(map(len, rows)) + random.randrange(3)
    ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width)
    for row, values in enumerate(rows):
        start = random.randint(0, width - len(values))  # pads on the left, on the right or on both sides
        ids[row, start : start + len(values)], mask[row, start : start + len(values)] = torch.tensor(values), 1
    assert_rows_equal(translate(ids, mask.to(dtype)), rows)


@given(text=st.text(min_size=2, max_size=6), counted=st.booleans(), random=randoms)
def test_a_mask_with_a_hole_is_refused_or_read_without_the_hole(text, counted, random):
    """Where a token was masked in the middle, the positions behind it may count it or not: the cache does not tell."""
    ids = torch.tensor([source_ids_of(text)])
    hole = random.randrange(1, ids.shape[1] - 1)
    mask = torch.ones_like(ids)
    mask[0, hole] = 0
    positions = torch.arange(ids.shape[1])[None] if counted else None
    try:
        cache = translate(ids, mask, positions=positions)
    except ValueError as error:
        named(error, "source_attention_mask", "source_cache", "source_input_ids")
        return
    kept = ids[0].tolist()
    assert_rows_equal(cache, [kept[:hole] + kept[hole + 1 :]])


ONES = torch.ones(2, 6, dtype=torch.long)
BAD_MASKS = {
    "one row": ONES[:1],
    "three rows": torch.ones(3, 6),
    "no batch": ONES[0],
    "four dimensions": torch.ones(2, 1, 6, 6),
    "too narrow": ONES[:, :3],
    "wider than the ids": torch.ones(2, 9),
    "twos": 2 * ONES,
    "negative": -ONES,
    "halves": torch.full((2, 6), 0.5),
    "additive": torch.tensor([[0.0] * 6, [float("-inf")] * 2 + [0.0] * 4]),
    "nan": torch.full((2, 6), float("nan")),
    "a row of pads": torch.tensor([[1] * 6, [0] * 6]),
}


@pytest.mark.parametrize("mask", BAD_MASKS.values(), ids=BAD_MASKS)
@pytest.mark.parametrize("side", ["source", "target"])
def test_what_is_no_mask_of_the_rows_is_refused(side, mask):
    words = ("QXJZK", "ZKXQJ")  # of which the target's tokenizer too has no more than bytes
    tokenizer = own()["target_tokenizer"]
    rows = torch.tensor([source_ids_of(word) for word in words])
    target_rows = torch.tensor([[tokenizer.bos_token_id, *canonical(tokenizer, word)] for word in words])
    assert rows.shape == target_rows.shape == ONES.shape
    masks = {"source": ONES, "target": ONES, side: mask}
    with pytest.raises(ValueError, match=f"`{side}_(attention_mask|input_ids)`"):
        translate(
            rows,
            masks["source"],
            run_mask=ONES,
            target_input_ids=target_rows,
            target_attention_mask=masks["target"],
        )


TYPED = (ValueError, TypeError, StrictDataclassError)
HOSTILE = ("__import__('os')", "{{ 7 * 7 }}", "{source}", "%s%n", "!!python/object:os", "../../x", "\x00", "nan")
numbers = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=12) | st.sampled_from(HOSTILE)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(field.name for field in fields(MoTConfig))
WRITTEN_BY_TRANSFORMERS = (
    *("auto_map", "model_type", "torch_dtype", "name_or_path", "_name_or_path", "_commit_hash"),
    *("attn_implementation", "experts_implementation", "output_attentions"),
)
keys = st.sampled_from(FIELDS) | st.sampled_from(WRITTEN_BY_TRANSFORMERS) | st.text(max_size=12)


@given(values=st.dictionaries(keys, junk, min_size=1, max_size=4))
def test_a_config_is_refused_or_comes_back_as_it_was(values):
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = MoTConfig(**values)
            config.save_pretrained(folder)
        except TYPED:
            return
        loaded = MoTConfig.from_pretrained(folder)
        assert {**loaded.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}
        assert set(values) <= {*FIELDS, *WRITTEN_BY_TRANSFORMERS}


# What an object of the class has besides its fields. A config with one of them would lose a method, or worse: a large
# `num_labels` never ends.
ATTRIBUTES = ("to_dict", "save_pretrained", "validate", "num_labels", "per_layer_config", "use_return_dict")
PRIVATE = ("__dict__", "__class__", "_private", "_auto_class", "_attn_implementation_internal")


@pytest.mark.parametrize("name", ATTRIBUTES + PRIVATE)
@pytest.mark.parametrize("value", [3, {"method": "identity"}], ids=["number", "dict"])
def test_what_is_no_field_of_a_config_is_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is not a field of MoTConfig"):
        MoTConfig(**{name: value})


def paths_of(value, path=()):
    """The paths to everything within nested dicts and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, part in inner for found in ((*path, key), *paths_of(part, (*path, key)))]


CONFIG, WEIGHTS = "config.json", "model.safetensors"


@functools.cache
def saved():
    """The files of the saved translator."""
    own()["mot"].fit_report = {"method": "reduced_rank", "tokens": 7}
    with tempfile.TemporaryDirectory() as folder:
        own()["mot"].save_pretrained(folder)
        return {name: (Path(folder) / name).read_bytes() for name in (CONFIG, WEIGHTS, FIT_REPORT)}


@contextmanager
def folder_with(name, data):
    """The folder of the saved translator, with other data in one file."""
    with tempfile.TemporaryDirectory() as folder:
        for file, own_data in {**saved(), name: data}.items():
            (Path(folder) / file).write_bytes(own_data)
        yield folder


def handoff(mot):
    cache = mot.handoff("river 🙂 stone", **{key: part for key, part in own().items() if key != "mot"})
    return torch.cat([states.flatten() for layer in cache.layers for states in (layer.keys, layer.values)])


@given(data=st.data(), side=st.sampled_from(("source", "target")))
def test_a_changed_contract_is_refused_or_changes_nothing(data, side):
    config = json.loads(saved()[CONFIG])
    path = (side, *data.draw(st.sampled_from(paths_of(config[side])), label="path"))
    was = functools.reduce(lambda part, key: part[key], path, config)
    near = [was + 1, -was, 2 * was] if isinstance(was, int | float) else []
    near += [was[:-1], 2 * was] if isinstance(was, str | list) else []
    value = data.draw(st.sampled_from([*near, None, ...]) | junk, label="value")
    with folder_with(CONFIG, json.dumps(changed(config, path, value)).encode()) as folder:
        try:
            found = handoff(MoTModel.from_pretrained(folder))
        except (*TYPED, OSError):
            return
    torch.testing.assert_close(found, handoff(own()["mot"]), atol=1e-5, rtol=1e-5)


@given(data=st.data())
def test_damaged_weights_are_refused_or_loaded_whole(data):
    weights = bytearray(saved()[WEIGHTS])
    header = 8 + int.from_bytes(weights[:8], "little")
    places = st.integers(0, header - 1) | st.integers(0, len(weights) - 1)
    for place, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4)):
        weights[place] = byte
    with folder_with(WEIGHTS, weights) as folder:
        try:
            found = MoTModel.from_pretrained(folder).state_dict()
        except ValueError as error:
            assert folder in str(error)
            return
        stored = load_file(Path(folder) / WEIGHTS)
    for name, weight in own()["mot"].state_dict().items():
        assert (found[name].shape, found[name].dtype) == (weight.shape, weight.dtype)
        assert torch.equal(found[name].view(torch.int32), stored[name].view(torch.int32))  # NaN for NaN


@given(data=st.data(), name=st.sampled_from((CONFIG, WEIGHTS, FIT_REPORT)))
def test_a_file_that_is_cut_is_refused_wherever_it_is_cut(data, name):
    whole = saved()[name].rstrip()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with folder_with(name, cut) as folder, pytest.raises((ValueError, OSError), match=re.escape(folder)):
        MoTModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "report", [b"[]", b"3", b'"text"', b"\xff\xfe{}", b"[" * 100_000], ids=lambda report: repr(report[:9])
)
def test_what_is_no_fit_report_is_refused(report):
    with folder_with(FIT_REPORT, report) as folder:
        with pytest.raises(ValueError, match=f"{FIT_REPORT} of .*{re.escape(folder)}"):
            MoTModel.from_pretrained(folder)
