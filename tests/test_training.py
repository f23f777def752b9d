"""Training by MoTTrainer: what is learnt, what is not touched, and what the losses are."""

import json
import math

import peft
import pytest
import torch
from accelerate import Accelerator
from conftest import make_documents, make_own, make_pair, make_translator
from safetensors.torch import load_file
from training_pair import make_args, make_trainer
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_mot import MoTConfig, MoTModel
from hf_mot.data.capture import capture_states
from hf_mot.data.states import StatesDataset
from hf_mot.evaluation import evaluate
from hf_mot.evaluation.answers import token_losses
from hf_mot.rows_mot import left_pad
from hf_mot.training import MoTTrainingArguments, PairCollator, TextDataset, TrainingExample
from hf_mot.training.checkpoints import last_checkpoint
from hf_mot.training.routing import RouterUsage

# peft 0.21 asks transformers for names that it has since renamed.
pytestmark = pytest.mark.filterwarnings("default::FutureWarning")


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def uneven(pair):
    """Four examples with contexts and prompts of unequal length."""
    tokenizer, examples = pair["target_tokenizer"], []
    for index, document in enumerate(make_documents(4)):
        ids = tokenizer(document, add_special_tokens=False)["input_ids"]
        cut, end = 12 + 3 * index, 18 + 8 * index
        while "\ufffd" in tokenizer.decode(ids[:cut]):
            cut += 1
        context_ids = [tokenizer.bos_token_id, *ids[:cut]]
        examples.append(TrainingExample(f"file:{index}", tokenizer.decode(ids[:cut]), context_ids, ids[cut : end + 8]))
    return examples


def weights_of(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_loss_falls_and_the_language_models_stay_as_they_were(pair, tmp_path):
    before = {side: weights_of(pair[side]) for side in ("source", "target")}
    args = make_args(tmp_path, max_steps=8, learning_rate=1e-2, save_strategy="steps", save_steps=8)
    held_out = TextDataset.from_args(make_documents(4, seed=5), pair["target_tokenizer"], args, passes=1, limit=6)
    trainer = make_trainer(pair, args, eval_dataset=held_out)
    start = trainer.evaluate()
    trainer.train()
    end = trainer.evaluate()
    assert end["eval_loss"] < 0.8 * start["eval_loss"]
    assert end["eval_loss"] == pytest.approx(end["eval_cc_loss"] + end["eval_pl_loss"], rel=1e-2)
    for side in ("source", "target"):
        assert same(weights_of(pair[side]), before[side])
        assert not any(weight.requires_grad or weight.grad is not None for weight in pair[side].parameters())
    # The checkpoint is a translator, and holds nothing else.
    saved = MoTModel.from_pretrained(tmp_path / "checkpoint-8")
    assert same(saved.state_dict(), trainer.translator.state_dict())
    weights = tmp_path / "checkpoint-8" / "model.safetensors"
    assert load_file(weights).keys() == trainer.translator.state_dict().keys()
    assert weights.stat().st_size < 4 * trainer.translator.num_parameters() + 4096
    training = saved.fit_report["training"]
    logged = [logs for logs in trainer.state.log_history if "loss" in logs]
    assert training["steps"] == 8 and training["tokens"] > 0 and training["seconds"] > 0
    assert training["losses"] == {name: logged[-1][f"{name}_loss"] for name in ("cc", "pl")}
    assert logged[-1]["loss"] == pytest.approx(sum(training["losses"].values()), rel=1e-4)


@pytest.mark.parametrize("losses", ["pl", "cc", "cr", "distill", "key_attention", "cc_hidden"])
@pytest.mark.parametrize("plan", ["none", "full:1-2", "bottom:1+tokens:2"])
def test_gradient_of_each_loss_reaches_the_translator(pair, uneven, tmp_path, losses, plan):
    if losses == "cc_hidden" and plan != "full:1-2":
        with pytest.raises(ValueError, match="`losses` holds cc_hidden.* needs a `replay` .* like full"):
            make_trainer(pair, make_args(tmp_path, losses=losses, replay=plan))
        return
    trainer = make_trainer(pair, make_args(tmp_path, losses=losses, replay=plan))
    trainer.compute_loss(trainer.model, trainer.data_collator(uneven)).backward()
    for name, weight in trainer.model.named_parameters():
        assert weight.grad is not None and weight.grad.abs().max() > 0, name


def test_plan_that_leaves_nothing_to_train_is_refused(pair, tmp_path):
    with pytest.raises(ValueError, match="`replay` bottom:3 runs every layer natively: nothing is left to train"):
        make_trainer(pair, make_args(tmp_path, replay="bottom:3"))


@pytest.mark.parametrize("kind", ["text", "examples", "states"])
def test_plan_that_leaves_a_context_nothing_to_translate_is_refused(pair, uneven, tmp_path, kind):
    """The shortest context has 12 tokens and a BOS."""
    model = make_translator(pair)
    text = {"length": 40, "context_length": "13-20"}
    text = TextDataset.from_args(make_documents(9), pair["target_tokenizer"], make_args(tmp_path, **text))
    if kind == "states":
        capture_states(uneven, model, **pair, folder=tmp_path / "states", progress=False)
    data = {"text": text, "examples": uneven}.get(kind) or StatesDataset(tmp_path / "states", model.config)
    message = "`replay` tokens:12 leaves nothing to translate of a context of 13 .*Choose tokens:11 or fewer"
    for side in ("train_dataset", "eval_dataset"):
        with pytest.raises(ValueError, match=message):
            make_trainer(pair, make_args(tmp_path, replay="tokens:12"), model, **{"train_dataset": None, side: data})
    make_trainer(pair, make_args(tmp_path, replay="tokens:11"), model, train_dataset=data).train()
    with pytest.raises(ValueError, match="of a context of 64 .*Choose tokens:62 or fewer"):  # the default
        plain = TextDataset(make_documents(3), pair["target_tokenizer"])
        make_trainer(pair, make_args(tmp_path, replay="tokens:63"), model, train_dataset=plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_source": "translator"}, r"`no_source` reads the source's layers \[0, 2\]: it is no control"),
        ({"no_source": "another"}, "`no_source` is the twin of another pair: `target` does not match"),
        ({"no_source": "twin", "eval_documents": None}, "`no_source` has no effect without `eval_documents`"),
        ({"source": None}, "`source` is required to measure recovery"),
        ({"target": None}, "`target` is required to measure recovery"),
        ({"args": {"eval_context_length": 4}}, "`eval_context_length`: .* at least 8 tokens, got 4"),
        ({"args": {"replay": "tokens:10"}}, "`replay` is tokens:10, but a context of 10 target tokens has 9"),
    ],
)
def test_what_cannot_measure_recovery_is_refused(pair, uneven, tmp_path, change, message):
    other, twins = make_own("gpt2"), {"translator": make_translator(pair), None: None}
    twins |= {"another": make_translator(other, ()), "twin": make_translator(pair, ())}
    states, table = {"folder": tmp_path / "states", "progress": False}, pair["target"].get_input_embeddings()
    capture_states(uneven, twins["translator"], **pair, **states)
    captured = StatesDataset(tmp_path / "states", twins["translator"].config)
    given = {"eval_documents": make_documents(4), "train_dataset": captured, **change}
    given["no_source"] = twins[change.get("no_source")]
    args = make_args(tmp_path, **{"losses": "cc", "eval_context_length": 10} | given.pop("args", {}))
    with pytest.raises(ValueError, match=message):
        make_trainer({**pair, **given}, args, twins["translator"], target_embeddings=table)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("plan", ["none", "full", "bottom:1+tokens:2"])
