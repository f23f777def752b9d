import itertools

import pytest
import torch
from conftest import FAMILIES, make_model, make_tokenizer
from torch import nn
from transformers import Cohere2Config, Cohere2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from hf_mot.capture_mot import prefill
from hf_mot.compat_mot import decoder_layers
from hf_mot.geometry_mot import ModelGeometry, probe
from hf_mot.positions_mot import RotaryEncoding, find_rotary_encodings


def small(config_class, **kwargs):
    return config_class(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        **kwargs,
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [8, 5], ids=["whole head", "part of the head"])
def test_strip_undoes_apply(interleaved, pairs):
    encoding = RotaryEncoding(tuple(0.7**i for i in range(pairs)), scaling=1.3, interleaved=interleaved)
    keys = torch.randn(2, 3, 9, 16)
    positions = torch.randint(0, 5000, (2, 9))
    rotated = encoding.apply(keys, positions)
    assert (rotated - keys).abs().max() > 0.5
    torch.testing.assert_close(encoding.strip(rotated, positions), keys, atol=1e-5, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_encoding_survives_json_and_turns_pairs_by_their_angle(interleaved):
    encoding = RotaryEncoding((0.5, 0.25), scaling=2.0, interleaved=interleaved)
    assert RotaryEncoding.from_dict(encoding.to_dict()) == encoding
    assert RotaryEncoding((0.5,)) == RotaryEncoding((0.5,), scaling=1.0, interleaved=False)
    keys, position = torch.randn(1, 1, 1, 5), torch.tensor([[3]])
    rotated = encoding.apply(keys, position)[0, 0, 0]
    for pair, frequency in enumerate(encoding.inv_freq):
        at = [2 * pair, 2 * pair + 1] if interleaved else [pair, pair + 2]
        turn = 2.0 * torch.polar(torch.tensor(1.0), torch.tensor(3 * frequency))
        expected = torch.view_as_real(torch.complex(*keys[0, 0, 0, at]) * turn)
        torch.testing.assert_close(rotated[at], expected)
    assert rotated[4] == keys[0, 0, 0, 4]


def test_half_precision_keys_are_turned_in_fp32_and_stay_half():
    encoding = RotaryEncoding((1.0, 0.37))
    keys, positions = torch.randn(1, 2, 4, 4).bfloat16(), torch.tensor([[0, 7, 300, 5000]])
    expected = encoding.apply(keys.float(), positions).bfloat16()
    torch.set_default_dtype(torch.bfloat16)  # as while a model is loaded in it
    try:
        assert torch.equal(encoding.apply(keys, positions), expected)
    finally:
        torch.set_default_dtype(torch.float32)


class Table(nn.Module):
    """A rotary module with a table of cosines and sines, in each layout that models have."""

    def __init__(self, inv_freq, layout, positions, scaling=1.0):
        super().__init__()
        angles = torch.arange(positions).float()[:, None] * torch.tensor(inv_freq)
        if layout == "halves":
            angles = torch.cat([angles, angles], dim=-1)
        elif layout == "neighbours":
            angles = angles.repeat_interleave(2, dim=-1)
        self.cos, self.sin, self.layout, self.asked = angles.cos() * scaling, angles.sin() * scaling, layout, None

    def forward(self, x, position_ids):
        self.asked = position_ids[0].tolist()
        cos, sin = self.cos[position_ids], self.sin[position_ids]
        if self.layout == "complex":
            return torch.complex(cos, sin)
        return (sin, cos) if self.layout == "sines first" else (cos, sin)


class Holder(nn.Module):
    """As much of a model as is needed to find its rotary modules."""

    def __init__(self, table, **config):
        super().__init__()
        self.rotary_emb, self.weight = table, nn.Parameter(torch.zeros(1))
        self.config = PreTrainedConfig(**config)


@pytest.mark.parametrize("layout", ["halves", "neighbours", "each once", "sines first", "complex"])
@pytest.mark.parametrize("inv_freq", [(0.75,), (1.0, 0.31, 0.0123, 3e-5)], ids=["one pair", "four pairs"])
def test_frequencies_are_read_from_every_layout_of_a_table(layout, inv_freq):
    inv_freq = torch.tensor(inv_freq).tolist()  # as fp32 has them
    found = find_rotary_encodings(Holder(Table(inv_freq, layout, 1025, 1.25), max_position_embeddings=1025))
    assert [encoding.interleaved for encoding in found] == [False, True] * 2
    for encoding, sign in zip(found, (1, 1, -1, -1), strict=True):
        assert encoding.scaling == 1.25
        assert encoding.inv_freq == pytest.approx([sign * frequency for frequency in inv_freq], rel=0, abs=5e-10)


@pytest.mark.parametrize(
    ("size", "last"), [(2, 1), (3, 2), (4, 2), (5, 4), (700, 512), (1025, 1024), (4000, 1024), (None, 512)]
)
def test_table_is_read_at_doublings_as_far_as_it_goes(size, last):
    table = Table([0.5, 0.25], "halves", size or 1025)
    found = find_rotary_encodings(Holder(table, **({"max_position_embeddings": size} if size else {})))
    assert table.asked == [0, *itertools.takewhile(lambda position: position <= last, (2**k for k in range(20)))]
    assert found[0].inv_freq == pytest.approx([0.5, 0.25], abs=1e-6)


def test_probe_finds_the_position_kind_of_each_family():
    tokenizer = make_tokenizer()
    kinds = {family: [layer.position for layer in probe(make_model(family, tokenizer)).layers] for family in FAMILIES}
    assert kinds == {"llama": ["rope"] * 3, "gemma3": ["rope"] * 3, "gpt2": ["absolute"] * 3}


def test_probe_gives_each_gemma_layer_type_its_own_encoding():
    geometry = probe(make_model("gemma3", make_tokenizer()))
    assert [layer.rotary for layer in geometry.layers] == [0, 0, 1]
    assert geometry.rotary[0] != geometry.rotary[1]
    assert geometry.sliding


def test_probe_finds_nope_layers_and_interleaved_pairs():
    """Cohere-2 has neighbouring pairs, and its full-attention layers know no position, rotary module or not."""
    config = small(Cohere2Config, layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    geometry = probe(Cohere2ForCausalLM(config).eval())
    assert [layer.position for layer in geometry.layers] == ["rope", "free"]
    assert geometry.rotary[0].interleaved


def test_probe_reads_scaled_encodings():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    model = LlamaForCausalLM(small(LlamaConfig, rope_parameters=rope, max_position_embeddings=256)).eval()
    encoding = probe(model).rotary[0]
    assert encoding.scaling > 1.01
    torch.testing.assert_close(torch.tensor(encoding.inv_freq), model.model.rotary_emb.inv_freq, atol=0, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_stripped_keys_of_one_token_are_the_same_at_every_position(family):
    model = make_model(family, make_tokenizer())
    geometry = probe(model)
    keys = []
    for position in (0, 3, 400):
        ids = torch.full((1, position + 1), 50)
        mask = torch.zeros_like(ids)
        mask[:, -1] = 1
        cache = prefill(model, ids)  # a row of equal tokens: each sees only its like
        encoding = geometry.rotary[geometry.layers[0].rotary]
        keys.append(encoding.strip(cache.layers[0].keys[:, :, -1:], torch.tensor([[position]])))
    torch.testing.assert_close(keys[1], keys[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(keys[2], keys[0], atol=1e-4, rtol=1e-4)


def test_dynamic_rope_is_refused_with_the_reason():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = LlamaForCausalLM(small(LlamaConfig, rope_parameters=rope, max_position_embeddings=64))
    with pytest.raises(ValueError, match="LlamaForCausalLM uses dynamic rope: .*static rope type"):
        probe(model)


def test_geometry_survives_json():
    geometry = probe(make_model("gemma3", make_tokenizer()))
    assert ModelGeometry.from_dict(geometry.to_dict()) == geometry


def test_capture_keeps_only_the_layers_asked_for():
    model = make_model("llama", make_tokenizer())
    ids = torch.randint(0, 60, (1, 12))
    whole, some = prefill(model, ids), prefill(model, ids, layers=[2])
    assert [layer.get_seq_length() for layer in some.layers] == [0, 0, 12]
    torch.testing.assert_close(some.layers[2].keys, whole.layers[2].keys)


@pytest.mark.parametrize("family", FAMILIES)
def test_capture_runs_no_further_than_the_last_layer_asked_for(family):
    model = make_model(family, make_tokenizer())
    ids = torch.randint(0, 60, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    whole, finished = prefill(model, ids, mask), []
    for layer_idx, layer in enumerate(decoder_layers(model)):
        layer.register_forward_hook(lambda *_, idx=layer_idx: finished.append(idx))
    some = prefill(model, ids, mask, layers=[0, 1])
    assert finished == [0]
    assert [layer.get_seq_length() for layer in some.layers] == [12, 12, 0]
    torch.testing.assert_close(some.layers[1].keys, whole.layers[1].keys)
    assert all(layer.get_seq_length() == 0 for layer in prefill(model, ids, mask, layers=()).layers)
    assert finished == [0, 0, 1, 2]


def test_probe_of_a_half_precision_model_finds_the_same(tmp_path):
    """Coarse numbers must not take the rope of one layer type for that of another, or for none."""
    model = make_model("gemma3", make_tokenizer())
    model.save_pretrained(tmp_path)
    half = probe(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval())
    assert half.layers == probe(model).layers
