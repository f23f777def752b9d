"""TranslatedCache alone: it is never written to, and its rows can be chosen, packed and joined.

Row r of a cache made here is filled with numbers of its own, so that what was moved where can be seen.
"""

import re

import pytest
import torch
from transformers import DynamicCache

from hf_mot.cache_mot import TranslatedCache

LAYERS = 2


def make_cache(mask, first_row=0, pending=False, **kwargs):
    """A cache over rows of given masks; the states of row r's i-th token are the same however it is padded."""
    mask = torch.tensor(mask)
    token = (mask.cumsum(1) + 100.0 * (first_row + torch.arange(len(mask)))[:, None]) * mask
    keys = token[:, None, :, None] + torch.tensor([[0.0, 0.5]])[..., None, None] + torch.zeros(3)
    layers = [keys + 1000 * layer for layer in range(LAYERS)]
    cache = TranslatedCache(layers, [-part for part in layers], mask, **kwargs)
    if pending:
        cache.pending_ids = first_row + torch.arange(len(mask))[:, None]
        cache.pending_mask = torch.ones_like(cache.pending_ids)
    return cache


def tokens_of(cache):
    """Keys and values of each row's own tokens, without the pads."""
    rows = []
    for row, mask in enumerate(cache.prefix_mask.bool()):
        parts = [part[row][:, mask] for layer in cache.layers for part in (layer.keys, layer.values)]
        rows.append(torch.stack(parts))
    return rows


def assert_same_tokens(cache, expected):
    assert all(torch.equal(a, b) for a, b in zip(tokens_of(cache), expected, strict=True))