def test_a_perfect_translation_costs_nothing(uneven, tmp_path, family, plan):
    """The identity translator: both readings of the target must be one, pads and prompts of any length included."""
    own = make_own(family)
    identity = MoTModel.identity(own["target"], own["target_tokenizer"])
    args = make_args(tmp_path, losses="cc=1,distill=1,key_attention=1", replay=plan, per_device_eval_batch_size=4)
    found = make_trainer(own, args, identity, train_dataset=uneven, eval_dataset=uneven).evaluate()
    assert found["eval_loss"] < 1e-4
    wrong = make_trainer(
        own, args, make_translator(own, source_layers=(0, 1, 2)), train_dataset=uneven, eval_dataset=uneven
    )
    found = wrong.evaluate()
    assert min(found[f"eval_{name}_loss"] for name in ("cc", "distill", "key_attention")) > 1e-2


def test_prompt_loss_is_that_of_the_prompt_after_a_handoff(pair, uneven, tmp_path):
    trainer = make_trainer(pair, make_args(tmp_path, losses="pl"))
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(uneven))
    ids, mask = left_pad([example.context_ids for example in uneven])
    cache = trainer.translator.handoff(
        [example.text for example in uneven], **pair, target_input_ids=ids, target_attention_mask=mask
    )
    expected = torch.cat(token_losses(pair["target"], cache, [example.prompt_ids for example in uneven]))
    assert loss.item() == pytest.approx(expected.mean().item(), rel=1e-5)


