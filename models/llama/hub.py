"""Llama and its relatives as Hugging Face checkpoints: names of weights and keys of config.json, as data.

Source: the `modeling_*` and `configuration_*` files of Hugging Face transformers.
"""

from models.architecture import Hub, HubConfig
from models.llama.flavors import LlamaArgs

# Ours -> theirs; `*` is the layer's number. RoPE pairs halves in both, so no row moves.
NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wq.bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attention.wk.bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attention.wv.bias": "model.layers.*.self_attn.v_proj.bias",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}

# model_type -> (qkv_bias, qk_norm).
FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),  # one window in all layers
    "ministral": (False, False),  # one in some layers
    "qwen2": (True, False),
    "qwen3": (False, True),
}
# Defaults of the transformers classes for keys that a released config leaves out.
DEFAULTS = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6}
MISTRAL_WINDOW = 4096


def sizes(config: HubConfig) -> dict[str, object]:
    """Values of a LlamaArgs from a config.json.

    Raises:
        ValueError: this block cannot be the described model; the message says why.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type is {family!r}, and this architecture is {', '.join(FAMILIES)}")
    for key, wanted in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if config.get(key, wanted) != wanted:
            raise ValueError(f"{key} is {config[key]!r}, and these blocks have {wanted!r}")
    filled = {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    if texts := [key for key in KEYS.values() if isinstance(filled.get(key), str)]:
        raise ValueError(f"{texts[0]} is {filled[texts[0]]!r}, in quotes")
    filled.setdefault("num_key_value_heads", filled["num_attention_heads"])
    filled.setdefault("head_dim", filled["hidden_size"] // max(1, filled["num_attention_heads"]))
    qkv_bias, qk_norm = FAMILIES[family]
    found = {name: filled[key] for name, key in KEYS.items()}
    return {**found, "qkv_bias": qkv_bias, "qk_norm": qk_norm, "windows": _windows(family, filled, config)}


def _windows(family: str, filled: HubConfig, config: HubConfig) -> tuple[int, ...]:
    """The windows of the layers in turn, as their shortest period."""
    layers, kinds = filled["num_hidden_layers"], filled.get("layer_types")
    window = config.get("sliding_window", MISTRAL_WINDOW) or 0
    if family == "mistral" or (family == "ministral" and not kinds):
        return (window,)
    if family == "llama" or (family.startswith("qwen") and not filled.get("use_sliding_window", False)):
        return (0,)
    first = filled.get("max_window_layers", 28)
    kinds = kinds or ["sliding_attention" if number >= first else "full_attention" for number in range(layers)]
    windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    periods = (length for length in range(1, layers + 1) if layers % length == 0)
    return next(tuple(windows[:length]) for length in periods if windows[:length] * (layers // length) == windows)


def config(args: LlamaArgs) -> dict[str, object]:
    """A config.json of these args, without rotary embedding, length and tokens.

    Raises:
        ValueError: no family combines these options; the message names them.
    """
    if args.sinks or (args.qkv_bias and args.qk_norm):
        options = [name for name in ("sinks", "qkv_bias", "qk_norm") if getattr(args, name)]
        raise ValueError(f"no published family of this block has {' and '.join(options)}")
    windows = {mixer.window for mixer in args.mixers}
    without_options = "llama" if not any(windows) else "ministral" if 0 in windows else "mistral"
    family = "qwen2" if args.qkv_bias else "qwen3" if args.qk_norm else without_options
    if len(windows - {0}) > 1:
        raise ValueError(f"{family} has one window in all layers that have any, and windows = {list(args.windows)}")
    found: dict[str, object] = {key: getattr(args, name) for name, key in KEYS.items()}
    found |= {"architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family, "hidden_act": "silu"}
    if family == "llama" or family == "qwen3":
        found["attention_bias"] = False
    if family != "llama":
        found["sliding_window"] = max(windows) or None
    if family == "ministral" or family.startswith("qwen"):
        kinds = ["sliding_attention" if mixer.window else "full_attention" for mixer in args.mixers]
        found["layer_types"] = kinds
    if family.startswith("qwen"):
        found["use_sliding_window"] = any(windows)
    return found


HUB = Hub(NAMES, sizes, config)
