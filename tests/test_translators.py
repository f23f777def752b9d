"""The trained translators: what each computes, where training starts, which gradient reaches the router."""

import pytest
import torch
from conftest import changed, make_documents, make_own, make_pair
from conftest import make_translator as make_linear
from torch.nn import functional as F

from hf_mot import MoTConfig, MoTModel
from hf_mot.compat_mot import cache_argument
from hf_mot.configuration_mot import PAPER
from hf_mot.contract_mot import describe_model
from hf_mot.replay_cost_mot import native_flops
from hf_mot.replay_mot import ReplayPlan
from hf_mot.translators_backbone_mot import BackboneTranslator, CrossAttentionBlock
from hf_mot.translators_mixture_mot import Mixture, Router
from hf_mot.translators_mot import translator_flops

SMALL = {"hidden_size": 8, "num_attention_heads": 2}
KINDS = {
    "single": {"method": "mot"},
    "two stages": {"method": "mot", "num_stages": 2},
    "mot": {"method": "mot", "num_translators": 2},
    "uniform": {"method": "mot", "num_translators": 3, "routing": "uniform"},
    "moe": {"method": "mot", "num_translators": 2, "experts": "ffn"},
    "mlp": {"method": "mlp"},
    "beside a linear path": {"method": "mot", "num_translators": 2, "linear_path": True, "rank": 8},
    "mlp beside a linear path": {"method": "mlp", "linear_path": True, "rank": None},
    "within a trunk": {"method": "mot", "num_translators": 2, "trunk": True, "rank": 8},
    "paper": PAPER,
}


@pytest.fixture(scope="module")
def pair():
    return make_pair()


def make(pair, **fields) -> MoTModel:
    contracts = {side: describe_model(pair[side], pair[f"{side}_tokenizer"]) for side in ("source", "target")}
    torch.manual_seed(3)
    mot = MoTModel(
        MoTConfig(**contracts, **{"source_layers": [0, 2], "embedding_window": 2, **SMALL, **fields})
    ).eval()
    with torch.no_grad():
        for weight in mot.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return mot


