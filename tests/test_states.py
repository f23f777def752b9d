"""States captured to disk are those of a live run, whole or resumed, and of nothing else than what they say."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from conftest import make_documents, make_model, make_pair, make_tokenizer, make_translator, save_pair
from families import build
from torch.utils.data import DataLoader
from training_pair import make_args, make_trainer

from hf_mot.capture_mot import prefill, source_states, split_layers
from hf_mot.cli.main import main
from hf_mot.data import shards
from hf_mot.data.capture import capture_states
from hf_mot.data.states import StatesDataset, collate, translation_inputs
from hf_mot.rows_mot import positions_from_mask
from hf_mot.training.examples import iterate_examples
from hf_mot.training.losses import LossInputs, weighted_sum

SHARD = 40_000  # bytes; a few examples


@pytest.fixture(scope="module")
def pair():
    return make_pair()  # the target's windows are shorter than some contexts


@pytest.fixture(scope="module")
def mot(pair):
    return make_translator(pair)


@pytest.fixture(scope="module")
def examples(pair):
    """Contexts and, cut here, prompts of unequal length."""
    tokenizer = pair["target_tokenizer"]
    found = iterate_examples(
        make_documents(6), tokenizer, prefix_ids=[tokenizer.bos_token_id], length=40, context_length=(8, 30)
    )
    return [
        type(e)(e.document, e.text, e.context_ids, e.prompt_ids[: 4 + n % 7]) for n, e in enumerate(found) if n < 14
    ]


@pytest.fixture(scope="module")
def captured(tmp_path_factory, examples, mot, pair):
    """A folder of exact states, with the likeliest tokens."""
    folder = tmp_path_factory.mktemp("exact")
    capture_states(examples, mot, **pair, **SETTINGS, folder=folder)
    return folder


SETTINGS = {"dtype": "float32", "top_logits": 5, "batch_size": 3, "max_shard_bytes": SHARD, "progress": False}


def live(example, mot, pair):
    """Source states, native states and logits of one example, run alone."""
    cache, ids, mask = mot.read_source([example.text], pair["source"], pair["source_tokenizer"])
    inputs = mot.prepare(
        cache,
        ids,
        source_attention_mask=mask,
        source_tokenizer=pair["source_tokenizer"],
        target=pair["target"],
        target_tokenizer=pair["target_tokenizer"],
        target_input_ids=torch.tensor([example.context_ids]),
        text=[example.text],
    )
    native = prefill(pair["target"], inputs.target_ids)
    positions = positions_from_mask(inputs.target_mask)
    states = source_states(native, mot.target_geometry, range(3), positions)
    with torch.no_grad():
        logits = pair["target"](torch.tensor([example.context_ids + example.prompt_ids])).logits[0]
    return inputs, states, logits[len(example.context_ids) : -1]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_captured_states_equal_live_ones(captured, examples, mot, pair):
    dataset = StatesDataset(captured)
    assert len(dataset) == len(examples) and len(dataset.index["shards"]) > 2
    for item, example in zip(dataset, examples, strict=True):
        inputs, states, logits = live(example, mot, pair)
        assert item["document"] == example.document
        assert item["context_ids"].tolist() == example.context_ids
        assert item["prompt_ids"].tolist() == example.prompt_ids
        assert torch.allclose(item["source_states"], inputs.source_states[0], atol=1e-4)
        assert torch.allclose(item["native_states"], states[0], atol=1e-4)
        values, ids = logits.log_softmax(-1).topk(5)
        assert torch.equal(item["top_ids"].long(), ids)
        assert torch.allclose(item["top_log_probs"].float(), values, rtol=1e-3, atol=1e-3)


def test_batches_of_one_give_the_same_bytes_where_nothing_is_padded(tmp_path, captured, examples, mot, pair):
    same = [e for e in examples if len(e.context_ids) == len(examples[0].context_ids)][:1] * 2
    for name, size in (("one", 1), ("two", 2)):
        capture_states(same, mot, **pair, **{**SETTINGS, "batch_size": size}, folder=tmp_path / name)
    one, two = (StatesDataset(tmp_path / name) for name in ("one", "two"))
    assert torch.allclose(one[1]["native_states"], two[1]["native_states"], atol=1e-5)
    assert torch.allclose(one[0]["source_states"], two[1]["source_states"], atol=1e-5)


def test_bfloat16_is_the_exact_states_rounded(tmp_path, captured, examples, mot, pair):
    capture_states(examples[:5], mot, **pair, **{**SETTINGS, "dtype": "bfloat16"}, folder=tmp_path / "bf16")
    exact = StatesDataset(captured)
    for n, item in enumerate(StatesDataset(tmp_path / "bf16")):
        for name in ("source_states", "native_states"):
            assert item[name].dtype == torch.bfloat16
            assert torch.allclose(item[name].float(), exact[n][name], rtol=2**-7, atol=1e-4)


def test_hidden_states_give_the_logits_through_the_head(tmp_path, captured, examples, mot, pair):
    capture_states(examples[:4], mot, **pair, **{**SETTINGS, "top_logits": None}, folder=tmp_path / "hidden")
    exact = StatesDataset(captured)
    for n, item in enumerate(StatesDataset(tmp_path / "hidden")):
        with torch.no_grad():
            log_probs = pair["target"].get_output_embeddings()(item["native_hidden"]).log_softmax(-1)
        assert torch.allclose(log_probs.topk(5).values, exact[n]["top_log_probs"].float(), atol=2e-3)


def test_hidden_states_are_refused_where_logits_are_more_than_the_head(tmp_path, examples):
    tokenizer = make_tokenizer(merges=40)
    gemma2 = build("Gemma2ForCausalLM", len(tokenizer), attn_implementation="eager", final_logit_softcapping=1.0)
    own = {"source": gemma2, "target": gemma2, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    with pytest.raises(ValueError, match="`top_logits` is None, but the logits of Gemma2ForCausalLM are not its head"):
        capture_states(examples[:1], make_translator(own), **own, folder=tmp_path, top_logits=None, progress=False)


def test_nothing_of_the_prompt_is_run_where_nothing_is_kept(tmp_path, captured, examples, mot, pair, monkeypatch):
    monkeypatch.setattr("hf_mot.data.capture.prompt_logits", None)
    settings = {**SETTINGS, "top_logits": 0, "target_layers": [1, 2]}
    capture_states(examples[:2], mot, **pair, **settings, folder=tmp_path / "states")
    item, exact = StatesDataset(tmp_path / "states")[1], StatesDataset(captured)[1]
    assert set(item) == {"document", "context_ids", "prompt_ids", "source_states", "native_states"}
    first = mot.target_geometry.layers[0].width
    assert torch.allclose(item["native_states"], exact["native_states"][:, first:], atol=1e-5)


class Killed(BaseException):
    pass


def test_killed_runs_end_with_the_same_bytes(tmp_path, captured, examples, mot, pair, monkeypatch):
    """Killed before every single rename: of a shard, or of the index after it."""
    folder, replaced, real = tmp_path / "killed", [], shards.os.replace
    kills = 0

    def replace(*args):
        if len(replaced) == 2 and kills < 20:
            raise Killed
        replaced.append(args)
        real(*args)

    monkeypatch.setattr(shards.os, "replace", replace)
    while True:
        replaced.clear()
        try:
            capture_states(iter(examples), mot, **pair, **SETTINGS, folder=folder)
            break
        except Killed:
            kills += 1
    assert kills > 2
    assert contents(folder) == contents(captured)


def test_a_whole_folder_is_left_as_it_is(tmp_path, captured, examples, mot, pair):
    before = contents(captured)
    assert capture_states(examples, mot, **pair, **SETTINGS, folder=captured)["complete"]
    assert contents(captured) == before


def test_max_bytes_is_kept_and_can_be_raised(tmp_path, captured, examples, mot, pair):
    folder, most = tmp_path / "small", 3 * SHARD
    index = capture_states(examples, mot, **pair, **SETTINGS, folder=folder, max_bytes=most)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert not index["complete"]
    assert most - SHARD < size <= most
    assert 0 < len(StatesDataset(folder)) < len(examples)
    assert capture_states(examples, mot, **pair, **SETTINGS, folder=folder)["complete"]
    exact = StatesDataset(captured)
    for item, other in zip(StatesDataset(folder), exact, strict=True):
        assert item["document"] == other["document"]
        assert torch.allclose(item["native_states"], other["native_states"], atol=1e-5)
    with pytest.raises(ValueError, match="`max_bytes` of 500 has no room for one example"):
        capture_states(examples, mot, **pair, **SETTINGS, folder=tmp_path / "none", max_bytes=500)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16"}, "was captured with `dtype` 'float32', but this run has 'bfloat16'"),
        ({"top_logits": 6}, "was captured with `top_logits` 5, but this run has 6"),
        ({"target_layers": [0, 1]}, "was captured with `target_layers` \\[0, 1, 2\\], but this run has \\[0, 1\\]"),
    ],
)
def test_other_settings_are_refused(captured, examples, mot, pair, settings, message):
    with pytest.raises(ValueError, match=message):
        capture_states(examples, mot, **pair, **{**SETTINGS, **settings}, folder=captured)


def test_another_pair_layers_or_text_are_refused(tmp_path, captured, examples, mot, pair):
    other = {**pair, "target": make_model("gemma3", pair["target_tokenizer"], seed=5)}
    other_mot = make_translator(other)
    with pytest.raises(ValueError, match="holds states of another pair: its `target` has `fingerprint`"):
        capture_states(examples, other_mot, **other, **SETTINGS, folder=captured)
    with pytest.raises(ValueError, match="holds states of another pair: its `target` has `fingerprint`"):
        StatesDataset(captured, other_mot.config)
    with pytest.raises(ValueError, match="`target` has other weights"):
        capture_states(examples, mot, **other, **SETTINGS, folder=tmp_path / "x")
    fewer = make_translator(pair, source_layers=[0])
    with pytest.raises(ValueError, match="captured with `source_layers` \\[0, 2\\], but this run has \\[0\\]"):
        capture_states(examples, fewer, **pair, **SETTINGS, folder=captured)
    with pytest.raises(ValueError, match="`examples` does not begin with the 14 examples"):
        capture_states(examples[::-1], mot, **pair, **SETTINGS, folder=captured)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than captured states"):
        capture_states(examples, mot, **pair, **SETTINGS, folder=tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "`dtype` must be 'bfloat16' or 'float32', got 'int8'"),
        ({"top_logits": -1}, "`top_logits` must be None or from 0 to"),
        ({"target_layers": [2, 1]}, "`target_layers` must rise within 0..2, got \\[2, 1\\]"),
        ({"batch_size": 0}, "`batch_size` must be 1 or more, got 0"),
        ({"max_bytes": 1000}, "`max_bytes` of 1,000 has no room for one example"),
    ],
)
def test_impossible_settings_are_refused(tmp_path, examples, mot, pair, settings, message):
    with pytest.raises(ValueError, match=message):
        capture_states(examples, mot, **pair, **{**SETTINGS, **settings}, folder=tmp_path / "states")
    assert not any(tmp_path.iterdir())


def test_no_source_layers_and_no_examples_are_refused(tmp_path, examples, mot, pair):
    with pytest.raises(ValueError, match="`config` has no `source_layers`"):
        capture_states(examples, make_translator(pair, source_layers=[]), **pair, **SETTINGS, folder=tmp_path / "a")
    with pytest.raises(ValueError, match="`examples` is empty"):
        capture_states([], mot, **pair, **SETTINGS, folder=tmp_path / "b")
    assert not any(tmp_path.iterdir())
    (tmp_path / "c").write_text("")
    with pytest.raises(ValueError, match="`folder` .*c is a file. Choose another name"):
        capture_states([], mot, **pair, **SETTINGS, folder=tmp_path / "c")


def test_states_of_a_run_that_was_killed_in_its_first_shard_are_refused(tmp_path, examples, mot, pair, monkeypatch):
    def killed(*args):
        raise Killed

    monkeypatch.setattr("hf_mot.data.capture.write_shard", killed)
    with pytest.raises(Killed):
        capture_states(iter(examples), mot, **pair, **SETTINGS, folder=tmp_path)
    with pytest.raises(ValueError, match="holds no captured example yet"):
        StatesDataset(tmp_path)


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for name, content in contents(folder).items():
        (to / name).write_bytes(content)
    return to


def test_damaged_shards_are_refused_by_name(tmp_path, captured):
    name = "states-00001.safetensors"
    whole = (captured / name).read_bytes()
    cut = copied(captured, tmp_path / "cut")
    (cut / name).write_bytes(whole[:-100])
    with pytest.raises(
        ValueError, match=f"{name} is damaged \\(it has {len(whole) - 100} bytes, expected {len(whole)}"
    ):
        StatesDataset(cut)
    (cut / name).write_bytes(b"\xff" * len(whole))
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        StatesDataset(cut)
    (cut / name).write_bytes(whole.replace(b"native_states", b"active_states", 1))
    with pytest.raises(ValueError, match=f"{name} is damaged \\(it holds .*active_states.*, expected"):
        StatesDataset(cut)
    (cut / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing, but index.json names it"):
        StatesDataset(cut)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("settings"), "index.json is damaged \\(KeyError: 'settings'"),
        (lambda index: index["settings"].update(source_layers=[9]), "index.json is damaged \\(IndexError"),
        (lambda index: index["shards"][0].update(file="../x"), "index.json is damaged .* is no shard"),
        (lambda index: index.update(format_version=2), "has the format 2, but this release of hf_mot reads 1"),
    ],
)
def test_damaged_indexes_are_refused(tmp_path, captured, change, message):
    folder = copied(captured, tmp_path / "changed")
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        StatesDataset(folder)
    (folder / "index.json").write_text("{")
    with pytest.raises(ValueError, match="index.json is damaged"):
        StatesDataset(folder)
    (folder / "index.json").unlink()
    with pytest.raises(ValueError, match="holds no captured states: it has no index.json"):
        StatesDataset(folder)


def test_batch_gives_a_translator_what_prepare_gives_it(captured, examples, mot, pair):
    dataset = StatesDataset(captured, mot.config)
    picked = [3, 0, 7]
    batch = collate([dataset[n] for n in picked])
    inputs = translation_inputs(batch, mot.config, pair["target"].get_input_embeddings())
    keys, values = split_layers(batch["native_states"], dataset.target_geometry, dataset.target_layers)
    with torch.no_grad():
        output = mot(inputs.source_states, inputs.embeddings)
    assert batch["documents"] == [examples[n].document for n in picked]
    assert len({len(examples[n].context_ids) for n in picked}) > 1
    for row, n in enumerate(picked):
        own, states, _ = live(examples[n], mot, pair)
        kept = inputs.target_mask[row].bool()
        assert torch.equal(inputs.target_ids[row][kept], own.target_ids[0])
        assert torch.allclose(inputs.embeddings[row][kept], own.embeddings[0])
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        assert prompt.tolist() == examples[n].prompt_ids
        assert batch["top_ids"][row].shape[0] == batch["prompt_ids"].shape[1] - 1
        with torch.no_grad():
            expected = mot(own.source_states, own.embeddings)
        native_keys, native_values = split_layers(states, mot.target_geometry, range(3))
        for layer in range(3):
            assert torch.allclose(output.key_states[layer][row][:, kept], expected.key_states[layer][0], atol=1e-3)
            assert torch.allclose(keys[layer][row][:, kept], native_keys[layer][0], atol=1e-4)
            assert torch.allclose(values[layer][row][:, kept], native_values[layer][0], atol=1e-4)


def test_regression_trains_without_a_language_model(captured, pair):
    mot = make_translator(pair)
    dataset, table = StatesDataset(captured, mot.config), pair["target"].get_input_embeddings()
    optimizer = torch.optim.Adam(mot.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        for batch in DataLoader(dataset, batch_size=7, collate_fn=collate):
            inputs = translation_inputs(batch, mot.config, table)
            output = mot(inputs.source_states, inputs.embeddings)
            native = split_layers(batch["native_states"].float(), dataset.target_geometry, dataset.target_layers)
            counted = inputs.target_mask * (positions_from_mask(inputs.target_mask) >= 1)
            loss, _ = weighted_sum(LossInputs(output.key_states, output.value_states, *native, counted), {"cc": 1.0})
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_translators_of_fewer_source_layers_read_theirs(captured, pair):
    both = StatesDataset(captured)
    last = StatesDataset(captured, make_translator(pair, source_layers=[2]).config)
    none = StatesDataset(captured, make_translator(pair, source_layers=[]).config)
    width = last[4]["source_states"].shape[1]
    assert torch.equal(both[4]["source_states"][:, -width:], last[4]["source_states"])
    assert "source_states" not in none[4]
    assert torch.equal(none[4]["native_states"], both[4]["native_states"])
    with pytest.raises(ValueError, match="holds source layers \\[0, 2\\], but the translator reads .*\\[1\\]"):
        StatesDataset(captured, make_translator(pair, source_layers=[1]).config)
    with pytest.raises(ValueError, match="`table` is required"):
        translation_inputs(collate([both[0]]), make_translator(pair).config)


def test_dataset_travels_to_workers(captured):
    dataset = StatesDataset(captured)
    other = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(dataset[9]["native_states"], other[9]["native_states"])
    with pytest.raises(IndexError, match="There are 14 examples, got 14"):
        dataset[14]


def test_command_captures_goes_on_and_reports(tmp_path, pair, capsys):
    save_pair(pair, tmp_path)
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(make_documents(8)), encoding="utf-8")
    command = [
        *("capture", "--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")),
        *("--text", str(tmp_path / "text.txt"), "--source-layers", "0", "2", "--out", str(tmp_path / "states")),
        *("--length", "32", "--context", "8", "16", "--copy-share", "0.5", "--top-logits", "4"),
    ]
    assert main([*command, "--max-bytes", "60kB"]) == 0
    assert "stopped at --max-bytes" in capsys.readouterr().out
    assert main([*command, "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    dataset = StatesDataset(tmp_path / "states")
    assert report["complete"] and report["examples"] == len(dataset) == report["documents"]["examples"] > 10
    assert report["documents"]["copies"] > 0
    assert str(tmp_path) not in (tmp_path / "out.json").read_text() + (tmp_path / "states/index.json").read_text()
    command[command.index("2")] = "7"
    assert main(command) == 1
    assert "`--source-layers` must lie in 0..2, got [0, 7]" in capsys.readouterr().err


def test_training_on_text_tells_its_lengths_though_it_is_evaluated_on_states(pair, captured, mot, tmp_path):
    args = make_args(tmp_path, losses="cc")
    settings = [
        make_trainer(pair, args, eval_dataset=StatesDataset(captured, mot.config), **change).report()["training"]
        for change in ({}, {"train_dataset": StatesDataset(captured, mot.config)})
    ]
    assert settings[0]["settings"]["length"] == args.length and "length" not in settings[1]["settings"]
