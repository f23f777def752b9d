"""Ranks per piece: what a translator computes that reads fewer channels for some keys and values, and its cost."""

import json
import subprocess
import sys

import peft
import pytest
import torch
from conftest import make_documents, make_pair, make_translator
from torch.nn import functional as F

from hf_mot import MoTConfig, MoTModel
from hf_mot.cli.inspect import describe, format_description
from hf_mot.hub.card import render_card
from hf_mot.training.optimizer import linear_path
from hf_mot.translators_mot import translator_flops
from hf_mot.translators_pieces_mot import PieceProjections

RANKS = [[8, 2], [2, 5], [8, 1]]
SMALL = {"hidden_size": 8, "num_attention_heads": 2}
KINDS = {
    "closed form": {},
    "beside a linear path": {"method": "mot", "num_translators": 2, "linear_path": True, **SMALL},
    "mlp beside a linear path": {"method": "mlp", "linear_path": True, **SMALL},
    "within a trunk": {"method": "mot", "num_translators": 2, "trunk": True, **SMALL},
    "window": {"target_layers": [1, 2], "piece_ranks": RANKS[1:], "replay": "full"},
}


REMOTE = """
import sys
sys.modules["hf_mot"] = None  # the package cannot be imported
import torch
from transformers import AutoModel

mot = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = torch.load(f"{sys.argv[1]}/inputs.pt")
torch.save(torch.cat([part.flatten() for part in mot(*inputs).key_states]), f"{sys.argv[1]}/keys.pt")
"""


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def plain(pair):
    return make_translator(pair)


def make(plain, **fields) -> MoTModel:
    torch.manual_seed(3)
    mot = MoTModel(MoTConfig(**plain.config.to_dict() | {"piece_ranks": RANKS} | fields)).eval()
    with torch.no_grad():
        for weight in mot.parameters():
            weight.normal_(0, 0.3)
    return mot


def cut(plain, ranks) -> MoTModel:
    """A closed form's weights in a translator with ranks per piece."""
    mot = MoTModel(MoTConfig(**plain.config.to_dict() | {"piece_ranks": ranks})).eval()
    own = plain.translator.state_dict()
    mot.translator.up.load(own.pop("up.weight"))
    mot.translator.load_state_dict(own, strict=False)
    return mot


def states_of(mot, pair, text) -> torch.Tensor:
    cache = mot.handoff(text, **pair)
    return torch.cat([part.flatten() for layer in cache.layers for part in (layer.keys, layer.values)])


def random_inputs(mot) -> tuple[torch.Tensor, torch.Tensor]:
    own = mot.translator
    return torch.randn(1, 4, own.source_in.in_features), torch.randn(1, 4, own.embedding_in.in_features)


def test_a_piece_reads_its_leading_channels_alone():
    torch.manual_seed(0)
    widths, ranks = [3, 4, 2, 5], [6, 2, 6, 1]
    up, inner = PieceProjections(widths, ranks), torch.randn(2, 7, 6)
    weight = torch.randn(14, 6)
    up.load(weight)
    expected = [inner[..., :rank] @ own[:, :rank].T for own, rank in zip(weight.split(widths), ranks, strict=True)]
    torch.testing.assert_close(up(inner), torch.cat(expected, -1))
    assert sum(own.numel() for own in up.parameters()) == sum(w * r for w, r in zip(widths, ranks, strict=True))


def test_pieces_that_read_everything_equal_the_plain_translator(pair, plain):
    text = make_documents(1, 12)[0]
    whole = cut(plain, [[8, 8]] * 3)
    assert torch.equal(states_of(whole, pair, text), states_of(plain, pair, text))
    assert translator_flops(whole.config, 50) == translator_flops(plain.config, 50)
    assert (states_of(cut(plain, RANKS), pair, text) - states_of(plain, pair, text)).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_translates_saves_and_loads(pair, plain, kind, tmp_path):
    mot = make(plain, **KINDS[kind])
    text = make_documents(1, 12)[0]
    mot.save_pretrained(tmp_path)
    loaded = MoTModel.from_pretrained(tmp_path)
    assert loaded.config.piece_ranks == mot.config.piece_ranks
    torch.testing.assert_close(states_of(loaded, pair, text), states_of(mot, pair, text))


def test_weights_of_other_ranks_are_refused(plain, tmp_path):
    make(plain).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"piece_ranks": [[8, 2], [2, 4], [8, 1]]}))
    with pytest.raises(ValueError, match="do not fit its config: missing keys.*by_rank.4.weight"):
        MoTModel.from_pretrained(tmp_path)


