import itertools
import json
import random
import re

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hf_mot.alignment_mot import align, align_spans, decode_with_spans, tokenize_with_spans

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the sun.",
    "A naïve café in Zürich serves crème brûlée; the weather there is mild.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
    "日本語の文章と русский текст stand beside the English one.",
]
TEXTS = [
    "The quick brown fox",
    "  two leading spaces, two  inside, two behind  ",
    "\n\nnew\r\nlines\n\tand tabs\n",
    "naïve café, crème brûlée",
    "日本語の文章 is beside русский текст",
    "emoji 🙂 and 👩‍👩‍👧 and 🇩🇪 and 🏴󠁧󠁢󠁥󠁮󠁧󠁿 here",
    "an e\u0301 of two code points, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "a real \ufffd and a run \ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd of them",
    "spelled out: <s> and <|sep|> and <0x0A>",
]


def wrap(tokenizer):
    """Special: the four named ones, and one that only its flag tells."""
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>", "<pad>", "<|sep|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def byte_level(trim_offsets=True):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Many tokenizers give offsets without the spaces at a word's ends.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(LINES, BpeTrainer(show_progress=False, vocab_size=400, initial_alphabet=alphabet))
    return wrap(tokenizer)


def byte_fallback(drops_first_space):
    """As Gemma has it, or as Llama 2 has it: "▁" put before the text, and the first space dropped when decoding."""
    tokenizer = Tokenizer(models.BPE())
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = replace
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(LINES[:3], BpeTrainer(show_progress=False, vocab_size=300))
    model = json.loads(tokenizer.to_str())["model"]
    vocab = {token: index for index, token in enumerate(["<unk>", *(f"<0x{i:02X}>" for i in range(256))])}
    vocab |= {token: len(vocab) + index for index, token in enumerate(model["vocab"])}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if drops_first_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return wrap(tokenizer)


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = sorted({character for text in TEXTS + LINES for character in text} | set("0123456789"))
    trainer = UnigramTrainer(
        show_progress=False, vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return wrap(tokenizer)


def lowercase():
    """Ids from which the text cannot be had back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(LINES, BpeTrainer(show_progress=False, vocab_size=350, initial_alphabet=alphabet))
    return wrap(tokenizer)


def word_ends():
    """As GPT-1 has it: what a token decodes to depends on what comes after it."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "removed")
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = BpeTrainer(show_progress=False, vocab_size=250, end_of_word_suffix="</w>", special_tokens=["<unk>"])
    tokenizer.train_from_iterator(LINES, trainer)
    return wrap(tokenizer)


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "byte_level": byte_level(),
        "byte_fallback": byte_fallback(False),
        "dropped_space": byte_fallback(True),
        "unigram": unigram(),
    }


NAMES = ["byte_level", "byte_fallback", "dropped_space", "unigram"]
LOSSLESS = ["byte_level", "byte_fallback"]
PAIRS = [(a, b) for a in NAMES for b in NAMES if a != b]


