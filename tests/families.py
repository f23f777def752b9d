"""One tiny random model per family of causal LMs. Weights are large, so that context matters; windows are short, so
that a few words go beyond them."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields

import torch
import transformers
from transformers import PreTrainedModel

# What a config takes of these, under its own name or one of its aliases; an entry of FAMILIES overrides it.
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,  # tied ones make random models repeat themselves
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = 8
SLIDING_AND_FULL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "cls_token_id": 0, "sep_token_id": 1}
FOUR = {"num_hidden_layers": 4}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
SCALED = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.4,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}


def rope(kind: str, **parameters) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


@torch.no_grad()
def build(class_name: str, vocab_size: int, **changes) -> PreTrainedModel:
    """A model in evaluation mode, its config made of the class's defaults, COMMON and `changes`."""
    model_class = getattr(transformers, class_name)
    config_class = model_class.config_class
    known = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    common = {name: value for name, value in COMMON.items() if name in known}
    config = config_class(vocab_size=vocab_size, **deepcopy({**common, **changes}))
    model = model_class(config).eval()
    model.generation_config.eos_token_id = None  # some configs put their own where they are given none
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases: at their initial ones and zeros they hide what they do
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def family(class_name: str, **changes) -> Callable[[int], PreTrainedModel]:
    """Builder of a family, from the vocabulary size."""
    return lambda vocab_size: build(class_name, vocab_size, **changes)


def gemma_with_layer_inputs(class_name: str, **changes) -> Callable[[int], PreTrainedModel]:
    """Gemma's families with an embedding of each token per layer."""
    changes = {"hidden_size_per_layer_input": 8, **changes}
    return lambda vocab_size: build(
        class_name, vocab_size, vocab_size_per_layer_input=vocab_size, **SLIDING_AND_FULL, **FOUR, **changes
    )


