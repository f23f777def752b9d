"""Losses on prompts over a part of the vocabulary: exact over all of it, else a softmax that is masked to the part."""

import peft
import pytest
import torch
from conftest import make_documents, make_model, make_pair, make_tokenizer, make_translator
from families import FAMILIES, build
from torch.nn import functional as F
from training_pair import make_args, make_trainer
from transformers import TrainerCallback

from hf_mot.capture_mot import prefill
from hf_mot.data.capture import capture_states
from hf_mot.data.states import StatesDataset
from hf_mot.evaluation.answers import wrap
from hf_mot.training import TextDataset
from hf_mot.training.forward import Prompt
from hf_mot.training.trainer import MoTTrainer
from hf_mot.training.vocabulary import VOCABULARY_EXAMPLES, frequent_tokens, narrow_head, narrowed

# peft 0.21 asks transformers for names that it has since renamed.
pytestmark = pytest.mark.filterwarnings("default::FutureWarning")
VOCABULARY = torch.tensor([1, 4, 5, 9, 11, 30, 31, 64])


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def examples(pair):
    settings = {"length": 40, "context_length": (12, 20), "passes": 1, "limit": 8}
    return list(TextDataset(make_documents(12), pair["target_tokenizer"], **settings))


def losses_and_gradients(trainer: MoTTrainer, batch: dict):
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), {name: weight.grad.clone() for name, weight in trainer.model.named_parameters()}


