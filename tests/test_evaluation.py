import argparse
import copy
import json

import pytest
import torch
from conftest import changed, make_documents, make_model, make_pair, make_tokenizer, make_translator, save_pair

from hf_mot import MoTModel
from hf_mot.evaluation import DEFAULT_ARMS, Example, evaluate, save_report
from hf_mot.evaluation.answers import continuation_nll
from hf_mot.evaluation.context_nll import compare_arms
from hf_mot.evaluation.run import Run
from hf_mot.evaluation.windows import check_context_length, cut_windows

CONTEXT = 24
DOCUMENTS = make_documents(8, seed=1)  # none of their contexts is cut within a character


@pytest.fixture(scope="module")
def pair():
    """Arguments of `evaluate` for a tiny Llama → Gemma-3 pair with different tokenizers."""
    pair = make_pair()
    return {
        **pair,
        "translator": make_translator(pair, rank=12),
        "no_source": make_translator(pair, source_layers=[], rank=12),
        "context_length": CONTEXT,
        "cost": False,
        "progress": False,
    }


def full_forward_nll(target, context_ids, continuation_ids):
    """NLL of y_2 .. y_65 by one plain forward over context and continuation, written out."""
    with torch.no_grad():
        logits = target(input_ids=torch.tensor([context_ids + continuation_ids])).logits[0].log_softmax(-1)
    start = len(context_ids)
    return -sum(logits[start + i - 1, continuation_ids[i]] for i in range(1, 65)).item() / 64


def columns(report, *arms):
    return [torch.tensor([row[arm] for row in report["documents"]]) for arm in arms]


def windows_of(pair, documents, **kwargs):
    prefix_ids = pair["translator"].config.target["prefix_ids"]
    return cut_windows(
        documents, pair["target_tokenizer"], prefix_ids=prefix_ids, context_length=CONTEXT, **kwargs
    ).windows


def test_window_is_bos_and_the_start_of_the_document(pair):
    documents, tokenizer = DOCUMENTS[:3], pair["target_tokenizer"]
    for window in windows_of(pair, documents):
        ids = tokenizer(documents[window.document], add_special_tokens=False)["input_ids"]
        assert window.context_ids == [tokenizer.bos_token_id, *ids[: CONTEXT - 1]]
        assert window.continuation_ids == ids[CONTEXT - 1 : CONTEXT + 64]
        assert documents[window.document].startswith(window.text)
        assert tokenizer.decode(window.context_ids[1:]) == window.text


def test_order_is_seeded_and_limit_cuts_it(pair):
    order = [window.document for window in windows_of(pair, DOCUMENTS, seed=3)]
    assert sorted(order) == list(range(8))
    assert [window.document for window in windows_of(pair, DOCUMENTS, seed=3, limit=5)] == order[:5]
    assert [window.document for window in windows_of(pair, DOCUMENTS, seed=4)] != order


def test_short_documents_and_split_characters_are_counted():
    # Without merges a token is a byte, and the context of 8 is BOS and 7 bytes: half of the fourth "é".
    documents = ["a" * 80, "a" * 71, "short", "", "é" * 60]
    found = cut_windows(documents, make_tokenizer(), prefix_ids=[0], context_length=8)
    assert [window.document for window in found.windows] == [0]
    assert (found.too_short, found.split_character) == (3, 1)


def test_special_token_spelled_out_in_a_document_stays_text(pair):
    document = "a <bos> b " + DOCUMENTS[0]
    (window,) = windows_of(pair, [document])
    assert window.text.startswith("a <bos> b ")
    assert window.context_ids.count(pair["target_tokenizer"].bos_token_id) == 1


def test_exactly_long_enough_is_long_enough():
    found = cut_windows(["a" * (7 + 65)], make_tokenizer(), prefix_ids=[0], context_length=8)
    assert len(found) == 1


@pytest.mark.parametrize("context_length", [7, 0, -3, 24.0, True, "24"])
def test_context_that_is_no_sensible_integer_is_refused(context_length):
    with pytest.raises(ValueError, match="`context_length` must be an integer of at least 8 tokens"):
        check_context_length(context_length, None)


def test_context_past_the_targets_positions_is_refused(pair):
    check_context_length(512 - 65, 512)
    with pytest.raises(ValueError, match="512 positions for the continuation, got 448. Use at most 447"):
        evaluate(documents=DOCUMENTS[:2], **{**pair, "context_length": 448})