@pytest.mark.parametrize("position_free", [True, False])
@pytest.mark.parametrize("kind", ["two tokenizers", "one tokenizer", "no source"])
def test_batches_hold_what_a_handoff_finds_out(pair, uneven, tmp_path, kind, position_free):
    own = make_own("gemma3") if kind == "one tokenizer" else pair
    model = make_translator(own, source_layers=() if kind == "no source" else (0, 2))
    model.config.position_free = position_free
    trainer = make_trainer(own, make_args(tmp_path), model, train_dataset=uneven)
    read = trainer.comparison.inputs(model, trainer.data_collator(uneven))
    ids, mask = left_pad([example.context_ids for example in uneven])
    texts = [example.text for example in uneven]
    cache, source_ids, source_mask = model.read_source(texts, own["source"], own["source_tokenizer"])
    expected = model.prepare(
        cache,
        source_ids,
        source_attention_mask=source_mask,
        source_tokenizer=own["source_tokenizer"],
        target=own["target"],
        target_tokenizer=own["target_tokenizer"],
        target_input_ids=ids,
        target_attention_mask=mask,
        text=texts,
    )
    for name in ("source_states", "embeddings", "target_ids", "target_mask"):
        found, wanted = getattr(read, name), getattr(expected, name)
        assert (found is None and wanted is None) or torch.allclose(found, wanted, atol=1e-5), name


def test_batches_made_by_a_worker_are_the_same(pair, tmp_path):
    ends = []
    for workers in (0, 1):
        trainer = make_trainer(pair, make_args(tmp_path, max_steps=2, dataloader_num_workers=workers))
        trainer.train()
        ends.append(weights_of(trainer.translator))
    assert same(*ends)


def test_batches_without_the_sources_side_are_refused(pair, uneven, tmp_path):
    trainer = make_trainer(pair, make_args(tmp_path), data_collator=PairCollator(), train_dataset=uneven)
    with pytest.raises(ValueError, match=r"`data_collator` must give `source_ids`.* got target_ids.* Use Pair"):
        trainer.train()
    trainer = make_trainer(pair, make_args(tmp_path), train_dataset=uneven, source=None)
    with pytest.raises(ValueError, match="`source` is required: the translator reads"):
        trainer.train()


@pytest.mark.parametrize("top_logits", [0, 300, None])
@pytest.mark.parametrize("plan", ["none", "full:1-2", "bottom:1+tokens:2"])
def test_captured_states_give_the_losses_of_live_ones(pair, uneven, tmp_path, plan, top_logits):
    model = make_translator(pair)
    top_logits = top_logits and min(top_logits, len(pair["target_tokenizer"]))
    states = {"folder": tmp_path / "states", "dtype": "float32", "top_logits": top_logits, "progress": False}
    capture_states(uneven, model, **pair, **states)
    losses = "cc=1,cr=1,pl=1,distill=1,key_attention=1" if top_logits == 0 else "cc=1,cr=1,pl=1,distill=1"
    args = make_args(tmp_path, losses=losses, replay=plan, per_device_eval_batch_size=4)
    live = make_trainer(pair, args, model, train_dataset=uneven, eval_dataset=uneven).evaluate()
    captured = StatesDataset(tmp_path / "states", model.config)
    data = {"train_dataset": captured, "eval_dataset": captured, "source": None, "source_tokenizer": None}
    found = make_trainer(pair, args, model, **data).evaluate()
    for name in args.losses:
        assert found[f"eval_{name}_loss"] == pytest.approx(live[f"eval_{name}_loss"], rel=1e-3, abs=1e-4)


def test_states_are_regressed_on_without_any_language_model(pair, uneven, tmp_path):
    model = make_translator(pair)
    capture_states(uneven, model, **pair, folder=tmp_path / "states", top_logits=0, progress=False)
    nobody = dict.fromkeys(pair)
    data = {"train_dataset": StatesDataset(tmp_path / "states", model.config), **nobody}
    args = make_args(tmp_path, losses="cc", max_steps=6, learning_rate=1e-2)
    trainer = make_trainer(pair, args, model, target_embeddings=pair["target"].get_input_embeddings(), **data)
    trainer.train()
    logged = [logs["cc_loss"] for logs in trainer.state.log_history if "loss" in logs]
    assert logged[-1] < 0.9 * logged[0]
    with pytest.raises(ValueError, match="`target` is required: pl cannot be trained on without running it"):
        make_trainer(pair, make_args(tmp_path, losses="cc=1,pl=1"), model, **data)
    with pytest.raises(ValueError, match="`target` is required: text cannot"):
        make_trainer(pair, args, model, **{**data, "train_dataset": uneven})