def refused(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def canonical(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def pieces(tokenizer, text):
    """The same text in tokens of one character, or of one byte where the vocabulary lacks it, with their spans."""
    ids, spans = [], []
    byte_level = isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
    for index, character in enumerate(text):
        tokens = [character.replace(" ", "▁")]
        if byte_level:
            tokens = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)[0][
                0
            ]
        elif tokenizer.backend_tokenizer.token_to_id(tokens[0]) is None:
            tokens = [f"<0x{byte:02X}>" for byte in character.encode()]
        ids += [tokenizer.backend_tokenizer.token_to_id(token) for token in tokens]
        spans += [(index, index + 1)] * len(tokens)
    return ids, spans


def split_tokens(tokenizer, ids, generator):
    """The ids with random tokens in two parts that the vocabulary has too."""
    result, to_id = [], tokenizer.backend_tokenizer.token_to_id
    for token in ids:
        name = tokenizer.convert_ids_to_tokens(token)
        at = generator.randrange(1, len(name)) if len(name) > 1 else 0
        parts = [to_id(name[:at]), to_id(name[at:])] if at else [None]
        result += [token] if None in parts or generator.random() < 0.4 else parts
    return result


def random_text(generator):
    alphabet = [*"etaoin shrdlu  \néßя日本🙂👩𝔘", "\u200d", "\ufffd", "\u0301"]
    return "".join(generator.choice(alphabet) for _ in range(generator.randrange(1, 60)))


def assert_tiles(text, spans):
    """In order, without a gap, to the end; each span new text or the character before it again."""
    end = 0
    for start, stop in (span for span in spans if span is not None):
        assert stop >= end and start in (end, end - 1) and (start < stop or end == 0), spans
        end = stop
    assert end == len(text)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_spans_of_canonical_ids_are_the_untrimmed_offsets(tokenizers, name, text):
    tokenizer = tokenizers[name]
    reference = byte_level(trim_offsets=False) if name == "byte_level" else tokenizer
    expected = reference(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    ids, spans = expected["input_ids"], expected["offset_mapping"]
    assert tokenize_with_spans(tokenizer, text) == (ids, spans)
    assert decode_with_spans(tokenizer, [tokenizer.bos_token_id, *ids]) == (text, [None, *spans])
    assert_tiles(text, spans)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["dropped_space", "unigram"])
def test_text_that_decoding_does_not_give_back_is_tiled_all_the_same(tokenizers, name, text):
    tokenizer = tokenizers[name]
    ids, spans = tokenize_with_spans(tokenizer, text)
    assert_tiles(text, spans)
    decoded, spans = decode_with_spans(tokenizer, ids)
    assert decoded == tokenizer.decode(ids, clean_up_tokenization_spaces=False, skip_special_tokens=True)
    assert_tiles(decoded, spans)


@pytest.mark.parametrize(("text", "ends"), [("  the  dog", [5, 10]), ("the dog  ", [3, 9]), ("the dog", [3, 7])])
def test_spaces_that_a_tokenizer_drops_belong_to_a_token_beside_them(text, ends):
    tokenizer = unigram()
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    ids, spans = tokenize_with_spans(tokenizer, text)
    assert_tiles(text, spans)
    starts = [i for i, token in enumerate(tokenizer.convert_ids_to_tokens(ids)) if token.startswith("▁")]
    assert [spans[starts[1] - 1][1], spans[-1][1]] == ends


@pytest.mark.parametrize("text", ["The CAFÉ", "É日🙂 X", "A🙂🙂", "日B"])
def test_a_text_that_is_changed_has_the_spans_of_what_it_is_changed_to(text):
    tokenizer = lowercase()
    assert tokenize_with_spans(tokenizer, text) == tokenize_with_spans(tokenizer, text.lower())


def test_a_mark_put_before_a_word_shares_the_first_character_of_it():
    """A decoder that writes it as a space gives back another text, so that only the offsets tell."""
    tokenizer = unigram()
    steps = [pre_tokenizers.Punctuation(), pre_tokenizers.Metaspace()]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    ids, spans = tokenize_with_spans(tokenizer, "日.🙂")
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁", "日", "▁", ".", "▁", "🙂"]
    assert spans == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]


def test_contexts_are_tokenized_without_special_tokens_and_without_a_warning_of_their_length(caplog):
    tokenizer = byte_level()
    ids = tokenize_with_spans(tokenizer, LINES[0])[0]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    )
    tokenizer.model_max_length = 4
    caplog.clear()
    assert tokenize_with_spans(tokenizer, LINES[0])[0] == ids and not caplog.text
    assert (
        len(tokenizer(LINES[0])["input_ids"]) == len(ids) + 2 and "longer than" in caplog.text
    )  # a plain call has both


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_pieces_of_a_character_cover_the_whole_character(tokenizers, name, text):
    ids, spans = pieces(tokenizers[name], text)
    assert ids != canonical(tokenizers[name], text)
    assert decode_with_spans(tokenizers[name], ids) == (text, spans)