def test_remote_code_translates_the_same(plain, tmp_path):
    mot, folder = make(plain), tmp_path / "mot"
    mot.save_pretrained(folder)
    inputs = random_inputs(mot)
    torch.save(inputs, folder / "inputs.pt")
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REMOTE, str(folder)], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = torch.cat([part.flatten() for part in mot(*inputs).key_states])
    torch.testing.assert_close(torch.load(folder / "keys.pt"), expected, atol=1e-5, rtol=1e-5)


def test_flops_and_weights_fall_with_the_ranks(plain):
    geometry = plain.target_geometry
    widths = [layer.kv_heads * dim for layer in geometry.layers for dim in (layer.key_dim, layer.value_dim)]
    saved = sum(width * (8 - rank) for width, rank in zip(widths, sum(RANKS, []), strict=True))
    mot = make(plain)
    assert translator_flops(mot.config, 50) == translator_flops(plain.config, 50) - 2 * 50 * saved
    assert mot.num_parameters() == plain.num_parameters() - saved


@pytest.mark.parametrize("kind", ["beside a linear path", "mlp beside a linear path", "within a trunk"])
def test_training_starts_where_the_closed_form_ends(pair, plain, kind):
    closed_form, text = cut(plain, RANKS), make_documents(1, 12)[0]
    mot = MoTModel(MoTConfig(**closed_form.config.to_dict() | KINDS[kind])).eval()
    mot.load_linear_path(closed_form)
    torch.testing.assert_close(states_of(mot, pair, text), states_of(closed_form, pair, text))
    own = mot.translator if mot.config.trunk else mot.translator.linear
    expected = [own.source_in.weight, own.embedding_in.weight, *own.up.parameters()]
    assert {id(weight) for weight in linear_path(mot)} == set(map(id, expected))
    with pytest.raises(ValueError, match="`closed_form` was fitted with `piece_ranks` None, but this translator has"):
        mot.load_linear_path(plain)


def test_a_translator_of_a_pair_takes_ranks(pair, plain):
    mot = MoTModel.from_pair(**pair, method="mot", trunk=True, rank=8, piece_ranks=RANKS, **SMALL)
    config = plain.config
    again = MoTModel.from_contracts(
        config.source, config.target, method="reduced_rank", source_layers=[], rank=8, piece_ranks=RANKS
    )
    for model in (mot, again):
        assert sorted(model.get_submodule("translator.up.by_rank")._modules) == ["1", "2", "5", "8"]


@pytest.mark.filterwarnings("default::FutureWarning")  # peft's own calls
def test_lora_finds_the_projections(plain):
    mot = peft.get_peft_model(make(plain), peft.LoraConfig(target_modules="all-linear", r=2))
    assert {name.split(".by_rank.")[1][0] for name, _ in mot.named_parameters() if ".by_rank." in name} == set("1258")
    assert not any(weight.requires_grad for weight in linear_path(mot))
    mot(*random_inputs(plain))


def test_gradients_reach_every_projection(plain):
    mot = make(plain)
    out = mot.translator(*random_inputs(mot))
    F.mse_loss(out, torch.zeros_like(out)).backward()
    assert all(weight.grad.abs().max() > 0 for weight in mot.parameters())


def test_ranks_are_shown(plain):
    mot = make(plain)
    assert describe(mot)["piece_ranks"] == RANKS
    assert "reduced_rank, rank 8 (1 to 8 a piece)" in format_description(describe(mot))
    assert "method: reduced_rank, rank 8 (1 to 8 a piece), source" in render_card(mot.config, {})
    assert "a piece" not in format_description(describe(plain))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"piece_ranks": [[8, 9], [1, 1], [1, 1]]}, r"`piece_ranks` must be \[keys, values\].*from 1 to `rank` 8"),
        ({"piece_ranks": [[8, 0], [1, 1], [1, 1]]}, r"`piece_ranks` must be \[keys, values\].*from 1 to `rank` 8"),
        ({"piece_ranks": [[8], [1], [1]]}, r"`piece_ranks` must be \[keys, values\].*got \[\[8\], \[1\], \[1\]\]"),
        ({"piece_ranks": [[8, 8]]}, "`piece_ranks` must be .* each of the 3 target layers that are translated, got 1"),
        ({"target_layers": [1], "replay": "full"}, "each of the 1 target layers that are translated, got 3"),
        ({"rank": None}, "`piece_ranks` needs a linear map of low rank.*got 'reduced_rank' and None"),
        ({"method": "mlp"}, "`piece_ranks` needs a linear map of low rank.*got 'mlp' and 8"),
        ({"method": "mot"}, "`piece_ranks` needs a linear map of low rank.*got 'mot' and 8"),
        ({"method": "identity"}, "`piece_ranks` needs a linear map of low rank.*got 'identity' and 8"),
    ],
    ids=str,
)
def test_impossible_ranks_are_refused(plain, fields, error):
    with pytest.raises(ValueError, match=error):
        make(plain, **fields)