def test_captured_states_without_a_compared_layer_are_refused(pair, uneven, tmp_path):
    model, states = make_translator(pair), {"folder": tmp_path / "states", "top_logits": 0, "progress": False}
    capture_states(uneven, model, **pair, **states, target_layers=[1, 2])
    captured = StatesDataset(tmp_path / "states", model.config)
    data = {"train_dataset": captured, "eval_dataset": captured}
    with pytest.raises(ValueError, match=r"hold the target's layers \[1, 2\], but.* the losses compare \[0\] too"):
        make_trainer(pair, make_args(tmp_path, losses="cc"), model, **data).evaluate()
    args = make_args(tmp_path, losses="cc", replay="full:1-2")
    assert make_trainer(pair, args, model, **data).evaluate()["eval_cc_loss"] > 0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 1.0], "`layer_weights` must have a weight for each of the 3 layers, got 2"),
        ([1.0] * 4, "`layer_weights` must have a weight for each of the 3 layers, got 4"),
        ([1.0, -1.0, 1.0], "`layer_weights` must be finite and 0 or more, got -1.0 for layer 1"),
        (torch.tensor([1.0, 1.0, float("nan")]), "`layer_weights` must be finite and 0 or more, got nan for layer 2"),
    ],
)
def test_impossible_layer_weights_are_refused(pair, tmp_path, weights, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(pair, make_args(tmp_path, losses="cc", replay="full:1-2"), layer_weights=weights)
    held_out = {"layer_weights": torch.tensor([[1.0, 2.0]] * 3), "train_dataset": None}
    trainer = make_trainer(pair, make_args(tmp_path, losses="cc"), **held_out)
    assert json.loads(json.dumps(trainer.report()))["training"]["settings"]["layer_weights"] == [[1.0, 2.0]] * 3


def test_accumulated_batches_equal_one_large_batch(pair, uneven, tmp_path):
    found = {}
    for size in (1, 4):
        args = make_args(
            tmp_path,
            max_steps=2,
            losses="cc=1,pl=1,distill=1",
            per_device_train_batch_size=size,
            gradient_accumulation_steps=4 // size,
        )
        trainer = make_trainer(pair, args, train_dataset=uneven)
        trainer.train()
        found[size] = weights_of(trainer.model), [logs for logs in trainer.state.log_history if "loss" in logs]
    for name, weight in found[4][0].items():
        torch.testing.assert_close(found[1][0][name], weight, rtol=1e-4, atol=1e-5)
    for split, whole in zip(found[1][1], found[4][1], strict=True):
        for name in ("loss", "cc_loss", "pl_loss", "distill_loss", "grad_norm"):
            assert split[name] == pytest.approx(whole[name], rel=1e-4)


def test_loss_that_is_not_finite_stops_with_step_and_documents(pair, uneven, tmp_path):
    trainer = make_trainer(pair, make_args(tmp_path), train_dataset=uneven)

    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            model.translator.bias.data.fill_(float("nan"))

    trainer.add_callback(Break())
    with pytest.raises(ValueError, match=r"loss is nan at step 2 \(cc nan, pl nan\), in the documents file:\d, file"):
        trainer.train()


def test_gradient_that_is_not_finite_stops_before_the_weights_are_lost(pair, uneven, tmp_path):
    trainer = make_trainer(pair, make_args(tmp_path), train_dataset=uneven)
    before = weights_of(trainer.translator)
    trainer.translator.translator.bias.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(ValueError, match=r"gradient is not finite at step 1, in the documents file:\d, file:\d"):
        trainer.train()
    assert same(before, weights_of(trainer.translator))


def test_evaluation_reports_what_the_harness_does(pair, tmp_path):
    """Recovery and source value, from which early stopping and the best model follow."""
    documents, no_source = make_documents(6, words=80, seed=3), make_translator(pair, source_layers=())
    args = make_args(
        tmp_path,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model="recovery",
        load_best_model_at_end=True,
        eval_context_length=24,
    )
    assert args.greater_is_better
    measured = iter([0.2, 0.5, 0.4, 0.3])
    trainer = make_trainer(
        pair,
        args,
        eval_dataset=TextDataset.from_args(documents, pair["target_tokenizer"], args, passes=1, limit=2),
        eval_documents=documents,
        no_source=no_source,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
    )
    own = trainer.context_evaluation
    again = [own(trainer.translator), own(trainer.translator)]  # what is constant is measured once
    report = evaluate(
        trainer.translator,
        documents,
        **pair,
        no_source=no_source,
        arms=["native", "no_context", "translated", "no_source"],
        context_length=24,
        seed=args.seed,
        cost=False,
        progress=False,
    )
    expected = {name: report[name]["value"] for name in ("recovery", "source_value") if name in report}
    assert again == [pytest.approx(expected)] * 2
    for arm in ("native", "no_context", "no_source"):
        nll = [result["nll"] for result in own.known[arm].values()]
        assert sum(nll) / len(nll) == pytest.approx(report["arms"][arm]["nll"])
    trainer.context_evaluation = lambda translator: {"recovery": next(measured), "source_value": 0.1}
    trainer.train()
    assert trainer.state.global_step == 3  # one evaluation without progress, and it stops
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best = MoTModel.from_pretrained(tmp_path / "checkpoint-2")
    assert same(best.state_dict(), trainer.translator.state_dict())
    assert [logs["eval_source_value"] for logs in trainer.state.log_history if "eval_loss" in logs] == [0.1] * 3
    training = trainer.report()["training"]  # of the weights that are kept
    assert training["steps"] == 3 and training["best_step"] == 2 and training["held_out"]["recovery"] == 0.5
    assert training["losses"]["cc"] == trainer.state.log_history[2]["cc_loss"]


def test_figures_reach_tensorboard(pair, uneven, tmp_path):
    pytest.importorskip("tensorboardX")
    args = make_args(tmp_path, max_steps=2, report_to="tensorboard", eval_strategy="steps", eval_steps=2)
    trainer = make_trainer(pair, args, train_dataset=uneven, eval_dataset=uneven)
    trainer.context_evaluation = lambda translator: {"recovery": 0.5, "source_value": 0.1}
    trainer.train()
    (written,) = (path.read_bytes() for path in tmp_path.rglob("events.out.*"))
    for name in ("train/loss", "train/cc_loss", "train/seconds", "eval/pl_loss", "eval/recovery", "eval/source_value"):
        assert name.encode() in written


def test_checkpoint_of_another_translator_is_refused(pair, tmp_path):
    args = make_args(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    make_trainer(pair, args).train()
    with pytest.raises(ValueError, match="is of another translator: `rank` is 8, expected 4"):
        make_trainer(pair, args, make_translator(pair, rank=4)).train(resume_from_checkpoint=True)
    other = make_pair(target="gpt2")
    with pytest.raises(ValueError, match="is of another translator: `target.model_type` is 'gemma3_text', expected"):
        make_trainer(other, args).train(resume_from_checkpoint=True)


def test_adapters_checkpoint_of_another_translator_is_refused(pair, tmp_path):
    def adapted(own, **changes):
        return peft.get_peft_model(
            make_translator(own, **changes), peft.LoraConfig(target_modules=["up"], r=2, init_lora_weights=False)
        )

    args = make_args(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer = make_trainer(pair, args, adapted(pair))
    trainer.train()
    make_trainer(pair, args, adapted(pair)).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="is of another translator: `source_window` is 1, expected 2"):
        model = make_translator(pair)
        model.config.source_window = 2  # of the same weights
        lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up"], r=2))
        make_trainer(pair, args, lora).train(resume_from_checkpoint=True)
    other = make_pair(source="gpt2")
    with pytest.raises(ValueError, match="is of another translator: `source.model_type` is 'llama', expected 'gpt2'"):
        make_trainer(other, args, adapted(other)).train(resume_from_checkpoint=True)
    loaded = peft.PeftModel.from_pretrained(make_translator(pair), str(tmp_path / "checkpoint-1"))
    assert same(loaded.state_dict(), {name: weight for name, weight in trainer.model.state_dict().items()})


def test_checkpoint_that_is_further_than_the_run_goes_is_refused(pair, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(pair, make_args(tmp_path, max_steps=2, **saved)).train()
    again = make_trainer(pair, make_args(tmp_path, max_steps=2, **saved))
    again.train(resume_from_checkpoint=True)  # it is done
    assert again.report()["training"]["steps"] == 2 and not (tmp_path / "checkpoint-3").exists()
    with pytest.raises(ValueError, match="`max_steps` is 1, but the checkpoint .*checkpoint-2 has made 2 already"):
        make_trainer(pair, make_args(tmp_path, max_steps=1, **saved)).train(resume_from_checkpoint=True)


def test_checkpoint_of_more_processes_is_refused(pair, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(pair, make_args(tmp_path, max_steps=1, **saved)).train()
    path = tmp_path / "checkpoint-1" / "fit_report.json"
    path.write_text(path.read_text().replace('"processes": 1', '"processes": 4'))
    with pytest.raises(ValueError, match="checkpoint-1 was made by 4 processes, but this run has 1. .* as many"):
        make_trainer(pair, make_args(tmp_path, max_steps=2, **saved)).train(resume_from_checkpoint=True)


def test_a_checkpoint_from_before_a_field_of_the_config_goes_on(pair, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(pair, make_args(tmp_path, max_steps=1, **saved)).train()
    path = tmp_path / "checkpoint-1" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in config.items() if name != "key_norms"}))
    assert config["key_norms"] == []
    trainer = make_trainer(pair, make_args(tmp_path, max_steps=2, **saved))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2


def test_half_a_checkpoint_is_passed_over(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step, state in ((9, "{}"), (10, '{"global'), (11, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "source"}, "`target` does not match"),
        ({"args": {"replay": "bottom:3"}}, "nothing is left to train"),
        ({"args": {"train_only": "gian"}}, "`train_only`"),
        ({"text": ["too short"]}, "`documents` holds no document of"),
    ],
)
def test_training_that_is_refused_leaves_no_folder_behind(pair, tmp_path, change, message):
    (tmp_path / "there").mkdir()
    for folder in ("there", "new/in/new"):
        args = make_args(tmp_path / folder, **change.get("args", {}))
        given = {**pair, "target": pair[change.get("target", "target")]}
        text = TextDataset.from_args(change.get("text", make_documents(9)), pair["target_tokenizer"], args)
        with pytest.raises(ValueError, match=message):
            make_trainer(given, args, make_translator(pair), train_dataset=text).train()
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    make_trainer(pair, make_args(tmp_path / "new"))
    assert (tmp_path / "new").is_dir()


def test_models_of_another_pair_are_refused(pair, tmp_path):
    args, translator = make_args(tmp_path), make_translator(pair)
    with pytest.raises(ValueError, match="`target` does not match"):
        make_trainer({**pair, "target": pair["source"]}, args, translator)
    with pytest.raises(ValueError, match="`source_tokenizer` is required"):
        make_trainer({**pair, "source_tokenizer": None}, args, translator)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"losses": "cc=1,kl=1"}, "`losses` names 'kl', which is none of cc, "),
        ({"losses": "cc=much"}, "`losses` must give cc a number as weight, got 'much'"),
        ({"losses": "cc=1,cc=2"}, "`losses` names 'cc' twice"),
        ({"losses": {}}, "at least one above 0"),
        (
            {"context_length": "long"},
            "`context_length` must be a number of tokens, or a range like 64-256, got 'long'",
        ),
        ({"replay": "half"}, "`replay` must be one of none, full"),
        ({"remove_unused_columns": True}, "`remove_unused_columns` must be False"),
    ],
)
def test_bad_arguments_are_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        make_args(tmp_path, **change)