def test_a_byte_level_token_that_ends_one_character_and_begins_another_covers_both(tokenizers):
    tokenizer = tokenizers["byte_level"]
    backend = tokenizer.backend_tokenizer
    byte_ids, _ = pieces(tokenizer, "éa日")
    joined = backend.id_to_token(byte_ids[1]) + backend.id_to_token(byte_ids[2]) + backend.id_to_token(byte_ids[3])
    wide = byte_level()
    wide.backend_tokenizer.add_tokens([AddedToken(joined, normalized=False)])
    ids = [byte_ids[0], wide.backend_tokenizer.token_to_id(joined), *byte_ids[4:]]
    assert decode_with_spans(wide, ids) == ("éa日", [(0, 1), (0, 3), (2, 3), (2, 3)])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_each_target_token_ends_inside_its_source_token(tokenizers, source, target):
    generator = random.Random(f"{source} {target}")
    source, target = tokenizers[source], tokenizers[target]
    for _ in range(40):
        ids = split_tokens(source, canonical(source, "x" + random_text(generator)), generator)
        text, source_spans = decode_with_spans(source, ids)
        assert_tiles(text, source_spans)
        alignment = align(source, ids, target)
        target_ids, target_spans = tokenize_with_spans(target, text)
        assert (alignment.text, alignment.target_ids) == (text, target_ids)
        assert alignment.source_index == sorted(alignment.source_index)
        for index, (_, end) in zip(alignment.source_index, target_spans, strict=True):
            covering = [i for i, span in enumerate(source_spans) if span and span[0] < end <= span[1]]
            # A target token of no text, at the start, has no last character.
            assert index == (covering[-1] if end else 0)


@pytest.mark.parametrize("name", LOSSLESS)
def test_random_ids_of_a_random_text_give_it_back(tokenizers, name):
    generator, tokenizer = random.Random(name), tokenizers[name]
    for _ in range(60):
        text = random_text(generator)
        ids = split_tokens(tokenizer, canonical(tokenizer, text), generator)
        decoded, spans = decode_with_spans(tokenizer, ids)
        assert decoded == text
        assert_tiles(text, spans)


@pytest.mark.parametrize("name", NAMES)
def test_ids_in_any_order_are_tiled(tokenizers, name):
    generator, tokenizer = random.Random(name), tokenizers[name]
    for _ in range(60):
        ids = [generator.randrange(len(tokenizer)) for _ in range(generator.randrange(40))]
        text, spans = decode_with_spans(tokenizer, ids)
        assert text == tokenizer.decode(ids, clean_up_tokenization_spaces=False, skip_special_tokens=True)
        assert_tiles(text, spans)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_left_out_of_the_text_and_never_chosen(tokenizers, name):
    tokenizer, target = tokenizers[name], tokenizers["byte_level"]
    bos, sep = tokenizer.convert_tokens_to_ids(["<s>", "<|sep|>"])
    assert sep not in tokenizer.all_special_ids
    first, second = canonical(tokenizer, "the quick fox"), canonical(tokenizer, " jumps over")
    ids = [bos, *first, sep, *second, sep]
    text, spans = decode_with_spans(tokenizer, ids)
    assert "sep" not in text and text.startswith("the quick fox")
    assert [index for index, span in enumerate(spans) if span is None] == [0, 1 + len(first), len(ids) - 1]
    assert_tiles(text, spans)
    alignment = align(tokenizer, ids, target)
    assert alignment.source_index[0] > 0 and alignment.source_index[-1] == len(ids) - 2
    assert not {0, 1 + len(first), len(ids) - 1} & set(alignment.source_index)


def test_a_special_token_spelled_out_in_the_text_stays_text(tokenizers):
    text = "the <s> tag"
    ids, spans = tokenize_with_spans(tokenizers["byte_level"], text)
    assert tokenizers["byte_level"].bos_token_id not in ids
    alignment = align(tokenizers["byte_level"], ids, tokenizers["byte_fallback"])
    assert alignment.text == text
    assert tokenizers["byte_fallback"].bos_token_id not in alignment.target_ids
    assert tokenizers["byte_fallback"].decode(alignment.target_ids) == text


def test_an_added_token_that_is_not_special_is_text(tokenizers):
    tokenizer = byte_level()
    tokenizer.add_tokens(["[tool]"])
    ids = tokenizer("use the [tool] now")["input_ids"]
    assert tokenizer.convert_tokens_to_ids("[tool]") in ids
    text, spans = decode_with_spans(tokenizer, ids)
    assert text == "use the [tool] now"
    assert spans[ids.index(tokenizer.convert_tokens_to_ids("[tool]"))] == (8, 14)


@pytest.mark.parametrize("name", ["dropped_space", "unigram"])
def test_ids_from_inside_a_document_keep_their_leading_space(tokenizers, name):
    tokenizer, target = tokenizers[name], tokenizers["byte_level"]
    text = " over the lazy dog"
    inside = canonical(tokenizer, "fox" + text)[len(canonical(tokenizer, "fox")) :]
    assert decode_with_spans(tokenizer, inside)[0] == text[1:]
    alignment = align(tokenizer, inside, target, text=text)
    assert alignment.text == text
    assert alignment.target_ids == canonical(target, text)
    in_document = tokenize_with_spans(tokenizer, "fox" + text)[1][-len(inside) :]
    in_text = [(start - len("fox"), end - len("fox")) for start, end in in_document]
    assert alignment.source_index == align_spans(in_text, tokenize_with_spans(target, text)[1])
    back = align(target, canonical(target, text), tokenizer, inside)
    assert back.text == text
    assert back.target_ids == inside
    assert back.source_index == align_spans(tokenize_with_spans(target, text)[1], in_text)


