import pytest
import torch
from conftest import FAMILIES, make_model, make_tokenizer
from transformers import Cohere2Config, Cohere2ForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_mot.capture_mot import prefill
from hf_mot.geometry_mot import ModelGeometry, probe
from hf_mot.positions_mot import RotaryEncoding


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


def test_probe_of_a_half_precision_model_finds_the_same(tmp_path):
    """Coarse numbers must not take the rope of one layer type for that of another, or for none."""
    model = make_model("gemma3", make_tokenizer())
    model.save_pretrained(tmp_path)
    half = probe(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval())
    assert half.layers == probe(model).layers