def same_losses(left, right):
    assert left[0] == pytest.approx(right[0], rel=1e-4)
    for name, gradient in right[1].items():
        torch.testing.assert_close(left[1][name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item())


@pytest.mark.parametrize("plan", ["none", "full:1-2"])
def test_all_tokens_give_the_exact_losses_and_gradients(pair, examples, tmp_path, plan):
    trainer = make_trainer(pair, make_args(tmp_path, losses="cc=1,pl=1,distill=1", replay=plan))
    batch = trainer.data_collator(examples[:3])
    exact = losses_and_gradients(trainer, batch)
    everything = torch.arange(len(pair["target_tokenizer"]))
    same_losses(losses_and_gradients(trainer, {**batch, "vocabulary": everything}), exact)
    few = torch.cat([batch["prompt_ids"].flatten(), torch.arange(20)]).unique()
    assert losses_and_gradients(trainer, {**batch, "vocabulary": few})[0] < exact[0] - 0.1


@pytest.mark.parametrize("loss", ["pl", "distill"])
def test_some_tokens_give_the_masked_softmax(pair, examples, tmp_path, loss):
    trainer = make_trainer(pair, make_args(tmp_path, losses=loss))
    batch = trainer.data_collator(examples[:3])
    vocabulary = torch.cat([batch["prompt_ids"].flatten(), torch.arange(20)]).unique()
    read = trainer.comparison.inputs(trainer.translator, batch)
    output = trainer.model(read.source_states, read.embeddings, read.target_mask)
    whole = trainer.comparison.loss_inputs(trainer.translator, output, read, batch)
    outside = torch.ones(whole.logits.shape[-1], dtype=torch.bool)
    outside[vocabulary] = False
    log_probs = whole.logits.masked_fill(outside, float("-inf")).log_softmax(-1)
    if loss == "pl":
        expected = F.nll_loss(log_probs, whole.labels)
    else:
        native = whole.native_logits.masked_fill(outside, float("-inf")).log_softmax(-1)
        expected = (native.exp() * (native - log_probs).nan_to_num(0.0)).sum(-1).mean()
    parameters = list(trainer.model.parameters())
    gradients = torch.autograd.grad(expected, parameters)
    found = losses_and_gradients(trainer, {**batch, "vocabulary": vocabulary})
    names = [name for name, _ in trainer.model.named_parameters()]
    same_losses(found, (expected.item(), dict(zip(names, gradients, strict=True))))


def prompt_logits_of(model, vocabulary):
    prompt = Prompt(torch.tensor([[3, 7, 8, 2], [9, 1, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))
    context = torch.tensor([[5, 6, 7, 8, 9], [9, 4, 3, 2, 1]])
    cache = wrap(prefill(model, context), torch.ones_like(context), sliding=True)
    with torch.no_grad(), narrow_head(model, vocabulary):
        return prompt.logits(model, cache)


@pytest.mark.parametrize(
    "name",
    [
        *("Gemma-2", "Gemma-3n", "Gemma-4", "Cohere", "Granite", "MiniCPM3", "NanoChat"),  # caps and scalings
        *("Phi", "GPT-J", "ModernBERT (decoder)"),  # biases
        *("GPT-2", "GPT-NeoX", "OPT (350m: projections, post-norm)", "Falcon (multi-query)"),
    ],
)
def test_logits_are_the_models_own_of_these_tokens(name):
    torch.manual_seed(0)
    model = FAMILIES[name](80)
    whole = prompt_logits_of(model, None)
    torch.testing.assert_close(prompt_logits_of(model, VOCABULARY), whole[:, VOCABULARY], rtol=1e-4, atol=1e-5)
    assert torch.equal(prompt_logits_of(model, None), whole)


def test_adapted_and_tied_heads_are_narrowed_and_put_back():
    torch.manual_seed(0)
    tied = build("LlamaForCausalLM", 80, tie_word_embeddings=True)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(build("LlamaForCausalLM", 80), config).get_base_model()
    saved = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    own_head = peft.get_peft_model(build("LlamaForCausalLM", 80), saved).get_base_model()
    for model in (tied, adapted, own_head):
        before = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        embeddings = model.get_input_embeddings().weight
        whole = prompt_logits_of(model, None)
        torch.testing.assert_close(prompt_logits_of(model, VOCABULARY), whole[:, VOCABULARY], rtol=1e-4, atol=1e-5)
        with pytest.raises(RuntimeError, match="an error within"), narrow_head(model, VOCABULARY):
            assert len(model.get_output_embeddings().weight) == len(VOCABULARY)
            assert model.get_input_embeddings().weight is embeddings
            raise RuntimeError("an error within")
        after = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        assert before == after
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight


def test_gradient_outlives_the_narrow_head():
    model = make_model("gemma3", make_tokenizer()).requires_grad_(False)
    states = torch.randn(1, 4, 32, requires_grad=True)
    with narrow_head(model, VOCABULARY):
        narrow = model(inputs_embeds=states, use_cache=False).logits
    whole = model(inputs_embeds=states, use_cache=False).logits[..., VOCABULARY]
    found, expected = (torch.autograd.grad(logits.square().sum(), states)[0] for logits in (narrow, whole))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_ids_are_numbered_by_their_place():
    assert narrowed(torch.tensor([[64, 1], [9, 5]]), VOCABULARY).tolist() == [[7, 0], [3, 2]]
    ids = torch.tensor([2, 3])
    assert narrowed(ids, None) is ids
    for missing in (6, 65):
        with pytest.raises(ValueError, match=f"`vocabulary` lacks the id {missing}, which the batch's prompts hold"):
            narrowed(torch.tensor([5, missing]), VOCABULARY)


def test_frequent_tokens_come_first_and_then_the_lowest(pair, examples):
    ids = [token for example in examples for token in [*example.context_ids, *example.prompt_ids]]
    size = len(pair["target_tokenizer"])
    seen = torch.tensor(ids).bincount(minlength=size)
    for wanted in (3, 20, int((seen > 0).sum()) + 5, size, size + 7):
        frequent = frequent_tokens(examples, wanted, size).bool()
        assert frequent.sum() == min(wanted, size)
        if wanted < size:
            assert seen[frequent].min() >= seen[~frequent].max()
    lowest_unseen = (seen == 0).nonzero()[:5].flatten()
    assert frequent_tokens(examples, int((seen > 0).sum()) + 5, size)[lowest_unseen].all()
    endless = (examples[index % len(examples)] for index in range(10**9))
    assert frequent_tokens(endless, 20, size).sum() == 20
    assert next(endless) == examples[VOCABULARY_EXAMPLES % len(examples)]


@pytest.mark.parametrize("top_logits", [0, 5, None])
def test_captured_states_are_narrowed_too(pair, examples, tmp_path, top_logits):
    model = make_translator(pair)
    settings = {"folder": tmp_path / "states", "dtype": "float32", "top_logits": top_logits, "max_shard_bytes": 40_000}
    capture_states(examples, model, **pair, **settings, progress=False)
    captured = StatesDataset(tmp_path / "states", model.config)
    assert len(captured.index["shards"]) > 1
    names = ("context_ids", "prompt_ids", "top_ids")
    ids = torch.cat([item[name].flatten() for item in captured for name in names if name in item])
    assert torch.equal(torch.cat([part.flatten() for part in captured.token_ids()]).sort()[0], ids.sort()[0])
    size = len(pair["target_tokenizer"])
    assert torch.equal(frequent_tokens(captured, size - 1, size).bool(), _frequent(ids, size - 1, size))

    args = make_args(tmp_path, losses="cc=1,pl=1,distill=1", vocabulary_size=size)
    trainer = make_trainer(pair, args, model, train_dataset=captured, source=None, source_tokenizer=None)
    batch = trainer.data_collator([captured[index] for index in range(3)])
    exact = losses_and_gradients(trainer, batch)
    same_losses(losses_and_gradients(trainer, {**batch, "vocabulary": torch.arange(size)}), exact)
    trainer.train()  # its vocabulary has whatever its batches look up


def _frequent(ids, wanted, size):
    order = ids.long().bincount(minlength=size).argsort(descending=True, stable=True)
    return torch.zeros(size, dtype=torch.bool).index_fill(0, order[:wanted], True)


def run(pair, examples, folder, **changes):
    args = make_args(folder, losses="cc=1,pl=1,distill=1", max_steps=2, **changes)
    trainer = make_trainer(pair, args, train_dataset=examples, eval_dataset=examples[:2])
    trainer.train()
    logged = [{**logs, "seconds": 0} for logs in trainer.state.log_history if "loss" in logs]
    return trainer, logged


def test_training_on_all_tokens_is_training_without_a_vocabulary(pair, examples, tmp_path):
    exact, exact_logs = run(pair, examples, tmp_path)
    all_of_them, logs = run(pair, examples, tmp_path, vocabulary_size=len(pair["target_tokenizer"]))
    for own, other in zip(logs, exact_logs, strict=True):
        assert own == pytest.approx(other, rel=1e-3)
    for name, weight in exact.translator.state_dict().items():
        torch.testing.assert_close(all_of_them.translator.state_dict()[name], weight, rtol=1e-3, atol=1e-4)


def test_narrow_steps_are_split_like_others_and_evaluated_exactly(pair, examples, tmp_path):
    """The vocabulary is that of the step, whatever batches it has."""
    found = {}
    for size in (1, 4):
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        found[size] = run(pair, examples, tmp_path, vocabulary_size=10, **split)
    for one, four in zip(found[1][1], found[4][1], strict=True):
        for name in ("loss", "pl_loss", "distill_loss", "grad_norm"):
            assert one[name] == pytest.approx(four[name], rel=1e-3)
    trainer = found[4][0]
    assert trainer.report()["training"]["settings"]["vocabulary_size"] == 10
    exact = make_trainer(
        pair, make_args(tmp_path, losses=trainer.args.losses), trainer.translator, train_dataset=examples
    )
    expected = exact.evaluate(examples[:2])
    narrow = trainer.evaluate()
    for name in ("eval_loss", "eval_pl_loss", "eval_distill_loss"):
        assert narrow[name] == pytest.approx(expected[name], rel=1e-4)
    assert found[4][1][0]["pl_loss"] < exact.evaluate(examples)["eval_pl_loss"] - 0.1


def test_resumed_run_has_the_same_vocabulary(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_mot.training.trainer.VOCABULARY_EXAMPLES", 50)
    settings = {"max_steps": 4, "vocabulary_size": 10, "losses": "pl=1,distill=1", "save_strategy": "steps"}
    ends = {}
    for name, stop in (("whole", None), ("killed", 2)):
        args = make_args(tmp_path / name, save_steps=2, **settings)
        trainer = make_trainer(pair, args)
        if stop is not None:
            trainer.add_callback(_Stop(stop))
            trainer.train()
            trainer = make_trainer(pair, args)
        trainer.train(resume_from_checkpoint=True if stop else None)
        ends[name] = trainer.translator.state_dict(), trainer.state.log_history[-2]["loss"]
    assert ends["killed"][1] == ends["whole"][1]
    assert all(torch.equal(weight, ends["killed"][0][name]) for name, weight in ends["whole"][0].items())


class _Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary_size": 0}, "`vocabulary_size` must be 1 token or more, got 0"),
        (
            {"vocabulary_size": 9, "losses": "cc=1,pl=0"},
            r"`vocabulary_size` is 9, but `losses` .* has none on prompts \(pl, distill\)",
        ),
    ],
)
def test_impossible_vocabularies_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        make_args(tmp_path, **change)
