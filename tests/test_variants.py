"""Adapters, quantization, dtypes and device maps of the two models."""

import peft
import pytest
import torch
from conftest import make_documents, make_model, make_tokenizer
from transformers import AutoModelForCausalLM, TorchAoConfig

from hf_mot import MoTModel
from hf_mot.compat_mot import cache_argument
from hf_mot.contract_mot import describe_model
from hf_mot.generation_mot import is_attached

# peft 0.21 asks transformers for names that it has since renamed.
pytestmark = pytest.mark.filterwarnings("default::FutureWarning")

NEW = 8
TEXT, PROMPT = make_documents(1, 12)[0], " the captain wrote"


def make_own(family="llama"):
    tokenizer = make_tokenizer(merges=40)
    return with_model(make_model(family, tokenizer), tokenizer)


def with_model(model, tokenizer):
    return {"source": model, "target": model, "source_tokenizer": tokenizer, "target_tokenizer": tokenizer}


def with_lora(model, seed=1):
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def native_ids(own):
    tokenizer = own["target_tokenizer"]
    ids = [tokenizer.bos_token_id, *tokenizer(TEXT + PROMPT, add_special_tokens=False)["input_ids"]]
    ids = torch.tensor([ids])
    out = own["target"].generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
    )
    return out[0, ids.shape[1] :].tolist()


def ids_after(own, cache):
    prompt = own["target_tokenizer"](PROMPT, return_tensors="pt", return_token_type_ids=False)
    out = own["target"].generate(**prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    return out[0, prompt["input_ids"].shape[1] :].tolist()


def test_peft_model_is_its_own_oracle():
    plain = make_own()
    before = native_ids(plain)
    own = with_model(with_lora(plain["target"]), plain["target_tokenizer"])
    expected = native_ids(own)
    cache = MoTModel.identity(own["target"], own["target_tokenizer"]).handoff(TEXT, **own)
    assert is_attached(own["target"]) and is_attached(own["target"].get_base_model())
    assert ids_after(own, cache) == expected != before


def test_adapter_on_the_base_model_is_refused_unless_told():
    own = make_own()
    mot = MoTModel.identity(own["target"], own["target_tokenizer"])
    plain = mot.handoff(TEXT, **own)
    adapted = with_model(with_lora(own["target"]), own["target_tokenizer"])
    with pytest.raises(ValueError, match="`source` does not match .*`adapter` is .*expected None.*allow_variant=True"):
        mot.handoff(TEXT, **adapted)
    cache = mot.handoff(TEXT, allow_variant=True, **adapted)
    assert ids_after(adapted, cache) == native_ids(adapted)
    assert (cache.layers[1].keys - plain.layers[1].keys).abs().max() > 0.01


def test_base_model_or_another_adapter_is_refused_where_an_adapter_was_fitted():
    own = make_own()
    tokenizer = own["target_tokenizer"]
    adapted = with_lora(make_model("llama", tokenizer))
    contract = describe_model(adapted, tokenizer)
    assert contract["fingerprint"] == describe_model(own["target"], tokenizer)["fingerprint"]
    mot = MoTModel.identity(adapted, tokenizer)
    with pytest.raises(ValueError, match="`adapter` is None, expected {"):
        mot.handoff(TEXT, **own)
    other = with_model(with_lora(make_model("llama", tokenizer), seed=2), tokenizer)
    with pytest.raises(ValueError, match="`adapter` is {.*expected {"):
        mot.handoff(TEXT, **other)


def test_merged_adapter_is_another_model_even_when_told():
    own = make_own()
    mot = MoTModel.identity(own["target"], own["target_tokenizer"])
    merged = with_lora(make_own()["target"]).merge_and_unload()
    with pytest.raises(ValueError, match="`source` has other weights"):
        mot.handoff(TEXT, allow_variant=True, **with_model(merged, own["target_tokenizer"]))


def test_prompt_learning_adapter_is_refused():
    own = make_own()
    model = peft.get_peft_model(own["target"], peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="carries a prompt-learning adapter, whose virtual tokens"):
        MoTModel.identity(model, own["target_tokenizer"])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_native_within_its_rounding(tmp_path, family, dtype):
    own = make_own(family)
    own["target"].save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, device_map="cpu")
    own = with_model(model, own["target_tokenizer"])
    cache = MoTModel.identity(model, own["target_tokenizer"]).handoff(TEXT, **own)
    assert {layer.keys.dtype for layer in cache.layers} == {dtype}
    tokenizer = own["target_tokenizer"]
    ids, prompt = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (TEXT, PROMPT))
    ids, prompt = torch.tensor([[tokenizer.bos_token_id, *ids]]), torch.tensor([prompt])
    with torch.no_grad():
        native = model(torch.cat([ids, prompt], 1)).logits[:, ids.shape[1] :].float()
        nothing = model(torch.cat([ids[:, :1], prompt], 1)).logits[:, 1:].float()
        ours = model(prompt, **{cache_argument(model): cache.fork()}).logits.float()
    assert (ours - native).norm() < 0.1 * (nothing - native).norm()


def test_quantized_source_and_target(tmp_path):
    # Not among the development dependencies: importing it warns about libraries for GPUs in every process.
    quantization = pytest.importorskip("torchao.quantization")
    own = make_own()
    own["target"].save_pretrained(tmp_path)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(quantization.Int8WeightOnlyConfig()), device_map="cpu"
    )
    mine = with_model(quantized, own["target_tokenizer"])
    mot = MoTModel.identity(quantized, own["target_tokenizer"])
    assert mot.config.target["quantization"] == "torchao"
    assert ids_after(mine, mot.handoff(TEXT, **mine)) == native_ids(mine)
    plain = MoTModel.identity(own["target"], own["target_tokenizer"])
    with pytest.raises(ValueError, match="`quantization` is 'torchao', expected None.*allow_variant=True"):
        plain.handoff(TEXT, **mine)
    assert ids_after(mine, plain.handoff(TEXT, allow_variant=True, **mine)) == native_ids(mine)