def test_native_and_no_context_equal_a_plain_forward(pair):
    documents = DOCUMENTS[:3]
    report = evaluate(documents=documents, arms=["native", "no_context"], **pair)
    native, no_context = columns(report, "native", "no_context")
    for row, window in enumerate(windows_of(pair, documents)):
        expected = full_forward_nll(pair["target"], window.context_ids, window.continuation_ids)
        assert native[row].item() == pytest.approx(expected, abs=1e-4)
        expected = full_forward_nll(pair["target"], window.context_ids[:1], window.continuation_ids)
        assert no_context[row].item() == pytest.approx(expected, abs=1e-4)
    assert report["arms"]["native"]["nll"] == pytest.approx(native.mean().item(), abs=1e-6)


def test_target_without_bos_starts_from_an_empty_cache():
    tokenizer = make_tokenizer(bos=None)
    target = make_model("gpt2", tokenizer)
    documents = DOCUMENTS[:2]
    report = evaluate(
        MoTModel.identity(target, tokenizer).eval(),
        documents,
        source=target,
        target=target,
        source_tokenizer=tokenizer,
        target_tokenizer=tokenizer,
        arms=["native", "no_context", "identity"],
        context_length=CONTEXT,
        cost=False,
        progress=False,
    )
    for row in report["documents"]:
        ids = tokenizer(documents[row["document"]])["input_ids"]
        continuation_ids = ids[CONTEXT : CONTEXT + 65]
        assert row["native"] == pytest.approx(full_forward_nll(target, ids[:CONTEXT], continuation_ids), abs=1e-4)
        # y_1 alone in front of what is scored, which therefore starts at position 0.
        assert row["no_context"] == pytest.approx(full_forward_nll(target, [], continuation_ids), abs=1e-4)
        assert row["identity"] == pytest.approx(row["native"], abs=1e-4)


def test_identity_equals_native_while_no_context_differs(pair):
    report = evaluate(documents=DOCUMENTS[:3], arms=["native", "no_context", "identity"], **pair)
    native, no_context, identity = columns(report, "native", "no_context", "identity")
    torch.testing.assert_close(identity, native, atol=1e-4, rtol=0)
    assert (no_context - native).abs().min() > 1e-3


def test_wrong_document_is_the_next_one_in_the_seeded_order(pair):
    documents = DOCUMENTS[:4]
    report = evaluate(documents=documents, arms=["translated", "wrong_document"], seed=5, **pair)
    windows = windows_of(pair, documents, seed=5)
    wrong, native_wrong, translated = columns(report, "wrong_document", "native_wrong_document", "translated")
    assert (wrong - translated).abs().min() > 1e-3
    for row, window in enumerate(windows):
        other = windows[(row + 1) % len(windows)]
        expected = full_forward_nll(pair["target"], other.context_ids, window.continuation_ids)
        assert native_wrong[row].item() == pytest.approx(expected, abs=1e-4)
        cache = pair["translator"].handoff(
            other.text,
            source=pair["source"],
            target=pair["target"],
            source_tokenizer=pair["source_tokenizer"],
            target_tokenizer=pair["target_tokenizer"],
            target_input_ids=torch.tensor([other.context_ids]),
        )
        continuation_ids = torch.tensor([window.continuation_ids])
        nll = continuation_nll(pair["target"], cache.fork(), continuation_ids)
        assert wrong[row].item() == pytest.approx(nll.item(), abs=1e-4)


def test_batch_size_changes_nothing(pair):
    documents = DOCUMENTS[:5]
    one = evaluate(documents=documents, batch_size=1, **pair)
    four = evaluate(documents=documents, batch_size=4, **pair)
    arms = one["arms"]
    assert set(arms) == {*DEFAULT_ARMS, "native_wrong_document"}
    torch.testing.assert_close(torch.stack(columns(one, *arms)), torch.stack(columns(four, *arms)), atol=1e-4, rtol=0)