FAMILIES: dict[str, Callable[[int], PreTrainedModel]] = {
    # learned or sinusoidal absolute positions
    "GPT-2": family("GPT2LMHeadModel"),
    "GPT-BigCode": family("GPTBigCodeForCausalLM"),
    "GPT-Neo (global and local)": family(
        "GPTNeoForCausalLM", attention_types=[[["global", "local"], 2]], window_size=WINDOW, **FOUR
    ),
    "OPT": family("OPTForCausalLM", ffn_dim=48, init_std=0.3),
    "OPT (350m: projections, post-norm)": family(
        "OPTForCausalLM", ffn_dim=48, init_std=0.3, word_embed_proj_dim=16, do_layer_norm_before=False
    ),
    "XGLM": family("XGLMForCausalLM", ffn_dim=48, init_std=0.3),
    "BioGPT": family("BioGptForCausalLM"),
    "CTRL": family("CTRLLMHeadModel", dff=48),
    # biases by distance
    "Bloom": family("BloomForCausalLM"),
    "Falcon (alibi)": family("FalconForCausalLM", alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "MPT": family("MptForCausalLM", max_seq_len=512, use_cache=True),
    # rotary positions
    "Falcon (multi-query)": family("FalconForCausalLM"),
    "Falcon (new decoder)": family("FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2),
    "GPT-J": family("GPTJForCausalLM", rotary_dim=4),
    "CodeGen": family("CodeGenForCausalLM", rotary_dim=4),
    "GPT-NeoX": family("GPTNeoXForCausalLM", rotary_pct=0.5),
    "GPT-NeoX-Japanese": family("GPTNeoXJapaneseForCausalLM"),
    "Llama": family("LlamaForCausalLM"),
    "Llama (llama3 rope)": family(
        "LlamaForCausalLM",
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "Llama (yarn)": family("LlamaForCausalLM", **rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "Llama (linear rope)": family("LlamaForCausalLM", **rope("linear", factor=4.0)),
    "Qwen2": family("Qwen2ForCausalLM"),
    "Qwen2 (sliding)": family("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "Qwen3": family("Qwen3ForCausalLM"),
    "Mistral": family("MistralForCausalLM", sliding_window=None),
    "Mistral (sliding)": family("MistralForCausalLM", sliding_window=WINDOW),
    "Ministral": family("MinistralForCausalLM", **SLIDING_AND_FULL, **FOUR),
    "Ministral 3": family(
        "Ministral3ForCausalLM",
        **rope("yarn", factor=4.0, original_max_position_embeddings=128, llama_4_scaling_beta=0.1),
    ),
    "Phi": family("PhiForCausalLM"),
    "Phi-3": family("Phi3ForCausalLM"),
    "StableLM": family("StableLmForCausalLM", partial_rotary_factor=0.5),
    "GLM": family("GlmForCausalLM"),
    "GLM-4": family("Glm4ForCausalLM"),
    "StarCoder2": family("Starcoder2ForCausalLM"),
    "OLMo": family("OlmoForCausalLM"),
    "OLMo-2": family("Olmo2ForCausalLM"),
    "OLMo-3": family("Olmo3ForCausalLM", **SLIDING_AND_FULL, **FOUR),
    "Granite": family("GraniteForCausalLM", **SCALED),
    "Granite (sliding)": family("GraniteSWAForCausalLM", **SLIDING_AND_FULL, **FOUR, **SCALED),
    "Cohere": family("CohereForCausalLM", logit_scale=1.0),
    "Cohere2": family("Cohere2ForCausalLM", logit_scale=1.0, **SLIDING_AND_FULL, **FOUR),
    "SmolLM3": family("SmolLM3ForCausalLM", no_rope_layer_interval=2),
    "Gemma": family("GemmaForCausalLM"),
    "Gemma-2": family("Gemma2ForCausalLM", query_pre_attn_scalar=8, **SLIDING_AND_FULL, **FOUR),
    "VaultGemma": family("VaultGemmaForCausalLM", query_pre_attn_scalar=8, **SLIDING_AND_FULL, **FOUR),
    "Gemma-3": family("Gemma3ForCausalLM", query_pre_attn_scalar=8, **SLIDING_AND_FULL, **FOUR),
    "Gemma-3n": gemma_with_layer_inputs(
        "Gemma3nForCausalLM", num_kv_shared_layers=2, laurel_rank=4, altup_num_inputs=2
    ),
    "Gemma-4": gemma_with_layer_inputs("Gemma4ForCausalLM", global_head_dim=16),
    "Gemma-4 (shared KV layers)": gemma_with_layer_inputs(
        "Gemma4ForCausalLM", global_head_dim=16, num_kv_shared_layers=2
    ),
    "ModernBERT (decoder)": family(
        "ModernBertDecoderForCausalLM",
        **SPECIAL_IDS,
        local_attention=2 * WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "Nemotron": family("NemotronForCausalLM"),
    "Persimmon": family("PersimmonForCausalLM"),
    "Ernie 4.5": family("Ernie4_5ForCausalLM"),
    "Exaone4": family("Exaone4ForCausalLM", **SLIDING_AND_FULL, **FOUR),
    "Helium": family("HeliumForCausalLM"),
    "Arcee": family("ArceeForCausalLM"),
    "Apertus": family("ApertusForCausalLM", **rope("default")),
    "Seed-OSS": family("SeedOssForCausalLM"),
    "Jais2": family("Jais2ForCausalLM"),
    "Doge": family("DogeForCausalLM"),
    "BitNet": family("BitNetForCausalLM"),
    "NanoChat": family("NanoChatForCausalLM"),
    "DiffLlama": family("DiffLlamaForCausalLM"),
    "HyperCLOVA X": family("HyperCLOVAXForCausalLM", **{**SCALED, "attention_multiplier": None}),
    "CWM": family("CwmForCausalLM", bos_token_id=0, **SLIDING_AND_FULL, **FOUR, **rope("default")),
    "HunYuan": family("HunYuanDenseV1ForCausalLM"),
    # experts
    "Qwen2-MoE": family("Qwen2MoeForCausalLM", num_experts=4, shared_expert_intermediate_size=16, **EXPERTS),
    "Qwen3-MoE": family("Qwen3MoeForCausalLM", num_experts=4, **EXPERTS),
    "Mixtral": family("MixtralForCausalLM", num_local_experts=4),
    "PhiMoE": family("PhimoeForCausalLM", num_local_experts=4),
    "Granite-MoE": family("GraniteMoeForCausalLM", num_local_experts=4, **SCALED),
    "OLMoE": family("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    "GPT-OSS": family(
        "GptOssForCausalLM",
        num_local_experts=4,
        num_experts_per_tok=2,
        **SLIDING_AND_FULL,
        **FOUR,
        **rope("yarn", factor=4.0, original_max_position_embeddings=128, truncate=False),
    ),
    "Ernie 4.5-MoE": family(
        "Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=16
    ),
    "Dots1": family("Dots1ForCausalLM", **ROUTED),
    "GLM-4-MoE": family("Glm4MoeForCausalLM", use_qk_norm=True, **ROUTED),
    "MiniMax-M2": family("MiniMaxM2ForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "DBRX": family(
        "DbrxForCausalLM",
        d_model=32,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "JetMoE": family("JetMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2, kv_channels=8),
    "AFMoE": family("AfmoeForCausalLM", num_experts=4, num_shared_experts=1, **EXPERTS, **SLIDING_AND_FULL, **FOUR),
    "Llama-4 (text, chunked)": family(
        "Llama4ForCausalLM",
        intermediate_size_mlp=48,
        num_local_experts=2,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        attention_chunk_size=WINDOW,
        **FOUR,
    ),
    # compressed keys and values
    "DeepSeek-V3": family("DeepseekV3ForCausalLM", n_group=2, topk_group=1, **MLA, **ROUTED),
    "DeepSeek-V2": family("DeepseekV2ForCausalLM", **MLA, **ROUTED),
    "MiniCPM3": family("MiniCPM3ForCausalLM", scale_emb=2, dim_model_base=16, **MLA),
    "Youtu": family("YoutuForCausalLM", **MLA),
    # what cannot be translated
    "OpenAI GPT": family("OpenAIGPTLMHeadModel"),
    "Llama (dynamic rope)": family("LlamaForCausalLM", **rope("dynamic", factor=2.0)),
    "Phi-3 (longrope)": family(
        "Phi3ForCausalLM",
        original_max_position_embeddings=128,
        **rope("longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, original_max_position_embeddings=128),
    ),
    "Mamba": family("MambaForCausalLM", state_size=8),
    "Mamba-2": family("Mamba2ForCausalLM", num_heads=8, state_size=8, n_groups=1, chunk_size=8),
    "Falcon-Mamba": family("FalconMambaForCausalLM", state_size=8),
    "Jamba": family(
        "JambaForCausalLM",
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    "Bamba": family("BambaForCausalLM", attn_layer_indices=[1], **MAMBA2),
    "Falcon-H1": family("FalconH1ForCausalLM", mamba_d_ssm=64, **MAMBA2),
    "Granite-MoE-Hybrid": family(
        "GraniteMoeHybridForCausalLM",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=4,
        shared_intermediate_size=16,
        **MAMBA2,
    ),
    "Qwen3-Next": family(
        "Qwen3NextForCausalLM",
        num_experts=4,
        shared_expert_intermediate_size=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        partial_rotary_factor=0.5,
        **EXPERTS,
        **FOUR,
    ),
    "LFM2": family("Lfm2ForCausalLM", full_attn_idxs=[1], block_multiple_of=16),
    "MiniMax (lightning attention)": family("MiniMaxForCausalLM", num_local_experts=4, block_size=8),
    "RecurrentGemma": family("RecurrentGemmaForCausalLM", attention_window_size=WINDOW),
    "RWKV": family("RwkvForCausalLM", context_length=512),
    "xLSTM": family("xLSTMForCausalLM", hidden_size=64, num_heads=4, chunk_size=8),
}