def test_without_a_given_text_the_leading_space_of_target_ids_is_set_aside(tokenizers):
    source, target = tokenizers["dropped_space"], tokenizers["byte_level"]
    ids = canonical(source, "over the dog")
    alignment = align(source, ids, target, canonical(target, " over the dog"))
    assert alignment.text == "over the dog"
    assert alignment.source_index[-1] == len(ids) - 1
    alignment = align(source, pieces(source, " over")[0], target, pieces(target, " over")[0])
    assert alignment.text == "over" and alignment.source_index == [0, 1, 2, 3, 4]


def test_a_byte_token_of_a_space_that_is_dropped_covers_nothing(tokenizers):
    tokenizer = tokenizers["dropped_space"]
    space, dog = tokenizer.convert_tokens_to_ids(["<0x20>", "d"])
    assert decode_with_spans(tokenizer, [space, space, dog]) == (" d", [(0, 0), (0, 1), (1, 2)])


@pytest.mark.parametrize("name", LOSSLESS)
def test_ids_cut_inside_a_character_stand_for_a_replacement_character(tokenizers, name):
    tokenizer, target = tokenizers[name], tokenizers["unigram"]
    ids, _ = pieces(tokenizer, "dog 🙂")
    for length in (len(ids) - 3, len(ids) - 2, len(ids) - 1):
        for cut in (ids[:length], ids[length:]):
            text, spans = decode_with_spans(tokenizer, cut)
            assert text == tokenizer.decode(cut, clean_up_tokenization_spaces=False) and "\ufffd" in text
            assert_tiles(text, spans)
            assert align(tokenizer, cut, target).source_index[-1] == len(cut) - 1
    alignment = align(target, canonical(target, "dog \ufffd"), tokenizer, canonical(tokenizer, "dog ") + ids[4:5])
    assert alignment.text == "dog \ufffd"