def test_report_follows_the_contract(pair, tmp_path):
    documents = [*DOCUMENTS[:3], "too short"]
    report = evaluate(documents=documents, **{**pair, "cost": True, "cost_context_length": 40})
    assert report["pair"] == {"source": "llama", "target": "gemma3_text"}
    assert report["translator"]["method"] == "reduced_rank"
    assert report["translator"]["source_layers"] == [0, 2]
    assert "id" not in report["translator"]  # it has none: absent, not null
    assert (report["n"], report["skipped"], report["seed"]) == (3, {"too_short": 1}, 0)
    assert set(report["versions"]) == {"hf_mot", "torch", "transformers", "python"}
    cost = report["cost"]
    assert cost["time_ratio"] == pytest.approx(cost["handoff_s"] / cost["prefill_s"])
    assert 0 < cost["time_ratio_low"] <= cost["time_ratio"] <= cost["time_ratio_high"]
    assert cost["ttft_native_s"] > cost["prefill_s"] and cost["ttft_translated_s"] > cost["handoff_s"]
    # 40 tokens, 3 layers, keys and values, 1 head of 16 channels, 4 bytes
    assert (cost["context_length"], cost["kv_bytes"]) == (40, 40 * 3 * 2 * 16 * 4)
    assert cost["translator_bytes"] == report["translator"]["bytes"]
    assert 0 < cost["flops_ratio"] < 1
    assert cost["peak_bytes"] > cost["kv_bytes"] and cost["prefill_peak_bytes"] > 0
    save_report(report, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == report
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_metrics_are_taken_from_the_arms():
    means = {"native": 2, "no_context": 4, "translated": 2.5, "no_source": 3, "wrong_document": 5}
    means |= {"native_wrong_document": 6, "identity": 2}

    def figures():
        spread = torch.linspace(-0.1, 0.1, 6, dtype=torch.float64)
        return compare_arms({arm: mean + spread for arm, mean in means.items()}, seed=0)

    report = figures()
    assert report["recovery"]["value"] == pytest.approx(1.5 / 2)
    assert report["content_recovery"]["value"] == pytest.approx(2.5 / 4)
    assert report["source_value"]["value"] == pytest.approx(0.5 / 1)
    assert report["arms"]["no_source"]["recovery"]["value"] == pytest.approx(1 / 2)
    assert "recovery" not in report["arms"]["native"] and "notes" not in report
    means["no_context"] = 1.9  # context hurts: nothing to recover
    report = figures()
    assert "recovery" not in report and "recovery" not in report["arms"]["identity"]
    assert len(report["notes"]) == 1 and "not clearly positive over 6 documents" in report["notes"][0]


def test_only_the_arms_asked_for_are_run(pair):
    report = evaluate(documents=DOCUMENTS[:2], arms=["native", "native"], **pair)
    assert list(report["arms"]) == ["native"]
    assert not {"recovery", "content_recovery", "source_value", "cost", "notes"} & set(report)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ["native", "translatd"]}, "'translatd', which is no arm. Did you mean translated"),
        ({"arms": []}, "`arms` is empty. Choose from native"),
        (
            {"no_source": None, "arms": ["no_source"]},
            "`no_source` is None, but the arm no_source needs the translator's twin",
        ),
        ({"source": None}, "`source` is None, but this translator reads a source"),
        ({"batch_size": 0}, "`batch_size` must be at least 1 document, got 0"),
        ({"limit": 0}, "`limit` must be at least 1 document, or None for all, got 0"),
        ({"limit": 1}, r"wrong_document.*needs at least 2 documents, got 1"),
        ({"documents": ["short"] * 3}, r"no document of 24 \+ 65 target tokens: 3 of 3 are shorter"),
        ({"cost": True, "cost_context_length": 440}, "`cost_context_length` is 440 tokens, more than all documents"),
        ({"replay": "some"}, "`replay` must be one of none"),
    ],
)
def test_bad_arguments_are_named(pair, change, message):
    with pytest.raises(ValueError, match=message):
        evaluate(**{"documents": DOCUMENTS[:2], **pair, **change})


def test_one_string_is_not_taken_for_documents(pair):
    with pytest.raises(TypeError, match="`documents` must be an iterable of strings"):
        evaluate(documents="one long text", **pair)


def test_model_in_training_mode_is_refused(pair):
    target = make_model("gemma3", pair["target_tokenizer"]).train()
    with pytest.raises(ValueError, match=r"`target` is in training mode.*target.eval\(\)"):
        evaluate(documents=DOCUMENTS[:2], **{**pair, "target": target})


@pytest.mark.parametrize("side", ["source", "target"])
def test_model_of_another_pair_is_refused(pair, side):
    other = make_model({"source": "llama", "target": "gemma3"}[side], pair[f"{side}_tokenizer"], seed=9).eval()
    with pytest.raises(ValueError, match=f"`{side}` has other weights"):
        evaluate(documents=DOCUMENTS[:2], **{**pair, side: other})


@pytest.mark.parametrize("side", ["source", "target"])
def test_tokenizer_of_another_pair_is_refused(pair, side):
    other = pair[{"source": "target", "target": "source"}[side] + "_tokenizer"]
    with pytest.raises(ValueError, match=f"`{side}_tokenizer` does not match the translator's contract"):
        evaluate(documents=DOCUMENTS[:2], **{**pair, f"{side}_tokenizer": other})
    with pytest.raises(ValueError, match=f"`{side}_tokenizer` is required"):
        evaluate(documents=DOCUMENTS[:2], **{**pair, f"{side}_tokenizer": None})