CASES = {
    "translated": lambda cache: cache,
    "rows": lambda cache: cache.rows(torch.tensor([1])),
    "packed": TranslatedCache.packed,
    "concatenated": lambda cache: TranslatedCache.concatenate([cache, cache]),
    "rows of a fork": lambda cache: cache.fork().rows(torch.tensor([0])),
    "joined forks": lambda cache: TranslatedCache.concatenate([cache.fork(), cache.fork()]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_made_of_a_cache_is_read_only_until_forked(case):
    cache = CASES[case](make_cache([[1, 0, 1], [0, 1, 1]]))
    states = torch.zeros(len(cache.prefix_mask), 2, 1, 3)
    message = (
        "A TranslatedCache is read-only, so that it can be used again. Before target.generate(...), call "
        "attach(target) (translate(..., target=target) does, but not within the same expression); for a direct "
        "forward pass, pass cache.fork()."
    )
    for change in (lambda: cache.update(states, states, 0), lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            change()
    fork, length = cache.fork(), cache.get_seq_length()
    fork.update(states, states, 0)
    assert fork.get_seq_length() == length + 1 and cache.get_seq_length() == length


def test_a_model_that_asks_a_cache_for_its_size_is_told_to_fork():
    cache = make_cache([[1, 1]])
    with pytest.raises(RuntimeError, match="read-only"):
        cache.get_mask_sizes(query_length=1, layer_idx=0)
    plain = DynamicCache()
    plain.update(cache.layers[0].keys, cache.layers[0].values, 0)
    assert cache.fork().get_mask_sizes(query_length=1, layer_idx=0) == plain.get_mask_sizes(1, 0)


@pytest.mark.parametrize("pending", [False, True])
def test_fork_repeats_each_row_with_all_that_belongs_to_it(pending):
    cache = make_cache([[0, 1, 1], [1, 1, 1]], pending=pending)
    before = tokens_of(cache)
    fork = cache.fork(3)
    assert_same_tokens(fork, [before[0]] * 3 + [before[1]] * 3)
    assert_same_tokens(cache, before)
    if pending:
        assert fork.pending_ids.tolist() == [[0]] * 3 + [[1]] * 3 and fork.pending_mask.tolist() == [[1]] * 6
    else:
        assert fork.pending_ids is None and fork.pending_mask is None


@pytest.mark.parametrize("pending", [False, True])
def test_rows_are_taken_in_the_order_asked_for(pending):
    cache = make_cache([[0, 1, 1], [1, 1, 1], [0, 0, 1]], pending=pending, prefix_ids=[7], sliding=True)
    before = tokens_of(cache)
    chosen = cache.rows(torch.tensor([2, 0, 2]))
    assert_same_tokens(chosen, [before[2], before[0], before[2]])
    assert_same_tokens(cache, before)
    assert (chosen.prefix_ids, chosen.sliding) == ([7], True)
    if pending:
        assert chosen.pending_ids.tolist() == [[2], [0], [2]] and chosen.pending_mask.tolist() == [[1]] * 3
    else:
        assert chosen.pending_ids is None and chosen.pending_mask is None


@pytest.mark.parametrize(
    ("mask", "packed"),
    [
        ([[1, 0, 1], [1, 1, 1]], [[0, 1, 1], [1, 1, 1]]),  # pads inside
        ([[0, 1, 0], [1, 1, 0]], [[0, 1], [1, 1]]),  # pads on the right
        ([[0, 1, 1], [0, 0, 1]], [[1, 1], [0, 1]]),  # a column that no row uses
        ([[1, 0, 0, 1], [0, 1, 0, 1]], [[1, 1], [1, 1]]),  # each row has two of four
    ],
    ids=["inside", "right", "unused column", "all"],
)
def test_packing_moves_pads_to_the_left_and_drops_what_no_row_needs(mask, packed):
    cache = make_cache(mask, pending=True)
    before = tokens_of(cache)
    result = cache.packed()
    assert result.prefix_mask.tolist() == packed and result.get_seq_length() == len(packed[0])
    assert_same_tokens(result, before)
    assert result.pending_ids is cache.pending_ids
    assert cache.prefix_mask.tolist() == mask
    assert_same_tokens(cache, before)


@pytest.mark.parametrize("mask", [[[1, 1, 1], [1, 1, 1]], [[0, 1, 1], [1, 1, 1]]], ids=["none", "left"])
def test_a_cache_without_pads_between_its_tokens_is_not_copied(mask):
    cache = make_cache(mask)
    assert cache.packed() is cache


@pytest.mark.parametrize("pending", [False, True])
def test_joined_caches_of_unequal_length_keep_their_rows_in_order(pending):
    parts = [
        make_cache([[1, 1]], 0, pending, prefix_ids=[7]),
        make_cache([[0, 1, 1, 1], [1, 1, 1, 1]], 1, pending, prefix_ids=[7]),
        make_cache([[1, 1, 1]], 3, pending, prefix_ids=[7]),
    ]
    joined = TranslatedCache.concatenate(parts)
    assert joined.prefix_mask.tolist() == [[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]
    assert joined.get_seq_length() == 4 and joined.prefix_ids == [7]
    assert_same_tokens(joined, [row for part in parts for row in tokens_of(part)])
    assert parts[0].get_seq_length() == 2
    if pending:
        assert joined.pending_ids.tolist() == [[0], [1], [2], [3]] and joined.pending_mask.tolist() == [[1]] * 4
    else:
        assert joined.pending_ids is None and joined.pending_mask is None


def test_a_cache_joined_with_none_is_itself():
    cache = make_cache([[0, 1, 1], [1, 1, 1]], pending=True)
    joined = TranslatedCache.concatenate([cache])
    assert torch.equal(joined.prefix_mask, cache.prefix_mask) and torch.equal(joined.pending_ids, cache.pending_ids)
    assert_same_tokens(joined, tokens_of(cache))


def test_rows_of_a_joined_cache_are_the_caches_joined():
    parts = [make_cache([[1, 1]], 0, True), make_cache([[1, 1, 1]], 1, True)]
    joined = TranslatedCache.concatenate(parts)
    for row, part in enumerate(parts):
        alone = joined.rows(torch.tensor([row])).packed()
        assert torch.equal(alone.prefix_mask, part.prefix_mask) and torch.equal(alone.pending_ids, part.pending_ids)
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(alone.layers, part.layers, strict=True))


def test_bytes_held_are_those_of_keys_and_values():
    cache = TranslatedCache([torch.zeros(1, 2, 5, 3)], [torch.zeros(1, 2, 5, 4).bfloat16()], torch.ones(1, 5))
    assert cache.kv_bytes == 2 * 5 * 3 * 4 + 2 * 5 * 4 * 2


def test_by_default_nothing_is_known_of_the_target():
    cache = make_cache([[1, 1]])
    assert (cache.prefix_ids, cache.sliding, cache.contract) == ([], False, None)


def test_layers_need_keys_and_values_each():
    states = torch.zeros(1, 2, 5, 3)
    with pytest.raises(ValueError, match="zip"):
        TranslatedCache([states, states], [states], torch.ones(1, 5))
