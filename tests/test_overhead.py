"""The example that measures what an evaluation costs beside its models, on tiny ones."""

import json
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import make_documents, make_model, make_tokenizer, save_pair
from evaluation_pair import make_examples, make_pair, write_examples

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "harness_overhead.py")


def test_overhead_is_what_the_models_leave_of_the_time(tmp_path, monkeypatch, capsys):
    pair = make_pair()
    save_pair(pair, tmp_path)
    pair["translator"].save_pretrained(tmp_path / "mot")
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(make_documents(2)), encoding="utf-8")
    write_examples(tmp_path / "data", "squad", make_examples(2))
    argv = [str(tmp_path / "mot"), "--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")]
    argv += ["--text", str(tmp_path / "text.txt"), "--data", str(tmp_path / "data"), "--tasks", "squad"]
    argv += ["--context", "24", "--limit", "2", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", [EXAMPLE, *argv])
    runpy.run_path(EXAMPLE, run_name="__main__")

    result = json.loads((tmp_path / "out.json").read_text())
    assert result["n"] == {"context_nll": 2, "squad": 2}
    assert set(result["model_s"]) == {"source", "target", "translator"} and min(result["model_s"].values()) > 0
    inside = sum(result["model_s"].values())
    assert result["harness_share"] == pytest.approx(1 - inside / result["wall_s"]) and 0 < result["harness_share"] < 1
    assert result["harness_over_models"] == pytest.approx((result["wall_s"] - inside) / inside)
    assert str(tmp_path) not in result["command"] and "outside the models:" in capsys.readouterr().out


def test_nested_calls_count_once_and_hooks_are_gone_afterwards():
    clock = runpy.run_path(EXAMPLE)["Clock"]()
    tokenizer = make_tokenizer()
    model = make_model("llama", tokenizer)
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda *args: time.sleep(0.02))
    ids = torch.tensor([[5, 6, 7]])
    seconds = []
    with clock.on({"target": model}):
        for work in (
            lambda: model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0),  # decoder in model in it
            lambda: model.model(ids),
            lambda: time.sleep(0.05),
        ):
            before, start = clock.seconds["target"], time.perf_counter()
            work()
            seconds.append((clock.seconds["target"] - before, time.perf_counter() - start))
    (generated, generate_wall), (decoded, decode_wall), (slept, _) = seconds
    assert 0.06 <= generated <= generate_wall and 0.02 <= decoded <= decode_wall and slept == 0
    total = clock.seconds["target"]
    model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
    assert clock.seconds["target"] == total and "generate" not in vars(type(model))