def test_defaults_are_the_papers_recipe(tmp_path):
    args = MoTTrainingArguments(str(tmp_path), use_cpu=True)
    assert (args.max_steps, args.get_warmup_steps(args.max_steps)) == (500, 50)
    assert args.train_batch_size * args.gradient_accumulation_steps == 16
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (1e-4, 0.01, 1.0)
    assert (args.length, args.context_range, args.shuffle_buffer) == (128, (64, 64), 50_000)


def test_linear_path_learns_at_its_own_rate(pair, tmp_path):
    args = make_args(tmp_path, max_steps=1, learning_rate=1e-2, linear_learning_rate=0.0, warmup_steps=0)
    trainer = make_trainer(pair, args)
    before = weights_of(trainer.model)
    decayed = {
        id(weight)
        for group in trainer.create_optimizer().param_groups
        if group["weight_decay"] > 0
        for weight in group["params"]
    }
    names = {name for name, weight in trainer.model.named_parameters() if id(weight) in decayed}
    assert names == {"translator.source_in.weight", "translator.embedding_in.weight", "translator.up.weight"}
    trainer.train()
    after = weights_of(trainer.model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "translator.gain",
        "translator.bias",
    }
    lora = peft.get_peft_model(make_translator(pair), peft.LoraConfig(target_modules="all-linear", r=2))
    with pytest.raises(ValueError, match="`linear_learning_rate` is given, but the translator has no linear path"):
        make_trainer(pair, args, lora).train()