def handoff(mot, pair, text, **kwargs):
    return mot.handoff(text, **pair, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_translates_saves_and_loads(pair, kind, tmp_path):
    mot = make(pair, **KINDS[kind])
    text = make_documents(1, 12)[0]
    cache = handoff(mot, pair, text)
    mot.save_pretrained(tmp_path)
    loaded = MoTModel.from_pretrained(tmp_path)
    again = handoff(loaded, pair, text)
    for ours, theirs in zip(cache.layers, again.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)
    other = handoff(loaded, pair, make_documents(1, 12, seed=5)[0])
    assert (other.layers[1].keys[:, :, -1] - cache.layers[1].keys[:, :, -1]).abs().max() > 0.01
    prompt = pair["target_tokenizer"]("river", return_tensors="pt")
    assert pair["target"].generate(**prompt, past_key_values=again, max_new_tokens=3).shape[1] > 3


@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_are_translated_as_alone(pair, kind):
    mot = make(pair, **KINDS[kind])
    texts = make_documents(1, 4, 1) + make_documents(1, 15, 2)
    batch = handoff(mot, pair, texts)
    for row, text in enumerate(texts):
        alone, kept = handoff(mot, pair, text), batch.prefix_mask[row].bool()
        for ours, theirs in zip(batch.layers, alone.layers, strict=True):
            torch.testing.assert_close(ours.keys[row][:, kept], theirs.keys[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.values[row][:, kept], theirs.values[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "paper"])
def test_more_context_changes_no_earlier_token(pair, kind):
    mot = make(pair, **KINDS[kind])
    ids = pair["target_tokenizer"](make_documents(1, 20)[0], return_tensors="pt")["input_ids"][0].tolist()
    shorter, longer = (
        handoff(mot, pair, pair["target_tokenizer"].decode(ids[1:end]), target_input_ids=torch.tensor([ids[:end]]))
        for end in (12, len(ids))
    )
    for ours, theirs in zip(shorter.layers, longer.layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, :11], theirs.keys[:, :, :11], atol=1e-4, rtol=1e-4)
    assert longer.get_seq_length() > shorter.get_seq_length()


def test_without_causality_later_tokens_do_change_earlier_ones(pair):
    mot = make(pair, method="mot", causal=False)
    width = mot.translator.widths
    states, embeddings = torch.randn(1, 6, width.source_dim), torch.randn(1, 6, width.embeddings)
    whole, start = mot(states, embeddings), mot(states[:, :4], embeddings[:, :4])
    assert (whole.key_states[0][:, :, :4] - start.key_states[0]).abs().max() > 1e-3


def test_backbone_is_the_papers_formula():
    """C.2 written out for two slots, one stage, one head."""
    torch.manual_seed(0)
    backbone = BackboneTranslator([6, 6], 5, hidden_size=4, num_heads=1, output_activation="gelu")
    slots = [torch.randn(1, 7, 6), torch.randn(1, 7, 6)]
    norm, w_in, _ = backbone.input_projections["6"]
    z = [F.gelu(w_in(norm(slot))) for slot in slots]
    h, states = z[0], []
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    for block, slot in zip(backbone.stages[0], z, strict=True):
        context = block.context_norm(slot)
        scores = block.query(block.query_norm(h)) @ block.key(context).transpose(1, 2) / 4**0.5
        attended = scores.masked_fill(future, float("-inf")).softmax(-1) @ block.value(context)
        h = h + block.output(attended)
        h = h + block.ffn(block.ffn_norm(h))
        states.append(h)
    expected = F.gelu(backbone.output_projection(backbone.output_norm(torch.cat(states, -1))))
    torch.testing.assert_close(backbone(slots), expected, atol=1e-5, rtol=1e-5)
    assert backbone(slots).min() >= -0.1701  # what the activation costs: keys are signed
    assert isinstance(backbone.stages[0][0], CrossAttentionBlock)


@pytest.mark.parametrize(
    ("routing", "learns"), [("renormalized", False), ("switch", True), ("straight_through", True)]
)
def test_gradient_of_the_router_at_top_1(routing, learns):
    torch.manual_seed(0)
    mixture = Mixture([torch.nn.Linear(4, 3) for _ in range(2)], Router(4, 2, top_k=1, routing=routing))
    x = torch.randn(2, 9, 4)
    mixture(x, x).square().sum().backward()
    assert (mixture.router.gate.weight.grad.abs().max() > 1e-4) == learns


def test_routings_differ_only_as_they_say():
    torch.manual_seed(0)
    x = torch.randn(2, 9, 4)
    routers = {name: Router(4, 3, top_k=2, routing=name) for name in ("renormalized", "switch", "straight_through")}
    for router in routers.values():
        router.load_state_dict(routers["switch"].state_dict())
    weights = {name: router(x)[0] for name, router in routers.items()}
    probabilities = routers["switch"](x)[1]
    torch.testing.assert_close(weights["straight_through"], weights["renormalized"])
    torch.testing.assert_close(weights["renormalized"].sum(-1), torch.ones(2, 9))
    assert ((weights["switch"] > 0).sum(-1) == 2).all()
    torch.testing.assert_close(weights["switch"], torch.where(weights["switch"] > 0, probabilities, 0))
    torch.testing.assert_close(Router(4, 3, 1, "uniform")(x)[0], torch.full((2, 9, 3), 1 / 3))


def test_top_k_of_all_translators_is_the_dense_mixture():
    torch.manual_seed(0)
    experts = [torch.nn.Linear(4, 3) for _ in range(3)]
    mixture = Mixture(experts, Router(4, 3, top_k=3, routing="renormalized"))
    x = torch.randn(2, 5, 4)
    dense = mixture.router(x)[1]
    expected = sum(dense[..., n : n + 1] * expert(x) for n, expert in enumerate(experts))
    torch.testing.assert_close(mixture(x, x), expected)


@pytest.mark.parametrize(
    "fields", [{"linear_path": True}, {"trunk": True}, {"method": "mlp", "linear_path": True}], ids=str
)
def test_training_starts_where_the_closed_form_ends(pair, fields):
    closed_form = make_linear(pair)
    config = closed_form.config.to_dict() | {"method": "mot", "num_translators": 2, **SMALL, **fields}
    mot = MoTModel(MoTConfig(**config)).eval()
    mot.load_linear_path(closed_form)
    text = make_documents(1, 12)[0]
    for ours, theirs in zip(handoff(mot, pair, text).layers, handoff(closed_form, pair, text).layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)
    with pytest.raises(ValueError, match="`closed_form` was fitted with `rank` 8, but this translator has 4"):
        MoTModel(MoTConfig(**config | {"rank": 4})).load_linear_path(closed_form)
    with pytest.raises(ValueError, match="`closed_form` must be a closed form.*got (mot|mlp)"):
        mot.load_linear_path(mot)
    with pytest.raises(ValueError, match="has no linear path"):
        make(pair, method="mot").load_linear_path(closed_form)


def test_channel_window_is_injected_and_the_rest_is_native(pair):
    text = make_documents(1, 12)[0]
    whole = make_linear(pair)
    depth = len(whole.target_geometry.layers)
    window = MoTModel(MoTConfig(**whole.config.to_dict() | {"target_layers": [1], "replay": "full"})).eval()
    assert window.target_layers == [1] and str(window.plan()) == "full:1-1"
    start, end = (sum(layer.width for layer in whole.target_geometry.layers[:stop]) for stop in (1, 2))
    with torch.no_grad():
        for name, weight in window.named_parameters():
            full = whole.get_parameter(name)
            weight.copy_(full if full.shape == weight.shape else full[start:end])
    ours, theirs = handoff(window, pair, text), handoff(whole, pair, text, replay="full:1-1")
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys)
    prompt = torch.tensor([[40, 41]])
    logits = pair["target"](prompt, **{cache_argument(pair["target"]): ours.fork()}).logits
    native = handoff(MoTModel.identity(pair["target"], pair["target_tokenizer"]), own_of(pair), text)
    assert (
        logits - pair["target"](prompt, **{cache_argument(pair["target"]): native.fork()}).logits
    ).abs().max() > 0.01
    with pytest.raises(ValueError, match=f"gives layers 1-1 of the target's {depth} alone.*replay='full'"):
        handoff(window, pair, text, replay="none")
    with pytest.raises(ValueError, match="`replay` injects layers 0-1, but the translator gives layers 1-1"):
        handoff(window, pair, text, replay="full:0-1")


