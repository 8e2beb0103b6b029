"""Tiny config.json of families of transformers: those that the trainer takes, and those that it refuses.

Windows are shorter than the sequences of tests, so that a lost one shows.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.huggingface.args import args_from_config
from models.huggingface.probe import ModelProbe

Keys = dict[str, Any]

WINDOW = 20
SIZES: Keys = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 288,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD: Keys = {"head_dim": 16}
# For families whose window is of the layers of a type.
KINDS = ["sliding_attention", "full_attention"]
ALTERNATE: Keys = {"sliding_window": WINDOW, "layer_types": KINDS}
SCALED: Keys = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
CAPS: Keys = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
LATENT: Keys = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
ROUTED: Keys = {"moe_intermediate_size": 24, "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2}
GROUPED: Keys = {**ROUTED, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
LOCAL: Keys = {"num_local_experts": 6, "num_experts_per_tok": 2}
EXPERTS: Keys = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT2: Keys = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 512} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)


MAMBA2: Keys = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_d_ssm": 96}
LINEAR: Keys = {
    **HEAD,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
SHARED: Keys = {**EXPERTS, "shared_expert_intermediate_size": 24}
KIMI: Keys = {**LATENT, **EXPERTS, "num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4}
CONVOLUTION: Keys = {"layer_types": ["conv", "full_attention"]}


def rope(theta: float, **others: Any) -> Keys:
    return {"rope_theta": theta, "rope_type": "default", **others}


def yarn(theta: float, **others: Any) -> Keys:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return rope(theta, **scaling, beta_fast=32.0, beta_slow=1.0, **others)


def two_ropes(**full: Any) -> Keys:
    """Rotaries of their own for local and for global layers."""
    return {"rope_parameters": {"sliding_attention": rope(1e4), "full_attention": full or rope(1e6)}}


LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEEPSEEK_YARN = yarn(1e4, mscale=1.0, mscale_all_dim=1.0)

# model_type and keys, beside SIZES.
_TAKEN: dict[str, tuple[str, Keys]] = {
    "Llama": ("llama", {**HEAD, "rope_parameters": LLAMA31}),
    "Llama, tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "Llama, linear": ("llama", {"rope_parameters": rope(1e4, rope_type="linear", factor=4.0)}),
    "Mistral": ("mistral", {**HEAD, "sliding_window": WINDOW}),
    "Ministral": ("ministral", {**HEAD, **ALTERNATE}),
    "Ministral 3": (
        "ministral3",
        {**HEAD, "sliding_window": None, "rope_parameters": yarn(1e6, llama_4_scaling_beta=0.1)}
        | {"tie_word_embeddings": True},
    ),
    "Mixtral": ("mixtral", {**LOCAL, "sliding_window": WINDOW}),
    "Qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "Qwen2-MoE": (
        "qwen2_moe",
        {
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "Qwen3": ("qwen3", {**HEAD, "use_sliding_window": True, **ALTERNATE}),
    "Qwen3-MoE": (
        "qwen3_moe",
        {**HEAD, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "Phi-3": ("phi3", {"sliding_window": WINDOW}),
    "Phi-3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 4,  # below the tests' documents: all take the long factors
            "rope_parameters": rope(
                1e4, rope_type="longrope", short_factor=[1.0] * 6, long_factor=[1.0, 1.1, 1.5, 2.0, 3.0, 4.0]
            ),
        },
    ),
    "Gemma": ("gemma", HEAD),
    "Gemma 2": ("gemma2", {**HEAD, **ALTERNATE, **CAPS}),
    "Gemma 3": ("gemma3_text", {**HEAD, **ALTERNATE, **two_ropes(), "query_pre_attn_scalar": 24}),
    "Gemma 3, four layers": (
        "gemma3_text",
        {**HEAD, **ALTERNATE, **two_ropes(**rope(1e6, rope_type="linear", factor=8.0))}
        | {"num_hidden_layers": 4, "layer_types": 2 * KINDS},
    ),
    "Gemma 3n": (
        "gemma3n_text",
        {
            **HEAD,
            **two_ropes(),
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": 2 * KINDS,
            "num_kv_shared_layers": 2,
            "intermediate_size": [64] * 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "vocab_size_per_layer_input": 288,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
    ),
    "Gemma 4": (
        "gemma4_text",
        {
            **HEAD,
            **two_ropes(**rope(1e6, rope_type="proportional", partial_rotary_factor=0.25)),
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": 2 * KINDS,
            "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}},
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 288,
            # Of 8 numbers the norm may be near 0: in fp32 eager's own gradients were then 3e-4 off those of fp64.
            "hidden_size_per_layer_input": 32,
            "final_logit_softcapping": 3.0,
        },
    ),
    "Gemma 4 unified": ("gemma4_unified_text", {**HEAD, **ALTERNATE}),
    "VaultGemma": ("vaultgemma", {**HEAD, **ALTERNATE, **CAPS}),
    "gpt-oss": ("gpt_oss", {**HEAD, **ALTERNATE, **LOCAL, "rope_parameters": yarn(150000.0, truncate=False)}),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {**ALTERNATE, **two_ropes(**yarn(500000.0))}),
    "OLMoE": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "FlexOlmo": ("flex_olmo", {"num_experts": 6, "num_experts_per_tok": 2}),
    "GLM": ("glm", {**HEAD, "rope_parameters": rope(1e4, partial_rotary_factor=0.5)}),
    "GLM-4": ("glm4", {**HEAD, "rope_parameters": rope(1e4, partial_rotary_factor=0.5)}),
    "GLM-4.5": (
        "glm4_moe",
        {**HEAD, **GROUPED, "use_qk_norm": True, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
        | {"rope_parameters": rope(1e4, partial_rotary_factor=0.5), "num_nextn_predict_layers": 0},
    ),
    "GLM-4.7-Lite": ("glm4_moe_lite", {**LATENT, **ROUTED, "mlp_layer_types": ["dense", "sparse"]}),
    "Granite": ("granite", SCALED),
    "Granite MoE": ("granitemoe", {**SCALED, **LOCAL}),
    "Granite MoE, shared": ("granitemoeshared", {**SCALED, **LOCAL, "shared_intermediate_size": 24}),
    "Granite SWA": ("granite_swa", {**SCALED, **ALTERNATE}),
    "Cohere": ("cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    "Cohere 2": ("cohere2", {**ALTERNATE, "logit_scale": 0.3}),
    "SmolLM3": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": KINDS, "no_rope_layers": [1, 0]},
    ),
    "DeepSeek-V2": (
        "deepseek_v2",
        {**LATENT, **ROUTED, "first_k_dense_replace": 1, "rope_parameters": DEEPSEEK_YARN, "norm_topk_prob": False},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {**LATENT, **GROUPED, "first_k_dense_replace": 1, "rope_parameters": DEEPSEEK_YARN}
        | {"num_nextn_predict_layers": 0},
    ),
    "Youtu": ("youtu", LATENT),
    "MiniCPM3": ("minicpm3", {**LATENT, "dim_model_base": 24}),
    "Sarvam MLA": ("sarvam_mla", {**LATENT, **ROUTED, "q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN}),
    "Sarvam MoE": ("sarvam_moe", {**HEAD, **ROUTED, "attention_bias": True}),
    "MiniMax-M2": ("minimax_m2", {**HEAD, **LOCAL}),
    "MiMo-V2-Flash": (
        "mimo_v2_flash",
        {
            **ROUTED,
            "head_dim": 16,
            "v_head_dim": 12,
            **ALTERNATE,
            **two_ropes(**rope(1e6, partial_rotary_factor=0.5)),
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "dots.llm1": (
        "dots1",
        {**GROUPED, **ALTERNATE, "first_k_dense_replace": 1},
    ),
    "Exaone 3": ("exaone", {"rope_parameters": LLAMA31}),
    "Exaone 4": ("exaone4", {**ALTERNATE, "sliding_window_pattern": 2}),
    "ERNIE 4.5": ("ernie4_5", HEAD),
    "ERNIE 4.5 MoE": (
        "ernie4_5_moe",
        {"moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 1}
        | {"moe_layer_end_index": 1},
    ),
    "Seed-OSS": ("seed_oss", {**HEAD, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "Apertus": ("apertus", {}),
    "Apertus 1.5": ("apertus1p5_text", {"output_vocab_size": 200}),
    "Arcee": ("arcee", HEAD),
    "Helium": ("helium", {"head_dim": 12}),
    "nanochat": ("nanochat", {"final_logit_softcapping": 3.0}),
    "Hunyuan": (
        "hunyuan_v1_dense",
        {**HEAD, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}},
    ),
    "StableLM": (
        "stablelm",
        {"use_qkv_bias": True, "qk_layernorm": True, "rope_parameters": rope(1e4, partial_rotary_factor=0.5)},
    ),
    "Starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "Nemotron": ("nemotron", {**HEAD, "rope_parameters": rope(1e4, partial_rotary_factor=0.5)}),
    "CWM": ("cwm", {**HEAD, **ALTERNATE, "rope_parameters": LLAMA31}),
    "GPT-2": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "GPTBigCode": ("gpt_bigcode", GPT2),
    "GPT-NeoX": ("gpt_neox", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "Persimmon": ("persimmon", {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_key_value_heads": 4}),
    "BitNet": ("bitnet", {}),
    "InternLM3": ("internlm3", HEAD),
    "IQuestCoder": ("iquestcoder", HEAD),
    "HyperCLOVA X": ("hyperclovax", HEAD),
    "Jais 2": ("jais2", HEAD),
    "Cohere Compass": ("cohere_compass_text", {**HEAD, **ALTERNATE, **two_ropes()}),
    "Aria": ("aria_text", {**HEAD, "moe_num_experts": 6, "moe_topk": 2, "attention_dropout": 0.0}),
    "AFMoE": ("afmoe", {**HEAD, **ALTERNATE, **EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1}),
    "A.X K1": ("axk1", {**LATENT, **GROUPED, "head_dim": 8, "mlp_layer_types": ["dense", "sparse"]}),
    "Cohere 2 MoE": (
        "cohere2_moe",
        {**HEAD, **ALTERNATE, **EXPERTS, "num_shared_experts": 1, "mlp_layer_types": ["sparse"] * 2},
    ),
    "Exaone MoE": (
        "exaone_moe",
        {**ALTERNATE, **EXPERTS, "num_shared_experts": 1, "n_group": 2, "topk_group": 1}
        | {"mlp_layer_types": ["dense", "sparse"]},
    ),
    "Flint": ("flint", {**HEAD, **ALTERNATE, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "Granite MoE SWA": ("granitemoe_swa", {**SCALED, **ALTERNATE, **LOCAL, "shared_intermediate_size": 24}),
    "Hunyuan MoE": ("hunyuan_v1_moe", {**HEAD, "num_experts": 6, "moe_topk": 2, "rope_parameters": rope(1e4)}),
    "Hunyuan 3": (
        "hy_v3",
        {**HEAD, **EXPERTS, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "JetMoE": ("jetmoe", {**LOCAL, "kv_channels": 16}),
    "Kolibri": ("kolibri1", {**HEAD, **ALTERNATE, **LOCAL, "shared_expert_intermediate_size": 24}),
    "Laguna": (
        "laguna",
        {**HEAD, **EXPERTS, "shared_expert_intermediate_size": 24, "layer_types": ["full_attention"] * 2}
        | {"mlp_layer_types": ["dense", "sparse"]},
    ),
    "MiniMax-M3": (
        "minimax_m3_vl_text",
        {**HEAD, **LOCAL, "rotary_dim": 8, "shared_intermediate_size": 24, "layer_types": ["full_attention"] * 2}
        | {"mlp_layer_types": ["sparse"] * 2},
    ),
    "Solar Open": ("solar_open", {**HEAD, **GROUPED}),
    "Beam": ("beam", {"sliding_window": WINDOW}),
    "Mellum": (
        "mellum",
        {**HEAD, **ALTERNATE, **LOCAL, "moe_intermediate_size": 24, **two_ropes()}
        | {"mlp_layer_types": ["sparse"] * 2},
    ),
    # Convolutions and recurrences.
    # The gated norm divides a head's output by its size, which may be near 0 after few tokens. The gates of a larger
    # model, here and in transformers' own fp32, are then up to 3e-4 off those of fp64.
    "Qwen3-Next": ("qwen3_next", {**LINEAR, **SHARED, "hidden_size": 24}),
    "Qwen3.5": ("qwen3_5_text", LINEAR),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", {**LINEAR, **SHARED}),
    "OLMo-Hybrid": ("olmo_hybrid", LINEAR),
    "Kimi Linear": (
        "kimi_linear",
        {**KIMI, "q_lora_rank": None, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Ling 2.5": (
        "bailing_hybrid",
        {**KIMI, "num_expert_group": 2, "topk_group": 1, "layer_group_size": 2, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "Lara Mini": (
        "lara_mini",
        {**LINEAR, **SHARED, "num_hidden_layers": 3, "layer_types": ["linear_attention", *KINDS]}
        | {"sliding_window": WINDOW},
    ),
    "Nemotron-H": (
        "nemotron_h",
        {
            **HEAD,
            **ROUTED,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "moe_latent_size": 32,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "Falcon-H1": ("falcon_h1", {**MAMBA2, "mamba_n_groups": 1}),
    "Granite 4 hybrid": (
        "granitemoehybrid",
        {**SCALED, **LOCAL, **MAMBA2, "shared_intermediate_size": 24, "layer_types": ["mamba", "attention"]},
    ),
    "Bamba": ("bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    "Zamba2": (
        "zamba2",
        {
            **{"hidden_size": 8, "intermediate_size": 16, "adapter_rank": 2},  # larger ones would round by 1e-4
            "layers_block_type": ["hybrid", "hybrid"],
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "num_key_value_heads": 4,
        },
    ),
    "LFM2": ("lfm2", CONVOLUTION),
    "LFM2-MoE": ("lfm2_moe", {**CONVOLUTION, **EXPERTS, "num_dense_layers": 1}),
    "LFM3": ("lfm3", {**HEAD, **CONVOLUTION}),
}


def _known(families: dict[str, tuple[str, Keys]]) -> dict[str, Keys]:
    """Their config.json, without those of types that this version of transformers lacks."""
    whole = {name: {**SIZES, **keys, "model_type": model_type} for name, (model_type, keys) in families.items()}
    return {name: config for name, config in whole.items() if config["model_type"] in CONFIG_MAPPING}


FAMILIES = _known(_TAKEN)
LACKING = _TAKEN.keys() - FAMILIES.keys()

# Those that are also compared on ranks.
ON_RANKS = (
    "Llama",
    "Mistral",
    "Qwen3",
    "Qwen3-MoE",
    "Gemma 2",
    "Gemma 3",
    "Gemma 4",
    "gpt-oss",
    "OLMo 3",
    "DeepSeek-V3",
    "Nemotron-H",
    "Qwen3-Next",
    "Kimi Linear",
    "Granite 4 hybrid",
    "LFM2",
)

SPARSE: Keys = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
DORY: Keys = {**HEAD, "sliding_window": WINDOW, "num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1}

# model_type, and keys beside SIZES.
_REFUSED: dict[str, tuple[str, Keys]] = {
    # The mask alone knows the window, or the model counts positions of its shard.
    "PhiMoE": ("phimoe", {**LOCAL, "sliding_window": WINDOW, "router_jitter_noise": 0.0}),
    "Gemma, as in PaliGemma": ("gemma", {**HEAD, "use_bidirectional_attention": True}),
    "Mistral, a window of 0": ("mistral", {"sliding_window": 0}),
    "PhiMoE, jitter": ("phimoe", {**LOCAL, "router_jitter_noise": 0.01}),
    "Llama 4": (
        "llama4_text",
        {**HEAD, **LOCAL, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 64, "num_hidden_layers": 4},
    ),
    # Two attentions in a layer, or a layer that runs twice.
    "Dory": ("dory", DORY),
    "HRM-Text": ("hrm_text", {}),
    "LongCat Flash": (
        "longcat_flash",
        {
            **LATENT,
            **ROUTED,
            "head_dim": 8,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 24,
        }
        | {"moe_topk": 2},
    ),
    # Convolutions and recurrences that run no function we know.
    "MiniMax-01": ("minimax", {**HEAD, **LOCAL, "layer_types": ["linear_attention", "full_attention"]}),
    "Jamba": (
        "jamba",
        {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
        | {"use_mamba_kernels": False},
    ),
    "RecurrentGemma": (
        "recurrent_gemma",
        {"num_hidden_layers": 3, "lru_width": 48, "attention_window_size": WINDOW, "num_key_value_heads": 1},
    ),
    "Qwen4-Exp": ("qwen4_exp_text", {}),
    "ZAYA": ("zaya", {**HEAD, "moe_intermediate_size": 24, "num_experts": 4, "router_hidden_size": 8}),
    # No layer calls the attention interface.
    "Bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "XGLM": (
        "xglm",
        {"d_model": 48, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "MPT": ("mpt", {"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    "Mamba": ("mamba", {"state_size": 8}),
    "Mamba 2": ("mamba2", {"state_size": 8, "num_heads": 6, "head_dim": 16, "n_groups": 2, "chunk_size": 16}),
    "RWKV": ("rwkv", {"attention_hidden_size": 48, "context_length": 512}),
    "GPT-NeoX Japanese": (
        "gpt_neox_japanese",
        {"intermediate_multiple_size": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    # Their attention is chosen from a table of their own.
    "Falcon": ("falcon", {}),
    "GPT-J": ("gptj", {**GPT2, "rotary_dim": 8}),
    "GPT-Neo": ("gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}),
    # Masks or sparse indices of their own.
    "DeepSeek-V3.2": ("deepseek_v32", {**LATENT, **GROUPED, **SPARSE, "first_k_dense_replace": 1}),
    "DeepSeek-V4": ("deepseek_v4", {**HEAD, **GROUPED, **SPARSE}),
    "DeepSeek-V4, sparse": (
        "deepseek_v4",
        {**HEAD, **GROUPED, **SPARSE, "layer_types": ["sliding_attention", "compressed_sparse_attention"]},
    ),
    "GLM-DSA": ("glm_moe_dsa", {**LATENT, **ROUTED, **SPARSE, "first_k_dense_replace": 1}),
    "A.X K2": ("axk2", {**LATENT, **ROUTED, "layer_types": ["indexed_attention"] * 2}),
    "Hunyuan 4": ("hy_v4", {**LATENT, **GROUPED, "layer_types": ["indexed_attention"] * 2}),
    "dots3-note": ("dots3_note_text", {**HEAD, "num_key_value_heads": 4}),
    "DiffLlama": ("diffllama", HEAD),
    "Doge": ("doge", {"keep_window_size": 8}),
    "Inkling": (
        "inkling_text",
        {**HEAD, **ROUTED, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
        | {"sliding_window_size": WINDOW, "d_rel": 4, "rel_extent": 32},
    ),
    # Dropout; an output layer with a bias, or a scale for each token.
    "Dory, one loop": ("dory", {**DORY, "n_recurrent_loops": 1}),
    "OPT": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 48, "dropout": 0.1}),
    "Phi": ("phi", {}),
    "CodeGen": ("codegen", {**GPT2, "rotary_dim": 8}),
}
REFUSED = _known(_REFUSED)


def with_layers(config: Keys, layers: int) -> Keys:
    """The same config with this many layers: what it says of each layer is repeated."""
    old = config["num_hidden_layers"]
    repeated = {
        key: [value[layer % old] for layer in range(layers)]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == old
    }
    if numbered := config.get("per_layer_config"):  # by number, of two digits
        of_layer = {number: numbered.get(f"{number % old:02}") for number in range(layers)}
        repeated["per_layer_config"] = {f"{number:02}": keys for number, keys in of_layer.items() if keys}
    return {**config, **repeated, "num_hidden_layers": layers}


def eager_model(config: Keys, seed: int = 0) -> PreTrainedModel:
    """Transformers' own model, in fp32, with its `eager` attention and `random_weights`."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    described = AutoConfig.for_model(config["model_type"], **keys)
    model = AutoModelForCausalLM.from_config(described, attn_implementation="eager", dtype=torch.float32)
    random_weights(model, seed)
    return model.train()