def test_twin_of_another_pair_is_refused(pair):
    other = make_model("gemma3", pair["target_tokenizer"], seed=9).eval()
    with pytest.raises(ValueError, match="`no_source` reads the source's layers .* it is no control"):
        evaluate(documents=DOCUMENTS[:2], **{**pair, "no_source": pair["translator"]})
    twin = make_translator({**pair, "target": other}, source_layers=[])
    with pytest.raises(ValueError, match="`no_source` is the twin of another pair: `target` has other weights"):
        evaluate(documents=DOCUMENTS[:2], **{**pair, "no_source": twin})


def test_nll_that_is_not_finite_names_arm_and_document(pair):
    translator = make_translator(pair, source_layers=[0])
    with torch.no_grad():
        translator.translator.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="The arm translated gave an NLL of nan for document"):
        evaluate(documents=DOCUMENTS[:2], **{**pair, "translator": translator, "arms": ["translated"]})


def test_report_with_nan_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_report({"n": float("nan")}, tmp_path / "out.json")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory):
    """A pair, its translator with twin and a text file on disk."""
    folder = tmp_path_factory.mktemp("command")
    save_pair(pair, folder)
    pair["translator"].save_pretrained(folder / "mot")
    pair["no_source"].save_pretrained(folder / "mot" / "no_source")
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(DOCUMENTS[:3]), encoding="utf-8")
    return folder


def run_command(folder, *arguments, translator="mot"):
    from hf_mot.cli.evaluate import add_arguments, run

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    argv = [str(folder / translator), "--text", str(folder / "text.txt"), *arguments]
    return run(argparse.Namespace(**vars(parser.parse_args(argv)), argv=["evaluate", *argv]))


def test_command_prints_a_table_and_writes_the_json(folder, tmp_path, capsys):
    out = tmp_path / "out.json"
    models = ["--source", str(folder / "source"), "--target", str(folder / "target")]
    assert run_command(folder, *models, "--context", "24", "--json", str(out)) == 0
    report = json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert report["command"].startswith("hf-mot evaluate mot --text text.txt --source source")
    for arm, figures in report["arms"].items():
        assert f"{arm:<23}{figures['nll']:>7.4f}" in printed
    assert "3 documents, 24 tokens of context" in printed
    assert "handoff / prefill" in printed


def test_command_asks_for_models_that_are_not_recorded(folder):
    with pytest.raises(ValueError, match="`--source` is needed: the translator was made with a local source"):
        run_command(folder)


def test_command_without_twin_names_where_it_was_looked_for(folder, pair):
    pair["translator"].save_pretrained(folder / "alone")
    with pytest.raises(ValueError, match=r"no twin in .*alone/no_source\. Fit again .* --arms without no_source"):
        run_command(folder, "--arms", "native,no_source", translator="alone")


def test_bad_settings_are_found_before_a_model_is_loaded(folder):
    with pytest.raises(ValueError, match="Did you mean no_context"):
        run_command(folder, "--arms", "native,nocontext", "--source", "absent", "--target", "absent")
    with pytest.raises(ValueError, match="Use at most 447"):
        run_command(folder, "--context", "1024", "--source", "absent", "--target", "absent")


def test_json_into_a_missing_folder_is_found_first(folder, tmp_path):
    with pytest.raises(ValueError, match="`--json` names a file in a folder that does not exist"):
        run_command(folder, "--json", str(tmp_path / "absent" / "out.json"), translator="absent")


def test_context_longer_than_the_source_is_skipped_and_counted(pair):
    # 24 target tokens, of which each may be several of the source's, which takes a byte for a token.
    lengths = {
        document: len(pair["source_tokenizer"](windows_of(pair, [document])[0].text)["input_ids"])
        for document in DOCUMENTS
    }
    longest = max(lengths.values())
    translator = copy.deepcopy(pair["translator"])
    contract = translator.config.source
    translator.config.source = changed(contract, ["geometry", "max_positions"], longest - 1)
    translator = MoTModel(translator.config).eval()
    translator.load_state_dict(pair["translator"].state_dict())
    source = copy.deepcopy(pair["source"])
    source.config.max_position_embeddings = longest - 1
    report = evaluate(documents=DOCUMENTS, **{**pair, "translator": translator, "source": source})
    skipped = sum(length == longest for length in lengths.values())
    assert "missing" not in report
    assert (report["n"], report["skipped"]) == (8 - skipped, {"too_long_for_source": skipped})


def test_all_questions_are_checked_before_anything_is_measured(pair, monkeypatch):
    monkeypatch.setattr(Run, "measure_documents", lambda *args: pytest.fail("measured"))
    long = Example("a", "river stone " * 60, "river?", ("stone",))
    with pytest.raises(ValueError, match="No question of squad fits"):
        evaluate(documents=DOCUMENTS, tasks={"squad": [long]}, **pair)