def own_of(pair):
    return {name: pair[name.replace("source", "target")] for name in pair}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_keys_at_their_positions_are_an_option(family):
    """The identity translator with rotated keys passes the cache through as it is."""
    own = make_own(family)
    identity = MoTModel.identity(own["target"], own["target_tokenizer"])
    literal = MoTModel(MoTConfig(**identity.config.to_dict() | {"position_free": False})).eval()
    texts = make_documents(1, 5, 1) + make_documents(1, 12, 2)
    free, kept = (handoff(mot, own, texts) for mot in (identity, literal))
    for ours, theirs in zip(kept.layers, free.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
    inputs = {name: value for name, value in own.items() if name != "source"}
    cache, ids, mask = literal.read_source(texts, own["source"], own["source_tokenizer"])
    rotated = literal.prepare(cache, ids, source_attention_mask=mask, text=texts, **inputs).source_states
    free = identity.prepare(cache, ids, source_attention_mask=mask, text=texts, **inputs).source_states
    assert (rotated - free).abs().max() > 0.1


def test_flops_count_every_product(pair):
    linear = make_linear(pair).config
    weights = sum(w.numel() for name, w in make_linear(pair).named_parameters() if not name.endswith(("bias", "gain")))
    assert translator_flops(linear, 50) == 2 * 50 * weights
    single, double = (make(pair, method="mot", num_translators=count).config for count in (1, 2))
    assert 1.9 < translator_flops(double, 50) / translator_flops(single, 50) < 2.1
    plan = ReplayPlan.parse("full")
    geometry = make(pair, method="mot").target_geometry
    assert plan.flops(single, 50) == translator_flops(single, 50) + native_flops(geometry, 50)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"method": "mix"}, "`method` must be one of reduced_rank, mot, mlp, identity, got 'mix'"),
        ({"routing": "best"}, "`routing` must be one of renormalized, switch, straight_through, uniform, got 'best'"),
        ({"experts": "layer"}, "`experts` must be one of translator, ffn, got 'layer'"),
        ({"output_activation": "relu"}, "`output_activation` must be one of None, gelu, got 'relu'"),
        ({"num_translators": 0}, "`num_translators` must be at least 1, got 0"),
        ({"num_translators": 2, "top_k": 3}, "`top_k` must be at most `num_translators` 2, got 3"),
        ({"num_attention_heads": 3}, "`hidden_size` must be a multiple of `num_attention_heads` 3, got 8"),
        ({"trunk": True, "rank": None}, "`trunk` needs `method` 'mot' and a `rank`"),
        ({"trunk": True, "linear_path": True, "rank": 4}, "`trunk` and `linear_path` exclude each other"),
        ({"method": "identity", "target_layers": [1]}, r"identity translator must be.*\[1\], got \[0, 2\]"),
        ({"target_layers": [0, 2]}, r"`target_layers` must be contiguous layers, each once.*got \[0, 2\]"),
        ({"target_layers": [1, 1]}, r"`target_layers` must be contiguous layers, each once.*got \[1, 1\]"),
        ({"target_layers": []}, r"`target_layers` must be contiguous.*got \[\]"),
        ({"target_layers": [5, 6, 7, 8, 9]}, r"`target_layers` must lie in 0\.\.\d, got"),
        ({"source_layers": [], "embedding_window": 0}, "nothing to read"),
        ({"replay": "half"}, "`replay` must be one of"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(pair, fields, error):
    with pytest.raises(ValueError, match=error):
        make(pair, **{"method": "mot", **fields})


def test_unknown_families_of_layers_share_no_projection():
    backbone = BackboneTranslator([6, 4, 6], 5, hidden_size=4, num_heads=2)
    assert sorted(backbone.input_projections) == ["4", "6"]
    assert backbone([torch.randn(1, 3, width) for width in (6, 4, 6)]).shape == (1, 3, 5)


def test_config_of_a_trained_translator_round_trips(pair):
    config = make(pair, method="mot", num_translators=2, target_layers=[1, 2], replay="full").config
    again = MoTConfig(**config.to_dict())
    assert again.to_dict() == config.to_dict() and again.target_layers == [1, 2]
    assert MoTConfig(**changed(config.to_dict(), ["top_k"], 2)).top_k == 2
