import re

import pytest
import yaml

from hf_mot import MoTConfig
from hf_mot.hub.card import render_card


def contract(model_id: str | None) -> dict:
    return {"id": model_id, "revision": None, "model_type": "llama"}


@pytest.fixture
def config():
    return MoTConfig(source=contract("org/big"), target=contract("org/small"), source_layers=[3, 17], rank=768)


@pytest.fixture
def report():
    def figure(value: float) -> dict:
        return {"value": value, "low": value - 0.0311, "high": value + 0.0287}

    return {
        "method": "reduced_rank",
        "rank": 768,
        "tokens": 114_907,
        "windows": 451,
        "documents": 298,
        "held_out_documents": 31,
        "corpus": [{"name": "webtext.txt.gz", "sha256": "9f" * 32, "documents": 846}],
        "seed": 5,
        "ridge": 0.125,
        "command": "hf-mot fit --text webtext.txt.gz",
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
        "evaluation": {
            "replay": "none",
            "context_length": 256,
            "n": 137,
            "seed": 6,
            "arms": {
                "native": {"nll": 3.1449},
                "translated": {"nll": 3.2913, "recovery": figure(0.8113)},
                "no_source": {"nll": 3.4551, "recovery": figure(0.6071)},
                "wrong_document": {"nll": 4.0772, "recovery": figure(-0.2244)},
                "no_context": {"nll": 3.9338},
            },
            "recovery": figure(0.8113),
            "content_recovery": figure(0.8437),
            "source_value": figure(0.5171),
            "cost": {
                "time_ratio": 0.0934,
                "flops_ratio": 0.0714,
                "context_length": 1024,
                "translator_bytes": 24_601_512,
            },
        },
    }


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        return [number for entry in value.values() for number in numbers(entry)]
    if isinstance(value, list):
        return [number for entry in value for number in numbers(entry)]
    return [value] if isinstance(value, int | float) else []


def prose(card: str) -> str:
    """The card without front matter, code, and the names in which digits are no figures."""
    card = re.sub(r"```.*?```|`[^`]*`|^---.*?^---", "", card, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"95 %|Apache-2\.0|sha256 \w+|versions: .*", "", card)


def test_front_matter_is_yaml_with_the_library_the_tags_and_both_models(config, report):
    front_matter = yaml.safe_load(render_card(config, report).split("---\n")[1])
    assert front_matter == {
        "library_name": "hf_mot",
        "license": "apache-2.0",
        "tags": ["mot", "kv-cache", "kv-cache-translation"],
        "base_model": ["org/big", "org/small"],
    }


@pytest.mark.parametrize("model_id", [None, "demo/gemma-3-270m"])
def test_a_model_that_is_not_on_the_hub_is_no_base_model(config, report, model_id):
    config.source = contract(model_id)
    front_matter = yaml.safe_load(render_card(config, report).split("---\n")[1])
    assert front_matter["base_model"] == ["org/small"]


def test_every_number_in_the_card_is_from_the_report_or_the_config(config, report):
    known = [
        *numbers(report),
        *config.source_layers,
        config.embedding_window,
        report["evaluation"]["cost"]["translator_bytes"] / 1e6,
    ]
    found = re.findall(r"-?\d+(?:\.\d+)?", prose(render_card(config, report)))
    assert len(found) > 30
    for number in found:
        decimals = len(number.partition(".")[2])
        assert number in {f"{value:.{decimals}f}" for value in known}, f"{number} is in no report"


def test_figures_stand_with_interval_n_seed_and_controls(config, report):
    card = render_card(config, report)
    assert "**recovery 0.81 [0.78, 0.84]**" in card
    assert "**content recovery 0.84 [0.81, 0.87]**" in card
    assert "**source value 0.52 [0.49, 0.55]**" in card
    assert "137 documents that it was not fitted on, 256 tokens of context, replay plan `none`, seed 6" in card
    assert re.search(r"\| .*without any source.*\| 3.455 \| 0.61 \[0.58, 0.64\] \|", card)
    assert re.search(r"\| .*another document.*\| 4.077 \| -0.22 ", card)


def test_what_was_not_measured_is_left_out(config):
    card = render_card(config, {"method": "reduced_rank", "seed": 5})
    assert "seed: 5" in card
    for absent in ("recovery", "NLL of", "Cost", "corpus:", "None", "fitted on ,", "versions"):
        assert absent not in card


def test_licences_of_both_models_are_named(config, report):
    config.source, config.target = contract("demo/smollm2-135m-instruct"), contract("demo/gemma-3-270m")
    card = render_card(config, report)
    assert "SmolLM2-135M-Instruct is under Apache-2.0; Gemma-3-270m is under the Gemma terms of use" in card
    config.target = contract("org/small")
    assert "for org/small see the model's own card" in render_card(config, report)