@pytest.mark.parametrize("fields", [{"method": "mlp", "linear_path": True}, {"method": "mot", "trunk": True}], ids=str)
def test_linear_path_is_that_and_nothing_beside_it(pair, tmp_path, fields):
    config = make_translator(pair).config.to_dict() | {"hidden_size": 8, "num_attention_heads": 2, **fields}
    model = MoTModel(MoTConfig(**config))
    own = model.translator if model.config.trunk else model.translator.linear
    args = make_args(tmp_path, max_steps=1, learning_rate=1e-2, linear_learning_rate=0.0, warmup_steps=0)
    trainer = make_trainer(pair, args, model)
    optimizer = trainer.create_optimizer()
    slow = {id(weight) for group in optimizer.param_groups if group["lr"] == 0 for weight in group["params"]}
    assert slow == {id(weight) for weight in (own.source_in.weight, own.embedding_in.weight, own.up.weight)}


def test_only_what_is_asked_for_is_trained(pair, tmp_path):
    model = make_translator(pair)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = make_trainer(pair, make_args(tmp_path, train_only=r"\bup\b|bias$"), model)
    trainer.train()
    changed = {
        name for name, weight in trainer.translator.state_dict().items() if not torch.equal(weight, before[name])
    }
    assert changed == {"translator.up.weight", "translator.bias"}
    assert trainer.report()["training"]["settings"]["train_only"] == r"\bup\b|bias$"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("nothing", "`train_only` 'nothing' is found in no parameter's name. They are translator.gain, translator."),
        ("(", r"`train_only` must be a regular expression, got '\('"),
    ],
)
def test_what_cannot_be_trained_alone_is_refused(pair, tmp_path, pattern, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(pair, make_args(tmp_path, train_only=pattern))


@pytest.mark.filterwarnings("default::FutureWarning")  # peft's own calls
def test_nothing_is_trained_alone_that_an_adapter_has_frozen(pair, tmp_path):
    wrapped = peft.get_peft_model(make_translator(pair), peft.LoraConfig(target_modules="all-linear", r=2))
    with pytest.raises(ValueError, match=r"`train_only` 'bias\$' is found in the names of frozen parameters alone"):
        make_trainer(pair, make_args(tmp_path, train_only="bias$"), wrapped)
    make_trainer(pair, make_args(tmp_path, train_only=r"up\.lora_"), wrapped)
    trained = [name for name, weight in wrapped.named_parameters() if weight.requires_grad]
    assert len(trained) == 2 and all(".up.lora_" in name for name in trained)


def test_more_context_than_the_target_has_positions_is_refused(pair, tmp_path):
    """Rotary positions go on without an end, but the target was never made for them."""
    args = make_args(tmp_path, length=530, context_length="520")
    model = make_translator(pair, source_layers=())  # else the source's own end comes first
    trainer = make_trainer(
        pair, args, model, train_dataset=TextDataset.from_args(make_documents(6, 400), pair["target_tokenizer"], args)
    )
    with pytest.raises(ValueError, match="520 target tokens, more than the 512 positions of the target"):
        trainer.train()


def test_bf16_keeps_the_weights_in_fp32(pair, uneven, tmp_path):
    losses = []
    for bf16 in (False, True):
        trainer = make_trainer(pair, make_args(tmp_path, max_steps=1, bf16=bf16), train_dataset=uneven)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
        assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert losses[1] == pytest.approx(losses[0], rel=0.03) and losses[1] != losses[0]


def test_lora_on_a_translator_trains_saves_loads_and_merges(pair, tmp_path):
    base = make_translator(pair)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear", r=2))
    args = make_args(tmp_path, learning_rate=1e-1, save_strategy="steps", save_steps=3)
    trainer = make_trainer(pair, args, model)
    before = weights_of(base)
    trainer.train()
    frozen = {name: weight for name, weight in base.state_dict().items() if "lora" not in name}
    assert all(torch.equal(before[name], weight) for name, weight in frozen.items())
    files = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    loaded = peft.PeftModel.from_pretrained(make_translator(pair), str(tmp_path / "checkpoint-3"))
    text = make_documents(1, words=8)
    trained, plain = (mot.handoff(text, **pair) for mot in (trainer.translator, make_translator(pair)))
    merged = loaded.merge_and_unload().eval().handoff(text, **pair)
    torch.testing.assert_close(merged.layers[0].keys, trained.layers[0].keys, rtol=1e-4, atol=1e-4)
    assert (merged.layers[0].keys - plain.layers[0].keys).abs().max() > 1e-2


def test_adapted_language_models_are_trained_between(pair, tmp_path):
    def adapted(model, seed):
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
        return peft.get_peft_model(model, config)

    fresh = make_pair()
    own = {**fresh, "source": adapted(fresh["source"], 1), "target": adapted(fresh["target"], 2)}
    before = {side: weights_of(own[side]) for side in ("source", "target")}
    trainer = make_trainer(own, make_args(tmp_path, losses="cc=1,pl=1,distill=1"))
    trainer.train()
    assert trainer.translator.config.target["adapter"] is not None
    assert all(same(before[side], weights_of(own[side])) for side in before)
    with pytest.raises(ValueError, match="adapter"):
        make_trainer(own, make_args(tmp_path), make_translator(pair))
    make_trainer(own, make_args(tmp_path), make_translator(pair), allow_variant=True).train()


def test_a_translator_keeps_the_plan_that_it_was_trained_for(pair, tmp_path):
    for given, kept in ((None, "none"), ("full", "full"), ("full:1-2", "full:1-2")):
        trainer = make_trainer(pair, make_args(tmp_path, replay=given), make_translator(pair))
        assert str(trainer.translator.plan()) == kept and trainer.translator.config.replay == kept


def test_a_run_is_measured_at_its_end(pair, uneven, tmp_path):
    args = make_args(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4)
    trainer = make_trainer(pair, args, train_dataset=uneven, eval_dataset=uneven)
    trainer.train()
    assert [logs["step"] for logs in trainer.state.log_history if "eval_loss" in logs] == [2, 3]
    assert trainer.report()["training"]["held_out"]["loss"] == trainer.evaluate()["eval_loss"]


def test_report_says_how_a_run_ended_that_is_shorter_than_a_log(pair, uneven, tmp_path):
    trainer = make_trainer(pair, make_args(tmp_path, max_steps=2, logging_steps=10), train_dataset=uneven)
    trainer.train()
    report = trainer.report()["training"]
    assert report["losses"].keys() == {"cc", "pl"} and report["seconds"] > 0


def test_usage_of_the_translators_is_logged(pair, uneven, tmp_path):
    size = {"num_translators": 2, "hidden_size": 8, "num_attention_heads": 2}
    mot = MoTModel.from_pair(**pair, **size)
    with torch.no_grad():  # of the two routers, one always takes the first translator, and one each for half
        for side, bias in zip(mot.translator.sides, ([5.0, -5.0], [0.0, 0.0]), strict=True):
            side.router.gate.weight.zero_()
            side.router.gate.bias.copy_(torch.tensor(bias))
    mot.translator.sides[1].router.forward = lambda x: (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), None)
    usage, accelerator = RouterUsage(mot.train()), Accelerator(cpu=True)
    for side in mot.translator.sides:
        side.router(torch.randn(1, 2, side.router.norm.normalized_shape[0]))
    assert usage.drain(accelerator) == pytest.approx(
        {"router_cv2": (1 + 0) / 2, "router_entropy": (0 + math.log(2)) / 2}
    )
    assert usage.drain(accelerator) == {}
    mot = MoTModel.from_pair(**pair, **size, embedding_window=1).train()
    usage, widths = RouterUsage(mot), mot.translator.widths
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    mot(torch.randn(2, 4, widths.source_dim), torch.randn(2, 4, widths.embeddings), mask)
    assert [counts.sum() for counts in usage.counts.values()] == [6, 6]  # a pad chooses nothing
    trainer = make_trainer(pair, make_args(tmp_path, max_steps=1), MoTModel.from_pair(**pair, **size))
    trainer.train()
    assert 0 <= trainer.state.log_history[0]["router_entropy"] <= math.log(2) + 1e-6
    single = make_trainer(pair, make_args(tmp_path, max_steps=1))
    single.train()
    assert "router_cv2" not in single.state.log_history[0]


