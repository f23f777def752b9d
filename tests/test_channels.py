"""Which layers are paired, and which windows there are."""

import pytest
from conftest import make_pair

from hf_mot import MoTModel
from hf_mot.channels_mot import candidate_windows, channels, depth_ratio, terminal, window_size


def test_depth_ratio_pairs_both_ends_and_keeps_the_order():
    for source, target in ((30, 18), (18, 30), (24, 24), (5, 1), (12, 24)):
        pairs = depth_ratio(source, target)
        assert len(pairs) == target and pairs == sorted(pairs) and pairs[0] == 0
        assert target == 1 or pairs[-1] == source - 1
        assert all(abs(j / max(1, target - 1) - i / max(1, source - 1)) <= 0.5 / max(1, source - 1) + 1e-9
                   for j, i in enumerate(pairs))  # fmt: skip
    assert depth_ratio(7, 7) == list(range(7))


def test_terminal_pairs_the_last_layers():
    assert terminal(30, 18) == list(range(12, 30))
    assert terminal(3, 5) == [0, 0, 0, 1, 2]


def test_window_of_the_paper():
    """Qwen2.5-7B → 0.5B: 28 and 24 layers, ratio 0.3."""
    assert window_size(0.3, 28, 24) == 7
    found = channels(28, 24, channel_ratio=0.3, start=17)
    assert found["target_layers"] == list(range(17, 24)) and found["source_layers"][-1] == 27
    assert len(candidate_windows(7, 24)) == 18


def test_ratio_of_one_covers_every_target_layer_of_a_deeper_target():
    found = channels(12, 24)
    assert found["target_layers"] == list(range(24)) and len(found["source_layers"]) == 24
    assert set(found["source_layers"]) == set(range(12))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"channel_ratio": 0}, r"`channel_ratio` must be above 0 and at most 1, got 0"),
        ({"channel_ratio": 1.5}, "got 1.5"),
        ({"channel_ratio": 0.3, "start": 18}, r"`start` must lie in 0\.\.17 for a window of 7"),
        ({"start": -1}, r"`start` must lie in 0\.\.0 .*got -1"),
        ({"mapping": "nearest"}, "`mapping` must be one of depth_ratio, terminal, got 'nearest'"),
    ],
    ids=str,
)
def test_windows_out_of_range_are_refused(arguments, error):
    with pytest.raises(ValueError, match=error):
        channels(28, 24, **arguments)


def test_window_longer_than_the_layers_is_refused():
    with pytest.raises(ValueError, match="A window has 1 to 4 layers, the target's, got 5"):
        candidate_windows(5, 4)


def test_translator_of_a_pair_has_one_slot_a_channel():
    pair = make_pair("llama", "gemma3")
    whole = MoTModel.from_pair(**pair, hidden_size=8, num_attention_heads=2)
    depth = len(whole.target_geometry.layers)
    assert len(whole.config.source_layers) == depth and str(whole.plan()) == "none"
    window = MoTModel.from_pair(**pair, channel_ratio=0.3, start=1, hidden_size=8, num_attention_heads=2)
    assert window.target_layers == [1] and str(window.plan()) == "full:1-1"
    assert window.config.source_layers == [whole.config.source_layers[1]]
    assert MoTModel.from_pair(**pair, method="reduced_rank", rank=4, source_layers=[0]).config.source_layers == [0]
