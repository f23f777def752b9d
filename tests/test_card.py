import logging
import re

import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard, parse_eval_result_entries

from hf_mot import MoTConfig
from hf_mot.hub.card import minimal_card, render_card
from hf_mot.hub.handwriting import BEGIN, END, merge_card
from hf_mot.hub.metadata import eval_results


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


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_front_matter_is_yaml_with_the_library_the_tags_and_both_models(config, report):
    metadata = front_matter(render_card(config, report))
    del metadata["model-index"]
    assert metadata == {
        "library_name": "hf_mot",
        "tags": ["hf_mot", "kv-cache", "kv-cache-translation", "reduced_rank", "source:org/big", "target:org/small"],
        "base_model": ["org/big", "org/small"],
        "base_model_relation": "adapter",
    }


@pytest.mark.parametrize("model_id", [None, "demo/gemma-3-270m"])
def test_a_model_that_is_not_on_the_hub_is_no_base_model(config, report, model_id):
    config.source = contract(model_id)
    assert front_matter(render_card(config, report))["base_model"] == ["org/small"]


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


def test_verdict_of_the_gate_stands_with_reasons_and_thresholds(config, report):
    assert "Gate" not in render_card(config, report)
    gate = {"passed": True, "reasons": [], "judged_on": ["context_nll", "squad"], "recovery": 0.45, "margin": 0.02}
    report["evaluation"]["gate"] = gate
    card = render_card(config, report)
    assert (
        "## Gate\n\nA recovery of at least 0.45, and better than each control (wrong document, wrong source, " in card
    )
    assert "by more than 0.02 nats a token" in card
    assert "**Passed**, judged on context_nll, squad." in card
    reasons = ["squad: the recovery is 0.200, needs 0.45", "squad: no_source was not measured (no result)"]
    report["evaluation"]["gate"] = {**gate, "passed": False, "reasons": reasons, "judged_on": []}
    card = render_card(config, report)
    assert "**Passed**" not in card
    assert f"**Not passed**, judged on nothing.\n\n- {reasons[0]}\n- {reasons[1]}\n\n## Cost" in card


def test_tasks_stand_with_n_and_native_beside(config, report):
    del report["evaluation"]["arms"]
    squad = {"metric": "f1", "n": 41, "native": 0.3111, "translated": 0.1212, "no_context": 0.0404}
    squad["answer_nll"] = {"recovery": {"value": 0.5, "low": 0.4, "high": 0.6}}
    boolq = {"metric": "accuracy", "n": 17, "translated": 0.7, "answer_nll": {}}
    report["evaluation"]["tasks"] = {"squad": squad, "boolq": boolq}
    card = render_card(config, report)
    assert "| squad | f1 | 41 | 0.311 | 0.121 | 0.040 | 0.50 [0.40, 0.60] |" in card
    assert "| boolq | accuracy | 17 |  | 0.700 |  |  |" in card and "seed 6" in card


def test_licences_of_both_models_are_named(config, report):
    config.source, config.target = contract("demo/smollm2-135m-instruct"), contract("demo/gemma-3-270m")
    card = render_card(config, report)
    assert "SmolLM2-135M-Instruct is under Apache-2.0; Gemma-3-270m is under the Gemma terms of use" in card
    config.target = contract("org/small")
    assert "for org/small see the model's own card" in render_card(config, report)


def test_licence_is_named_only_where_it_is_known(config, report):
    card = render_card(config, report)
    assert "license" not in front_matter(card) and "its weights under" not in card
    card = render_card(config, {**report, "license": "mit"})
    assert front_matter(card)["license"] == "mit" and ", its weights under mit." in card


def test_model_index_holds_the_measured_figures_with_interval_n_and_seed(config, report):
    report["evaluation"]["corpus"] = [{"name": "a.txt"}, {"name": "b.txt"}]
    report["evaluation"]["tasks"] = {
        "squad": {"metric": "f1", "n": 91, "native": 0.61, "translated": {"value": 0.5, "low": 0.4, "high": 0.6}},
        "boolq": {"metric": "accuracy", "native": 0.7},  # the translated arm was not run
    }
    # huggingface_hub reads it as the Hub does.
    results = ModelCard(render_card(config, report, "org/mot-1")).data.eval_results
    assert all(isinstance(result, EvalResult) for result in results)
    assert [(result.metric_type, result.metric_value) for result in results] == [
        ("recovery", 0.8113),
        ("content_recovery", 0.8437),
        ("source_value", 0.5171),
        ("f1", 0.5),
    ]
    context, quiz = results[0], results[-1]
    assert (context.task_type, context.dataset_type) == ("text-generation", "text")
    assert context.dataset_name == "a.txt, b.txt"
    expected = {"replay": "none", "context_length": 256, "n": 137, "seed": 6, "low": 0.7802, "high": 0.84}
    assert context.metric_args == expected
    assert (quiz.task_type, quiz.dataset_type, quiz.metric_args["n"]) == ("question-answering", "squad", 91)
    assert front_matter(render_card(config, report, "org/mot-1"))["model-index"][0]["name"] == "mot-1"


@pytest.mark.parametrize("missing", [{}, {"evaluation": {"n": 3}}])
def test_without_figures_there_is_no_model_index(config, missing):
    assert "model-index" not in front_matter(render_card(config, missing))
    assert eval_results(missing) == {}


