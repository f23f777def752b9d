"""Translators of earlier formats load and translate as they did.

`python tests/test_golden.py` writes the one of a new format."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_mot.configuration_mot import FORMAT_VERSION

GOLDEN = Path(__file__).parent / "golden"
TEXT = "the captain of the river bridge wrote a letter, café 🙂"


def load(folder: Path) -> dict:
    pair = {}
    for side in ("source", "target"):
        pair[side] = AutoModelForCausalLM.from_pretrained(folder / side)
        pair[f"{side}_tokenizer"] = AutoTokenizer.from_pretrained(folder / side)
    return pair


def states(mot, pair: dict) -> dict[str, torch.Tensor]:
    cache = mot.handoff(TEXT, **pair)
    return {
        f"{name}.{index}": getattr(layer, name).contiguous()
        for index, layer in enumerate(cache.layers)
        for name in ("keys", "values")
    }


def test_the_current_format_has_its_golden_translator():
    assert {path.name for path in GOLDEN.iterdir()} == {f"format_{n + 1}" for n in range(FORMAT_VERSION)}


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("*")), ids=lambda folder: folder.name)
def test_golden_translator_translates_as_it_did(folder):
    config = json.loads((folder / "mot" / "config.json").read_text(encoding="utf-8"))
    assert folder.name == f"format_{config['format_version']}"
    mot = AutoModel.from_pretrained(folder / "mot")
    expected = load_file(folder / "expected.safetensors")
    came = states(mot, load(folder))
    assert came.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(came[name], tensor, atol=1e-4, rtol=1e-4)
    assert any(tensor.abs().max() > 0.1 for tensor in expected.values())
    assert mot.fit_report == {"method": "reduced_rank", "tokens": 7}


def write() -> None:
    from conftest import make_pair, make_translator, save_pair

    folder = GOLDEN / f"format_{FORMAT_VERSION}"
    pair = make_pair()
    save_pair(pair, folder)
    mot = make_translator(pair, embedding_window=3)
    mot.fit_report = {"method": "reduced_rank", "tokens": 7}
    mot.save_pretrained(folder / "mot")
    for path in [*(folder / "mot").glob("*.py"), folder / "mot" / "custom_generate"]:  # the code is that of the day
        path.unlink() if path.is_file() else [file.unlink() for file in path.iterdir()] and path.rmdir()
    pair = load(folder)
    save_file(states(AutoModel.from_pretrained(folder / "mot"), pair), folder / "expected.safetensors")


if __name__ == "__main__":
    write()