@torch.no_grad()
def random_weights(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that windows, sinks, biases and caps show in the loss; none of them zero or one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.normal_(center, 0.2, generator=generator)


# The table of docs/huggingface.md ------------------------------------------------------------------------------


def as_markdown() -> str:
    """A row for each family, from what the probe finds in its tiny model; variants of a family have none."""
    names = [name for name in FAMILIES if "," not in name]
    rows = "\n".join(_row(name, args_from_config(FAMILIES[name], {}).probe) for name in names)
    head = "| family | `model_type` | state | layers with a window | rotary embeddings | attention | logits | experts |"
    return f"{head}\n|{'---|' * 8}\n{rows}\n"


def _row(name: str, probe: ModelProbe) -> str:
    config, layers = FAMILIES[name], [layer for layer in probe.layers if layer.attention]
    states = {layer.linear.rule or "convolution" for layer in probe.layers if layer.linear}
    windows = [bool(layer.window) for layer in layers]
    rotaries = {layer.rotary for layer in layers}
    dims = {probe.rotaries[layer.rotary] / layer.qk_dim for layer in layers if layer.rotary in probe.rotaries}
    latent = any(layer.v_dim != layer.qk_dim for layer in layers)
    rotary = [
        ("none", "one", "two")[len(rotaries - {""})],
        "of some layers" if "" in rotaries and len(rotaries) > 1 else "",
        "of a part of each head" if min(dims, default=1) < 1 and not latent else "",
    ]
    if probe.learned_positions:
        rotary = ["none, learned positions"]
    attention = {
        "sinks": any(layer.sinks for layer in layers),
        "soft cap": any(layer.softcap for layer in layers),
        "scale of its own": any(abs(layer.scale - layer.qk_dim**-0.5) > 1e-6 for layer in layers),
        "values narrower than keys": latent,
        "heads of two sizes": len({layer.qk_dim for layer in layers}) > 1,
        "keys of earlier layers": bool(config.get("num_kv_shared_layers")),
    }
    logits = {"scaled": abs(probe.logit_scale - 1) > 1e-3, "soft cap": bool(probe.logit_softcap)}
    cells = [
        f"**{name}**" if name in ON_RANKS else name,
        f"`{config['model_type']}`",
        ", ".join(states),
        ("all" if all(windows) else "some") if any(windows) else "",
        ", ".join(filter(None, rotary)),
        *(", ".join(text for text, has in kinds.items() if has) for kinds in (attention, logits)),
        "yes" if any(layer.experts_per_token for layer in probe.layers) else "",
    ]
    return f"| {' | '.join(cells)} |".replace("  |", " |")


if __name__ == "__main__":
    print(as_markdown(), end="")