def test_benchmark_figures_are_written_as_the_hub_reads_them(report):
    quiz = {"metric": "f1", "n": 91, "translated": 0.43211}
    report["evaluation"]["tasks"] = {
        "Short answers": {**quiz, "dataset": {"id": "org/quiz", "task_id": "short", "revision": "a" * 40}},
        "own": quiz,  # belongs to no benchmark
        "data": {**quiz, "dataset": {"id": "org/no-benchmark"}},
    }
    ((path, text),) = eval_results(report).items()
    assert path == ".eval_results/hf_mot_Short_answers.yaml"
    assert yaml.safe_load(text)[0]["dataset"] == {"id": "org/quiz", "task_id": "short", "revision": "a" * 40}
    (entry,) = parse_eval_result_entries(yaml.safe_load(text))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("org/quiz", "short", 0.4321)
    assert entry.notes == "f1, replay none, context_length 256, n 91, seed 6"


def test_of_the_figures_on_text_recovery_alone_is_a_benchmark_figure(report):
    report["evaluation"]["dataset"] = {"id": "org/texts", "task_id": "recovery"}
    ((path, text),) = eval_results(report).items()
    assert path == ".eval_results/hf_mot_context.yaml"
    assert parse_eval_result_entries(yaml.safe_load(text))[0].value == 0.8113


def test_minimal_card_has_the_pair_and_its_use_but_no_figure(config, report):
    card = minimal_card(config, "org/mot-1")
    assert front_matter(card) == {
        "library_name": "hf_mot",
        "tags": front_matter(render_card(config, report))["tags"],
    }
    assert "# org/big → org/small" in card and 'AutoModel.from_pretrained("org/mot-1")' in card
    assert "recovery" not in card and re.findall(r"\d", prose(card)) == []


# What a person has written


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_mot"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="hf_mot"):
        yield lambda: " ".join(record.getMessage() for record in caplog.records)


def test_card_that_nobody_has_touched_is_replaced(config, report, warnings):
    old, new = render_card(config, {"seed": 1}), render_card(config, report)
    assert merge_card(new, old) == merge_card(new) == merge_card(new, None, "") == new
    assert merge_card(merge_card(new, new), new) == new
    assert warnings() == ""


def test_text_around_the_markers_stays_where_it_is(config, report):
    old = render_card(config, {"seed": 1}).replace(BEGIN, f"Above,\n\nin two parts.\n{BEGIN}") + "Below.\n"
    card = merge_card(render_card(config, report), old)
    assert card.split("---\n", 2)[2].startswith(f"\nAbove,\n\nin two parts.\n{BEGIN}\n\n# org/big")
    assert card.endswith(f"for org/small see the model's own card.\n\n{END}\nBelow.\n")
    assert card.count(BEGIN) == card.count(END) == 1
    assert merge_card(render_card(config, report), card) == card


def test_front_matter_of_others_stays_and_ours_is_renewed(config, report):
    old = (
        "---\nlicense: mit\nlanguage: [en]\nlibrary_name: wrong\nbase_model_relation: merge\n"
        "tags: [mine, hf_mot, 'source:org/old', reduced_rank]\nmodel-index: [{name: old, results: []}]\n---\n"
    )
    metadata = front_matter(merge_card(render_card(config, {"license": "apache-2.0"}), old))
    assert (metadata["license"], metadata["language"]) == ("mit", ["en"])
    assert (metadata["library_name"], metadata["base_model_relation"]) == ("hf_mot", "adapter")
    assert "model-index" not in metadata
    assert metadata["tags"][-1] == "mine" and "source:org/old" not in metadata["tags"]
    assert len(set(metadata["tags"])) == len(metadata["tags"])


@pytest.mark.parametrize(
    "text",
    ["My own words.\n", f"{END}\nMy own words.\n{BEGIN}\n", f"{BEGIN}\nMy own words.\n", f"{BEGIN}{BEGIN}{END}"],
)
def test_text_without_both_markers_is_not_destroyed(config, report, warnings, text):
    card = merge_card(render_card(config, report), f"---\nlicense: mit\n---\n{text}")
    assert card.split("---\n", 2)[2] == text
    assert front_matter(card)["license"] == "mit" and front_matter(card)["library_name"] == "hf_mot"
    assert "has no hf_mot markers" in warnings() and BEGIN in warnings()


def test_of_two_cards_with_own_text_the_first_counts(config, report, warnings):
    card = render_card(config, report)
    on_hub, local = card + "On the Hub.\n", card + "Local.\n"
    assert merge_card(card, "---\nlicense: mit\n---\n", local).endswith("Local.\n")
    assert warnings() == ""
    assert merge_card(card, on_hub, local).endswith("On the Hub.\n")
    assert "hold text of your own, and differ. The Hub's is kept" in warnings()


def test_front_matter_that_is_no_yaml_is_replaced_with_a_warning(config, report, warnings):
    card = merge_card(render_card(config, report), "---\ntags: [mine\n: :\n---\nMy own words.\n")
    assert front_matter(card)["library_name"] == "hf_mot" and "My own words." in card
    assert "front matter of the card cannot be read" in warnings()


def test_windows_are_not_called_documents(config, report):
    report["evaluation"] |= {"n": 137, "n_documents": 40}
    card = render_card(config, report)
    assert "137 windows of 40 documents that it was not fitted on" in card
    assert "137 documents" not in card