def test_text_is_an_endless_stream_in_an_order_of_its_own(pair):
    documents, tokenizer = make_documents(3), pair["target_tokenizer"]
    settings = {"length": 40, "context_length": (12, 20)}
    once = list(TextDataset(documents, tokenizer, passes=1, **settings))
    stream = iter(TextDataset(documents, tokenizer, **settings))
    longer = [next(stream) for _ in range(2 * len(once))]
    assert longer[: len(once)] == once and longer[len(once) :] != once
    loader = torch.utils.data.DataLoader(
        TextDataset(documents, tokenizer, passes=1, **settings), batch_size=1, num_workers=2, collate_fn=list
    )
    found = [example.document for batch in loader for example in batch]
    assert sorted(found) == sorted(example.document for example in once)  # none twice


def test_text_that_cannot_be_trained_on_is_refused(pair):
    tokenizer = pair["target_tokenizer"]
    with pytest.raises(TypeError, match="`documents` must be readable again"):
        TextDataset(iter(["a"]), tokenizer)
    with pytest.raises(ValueError, match="`length` must exceed the longest context"):
        TextDataset(["a"], tokenizer, length=64)
    with pytest.raises(ValueError, match="`documents` holds no document of 64"):
        next(iter(TextDataset(["too short"], tokenizer)))


def test_report_is_json(pair, uneven, tmp_path):
    trainer = make_trainer(pair, make_args(tmp_path, max_steps=1), train_dataset=uneven)
    trainer.translator.fit_report = {"rank": 8, "evaluation": {"recovery": 1}}
    trainer.train()
    report = json.loads(json.dumps(trainer.report()))
    assert report["rank"] == 8 and "evaluation" not in report  # figures of what it started from
