"""Qwen3.5 as Hugging Face checkpoints: names of weights and keys of config.json, as data.

Source: `modeling_qwen3_5` and `configuration_qwen3_5` of Hugging Face transformers.
"""

from models.architecture import Hub, HubConfig
from models.llama import hub as llama
from models.qwen3_5.flavors import HybridArgs

NAMES = {name: theirs for name, theirs in llama.NAMES.items() if not name.endswith("bias")} | {
    "layers.*.attention.wqkv.weight": "model.layers.*.linear_attn.in_proj_qkv.weight",
    "layers.*.attention.wz.weight": "model.layers.*.linear_attn.in_proj_z.weight",
    "layers.*.attention.wb.weight": "model.layers.*.linear_attn.in_proj_b.weight",
    "layers.*.attention.wa.weight": "model.layers.*.linear_attn.in_proj_a.weight",
    "layers.*.attention.conv_weight": "model.layers.*.linear_attn.conv1d.weight",
    "layers.*.attention.A_log": "model.layers.*.linear_attn.A_log",
    "layers.*.attention.dt_bias": "model.layers.*.linear_attn.dt_bias",
    "layers.*.attention.norm.weight": "model.layers.*.linear_attn.norm.weight",
    "layers.*.attention.out.weight": "model.layers.*.linear_attn.out_proj.weight",
}
KEYS = {
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}


def sizes(config: HubConfig) -> dict[str, object]:
    """Values of a HybridArgs from a config.json, of a multimodal one those of its text model.

    Raises:
        ValueError: this block cannot be the described model; the message says why.
    """
    text = config.get("text_config", config)
    if text.get("model_type") != "qwen3_5_text":
        raise ValueError(f"model_type is {text.get('model_type')!r}, and this architecture is qwen3_5")
    kinds = text.get("layer_types") or []
    every = text.get("full_attention_interval") or (kinds.index("full_attention") + 1 if kinds else 4)
    found = {
        # Of a multimodal one, tie_word_embeddings stands beside text_config.
        **llama.sizes({**text, **config, "model_type": "qwen3", "layer_types": None}),
        **{name: text[key] for name, key in KEYS.items()},
        "attention_every": every,
        "rotary_share": {**text, **(text.get("rope_parameters") or {})}.get("partial_rotary_factor", 0.25),
    }
    if kinds and kinds != _layer_types(HybridArgs(**found)):
        raise ValueError("layer_types is not full attention in the last of every few layers")
    return found


def _layer_types(args: HybridArgs) -> list[str]:
    return ["linear_attention" if linear else "full_attention" for linear in args.linear_layers]


def config(args: HybridArgs) -> dict[str, object]:
    """A config.json of these args, without rotary embedding, length and tokens."""
    return {
        **{key: getattr(args, name) for name, key in (llama.KEYS | KEYS).items()},
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": _layer_types(args),
        "partial_rotary_factor": args.rotary_share,
    }


HUB = Hub(NAMES, sizes, config)