def test_a_broken_run_of_byte_tokens_is_one_replacement_character_a_token(tokenizers):
    tokenizer = tokenizers["byte_fallback"]
    to_id = tokenizer.backend_tokenizer.token_to_id
    ids = [to_id(token) for token in ["<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "a", "<0xE2>", "<0x82>", "<0xAC>"]]
    text, spans = decode_with_spans(tokenizer, ids)
    assert text == "\ufffd\ufffd\ufffd\ufffda€"
    assert spans == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (5, 6), (5, 6)]


@pytest.mark.parametrize("name", NAMES)
def test_equal_tokenizers_give_the_identity(tokenizers, name):
    tokenizer, generator = tokenizers[name], random.Random(0)
    ids = split_tokens(tokenizer, canonical(tokenizer, "emoji 🙂🙂 beside the naïve 日本語 text"), generator)
    ids = [token for token in ids if token != tokenizer.unk_token_id]
    sep = tokenizer.convert_tokens_to_ids("<|sep|>")
    row = [tokenizer.bos_token_id, *ids[:4], sep, *ids[4:]]
    expected = [1, 2, 3, 4, *range(6, len(row))]
    for target_ids in (None, ids):
        alignment = align(tokenizer, row, tokenizer, target_ids, same_tokenizer=True)
        assert alignment.target_ids == ids
        assert alignment.source_index == expected
    with_special = align(tokenizer, row, tokenizer, row[1:], same_tokenizer=True)
    assert with_special.source_index == [1, 2, 3, 4, 4, *expected[4:]]


def test_other_ids_of_an_equal_tokenizer_are_aligned_by_text(tokenizers):
    tokenizer, text = tokenizers["byte_level"], "the lazy dog"
    ids, spans = pieces(tokenizer, text)
    alignment = align(tokenizer, ids, tokenizer, canonical(tokenizer, text), same_tokenizer=True)
    assert alignment.target_ids == canonical(tokenizer, text)
    assert alignment.source_index == [end - 1 for _, end in tokenize_with_spans(tokenizer, text)[1]]


def test_a_source_that_changes_the_text_is_aligned_with_the_text_it_was_given(tokenizers):
    source, target, text = lowercase(), tokenizers["byte_level"], "The LAZY Dog"
    ids, spans = tokenize_with_spans(source, text)
    assert align(source, ids, target).text == "the lazy dog"
    alignment = align(source, ids, target, text=text)
    assert alignment.text == text
    assert alignment.target_ids == canonical(target, text)
    assert alignment.source_index == align_spans(spans, tokenize_with_spans(target, text)[1])


def test_a_character_that_the_source_does_not_know_takes_the_token_before_it(tokenizers):
    source, target, text = tokenizers["unigram"], tokenizers["byte_level"], "dog§§ sun"
    ids = canonical(source, text)
    unknown = ids.index(source.unk_token_id)
    alignment = align(source, ids, target, text=text)
    assert alignment.text == text and unknown not in alignment.source_index
    at = [end for _, end in tokenize_with_spans(target, text)[1]].index(4)
    assert alignment.source_index[at] == unknown - 1
    assert "§" not in align(source, ids, target).text


def test_a_decoder_that_looks_ahead_takes_only_the_tokenizers_own_ids(tokenizers):
    source, text = word_ends(), "the overdog dog"
    ids, ends = canonical(source, text), [0]
    names = source.convert_ids_to_tokens(ids)
    assert names[0] == "the</w>" and names[-1] == "dog</w>" and len(names) > 3
    for name in names:
        plain = name.removesuffix("</w>")
        ends.append(text.index(plain, ends[-1]) + len(plain))
    assert decode_with_spans(source, ids) == (text, list(itertools.pairwise(ends)))
    to_id = source.backend_tokenizer.token_to_id
    other_ids = [to_id("t"), to_id("h"), to_id("e</w>"), *ids[1:]]
    message = (
        "`{}` must be the tokenizer's own ids for their text, because the decoder of TokenizersBackend does not work "
        "token by token, but they are others. Pass the ids that it gives for the whole context."
    )
    for given in (None, text, "  " + text):
        with refused(message.format("source_input_ids")):
            align(source, other_ids, tokenizers["byte_level"], text=given)
    with refused(message.format("source_input_ids")):  # though the piece that decodes in another way has one character
        align(source, other_ids[:3], tokenizers["byte_level"])
    with refused(message.format("input_ids")):
        decode_with_spans(source, other_ids)


def test_earlier_truncation_does_not_cut_the_context(tokenizers):
    tokenizer = byte_level()
    ids = canonical(tokenizer, LINES[0])
    tokenizer(LINES[0], truncation=True, max_length=4, padding="max_length")
    assert tokenize_with_spans(tokenizer, LINES[0])[0] == ids


def test_long_contexts_are_read_through_a_window(tokenizers):
    tokenizer = tokenizers["byte_level"]
    text = "\ufffd🙂é" * 700
    ids, spans = pieces(tokenizer, text)
    assert decode_with_spans(tokenizer, ids) == (text, spans)


def test_align_spans_takes_the_last_piece_of_a_character_and_else_the_nearest_earlier_token():
    assert align_spans([None, (0, 2), (1, 2), None, (2, 5)], [(0, 1), (1, 2), (2, 3), (3, 5)]) == [1, 2, 4, 4]
    # Nothing covers character 3; a special target token stays where the one before it is.
    assert align_spans([(0, 2), None, (4, 6)], [None, (0, 4), None, (4, 6), None]) == [0, 0, 0, 2, 2]
    assert align_spans([None, (3, 6)], [(0, 0), (0, 2), (2, 6)]) == [1, 1, 1]
    with refused(
        "`source_spans` must hold a token with text, but none of its 2 tokens has a span. Pass the spans of a context "
        "that is not empty."
    ):
        align_spans([None, None], [(0, 1)])


def test_an_empty_context_is_an_error(tokenizers):
    source, target = tokenizers["byte_level"], tokenizers["unigram"]
    for ids in ([], [source.bos_token_id], [source.bos_token_id, source.eos_token_id]):
        with refused(
            f"`source_input_ids` must hold text, but the context is empty: {len(ids)} ids, none of which decodes to "
            "text. Pass the ids of a context."
        ):
            align(source, ids, target)
    message = "`source_input_ids` must hold text, but the context is empty: 1 ids, none of which decodes to text."
    with pytest.raises(ValueError, match=message):  # leading spaces of a text are set aside
        align(source, [source.bos_token_id], target, text="  ")
    with pytest.raises(ValueError, match=message):  # "▁", whose space is dropped
        align(tokenizers["dropped_space"], canonical(tokenizers["dropped_space"], "x")[:1], target)
    with refused("`text` must not be empty: there is no context to translate. Pass the text of the context."):
        align(source, [source.bos_token_id], target, text="")
    with pytest.raises(ValueError, match="`target_input_ids` must decode to the context's text"):
        align(source, canonical(source, "dog"), target, [])
    with refused(
        "`source_input_ids` must hold text that `target_tokenizer` has tokens for, but it makes none of ' '. Pass the "
        "ids of a context."
    ):
        align(source, canonical(source, " "), word_ends())
    assert decode_with_spans(source, []) == ("", [])
    assert tokenize_with_spans(source, "") == ([], [])


def test_ids_of_another_text_are_an_error_that_shows_where(tokenizers):
    source, target = tokenizers["byte_level"], tokenizers["byte_fallback"]
    ids = canonical(source, "the lazy dog sleeps")
    with refused(
        "`target_input_ids` must decode to the context's text (leading spaces aside), but at character 9 they have "
        "'fox sleeps' where the text has 'dog sleeps'. Pass the ids of that text, or leave `target_input_ids` out."
    ):
        align(source, ids, target, canonical(target, "the lazy fox sleeps"))
    with refused(
        "`source_input_ids` must decode to `text` (leading spaces aside), but at character 19 they have '' where the "
        "text has '!'. Pass the ids of that text, or leave `text` out."
    ):
        align(source, ids, target, text="the lazy dog sleeps!")


@pytest.mark.parametrize("start", ["\n", "X "])
@pytest.mark.parametrize(("ours", "theirs"), [(" ", "  "), ("  ", ""), ("", "  ")])
def test_a_difference_is_counted_without_leading_spaces_and_shown_in_part(tokenizers, start, ours, theirs):
    source, target = tokenizers["byte_level"], tokenizers["byte_fallback"]
    dog, cat = (f"{start}the lazy {animal} sleeps on in the warm sun" for animal in ("dog", "cat"))
    with pytest.raises(
        ValueError,
        match=f"but at character {len(start) + 9} they have 'dog sleeps on in the' where the text has "
        "'cat sleeps on in the'. Pass",
    ):
        align(source, canonical(source, ours + dog), target, text=theirs + cat)


@pytest.mark.parametrize("start", ["\n", "X", "XX X"])
def test_only_leading_spaces_are_set_aside(tokenizers, start):
    source, target = tokenizers["byte_level"], tokenizers["byte_fallback"]
    for ours, theirs in ((start, ""), ("", start)):
        with pytest.raises(ValueError, match="`source_input_ids` must decode to `text` .* but at character 0"):
            align(source, canonical(source, ours + "the dog"), target, text=theirs + "the dog")


@pytest.mark.parametrize(("ids", "shown"), [([40, -1], "-1 to 40"), ([2**32, 41], f"41 to {2**32}")])
def test_ids_that_no_tokenizer_has_are_refused(tokenizers, ids, shown):
    tokenizer = tokenizers["byte_level"]
    with refused(f"`source_input_ids` must be ids of its tokenizer, got {shown}."):
        align(tokenizer, ids, tokenizer)
    with refused(f"`target_input_ids` must be ids of its tokenizer, got {shown}."):
        align(tokenizer, canonical(tokenizer, "dog"), tokenizer, ids)


def test_a_slow_tokenizer_is_an_error_that_names_the_argument(tokenizers):
    fast, slow = tokenizers["byte_level"], ByT5Tokenizer()
    ids = canonical(fast, "dog")
    message = (
        "`{}` must be a fast tokenizer, because alignment needs character offsets, but `ByT5Tokenizer` is not one. "
        "Load it by `AutoTokenizer.from_pretrained`, or wrap its `tokenizer.json` in a `PreTrainedTokenizerFast`."
    )
    with refused(message.format("source_tokenizer")):
        align(slow, ids, fast)
    with refused(message.format("target_tokenizer")):
        align(fast, ids, slow)
    with refused(message.format("tokenizer")):
        tokenize_with_spans(slow, "dog")
    with refused(message.format("tokenizer")):
        decode_with_spans(slow, ids)
