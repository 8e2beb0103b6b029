"""Qwen3-MoE as Hugging Face checkpoints: names of weights and keys of config.json, as data.

Source: `modeling_qwen3_moe` and `configuration_qwen3_moe` of Hugging Face transformers. OLMoE does not fit: its norms
of q and k go over all heads.
"""

from models.architecture import Hub, HubConfig
from models.llama import hub as llama
from models.moe.flavors import MoeArgs

# Each layer's experts are one parameter of ours: the second `*` is the expert.
NAMES = {name: theirs for name, theirs in llama.NAMES.items() if ".feed_forward." not in name} | {
    "layers.*.router.gate.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.experts.w1": "model.layers.*.mlp.experts.*.gate_proj.weight",
    "layers.*.experts.w3": "model.layers.*.mlp.experts.*.up_proj.weight",
    "layers.*.experts.w2": "model.layers.*.mlp.experts.*.down_proj.weight",
}

# PLAIN: keys of the format that have one value here. FIXED: options of ours that the format has no keys for.
PLAIN = {"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False}
FIXED = {
    "score_function": "softmax",
    "routed_scaling_factor": 1.0,
    "n_groups": 1,
    "n_shared_experts": 0,
    "expert_bias": False,
}


def sizes(config: HubConfig) -> dict[str, object]:
    """Values of a MoeArgs from a config.json; the weights of balance and z-loss are the run's own.

    Raises:
        ValueError: this block cannot be the described model; the message says why.
    """
    if config.get("model_type") != "qwen3_moe":
        raise ValueError(f"model_type is {config.get('model_type')!r}, and this architecture is qwen3_moe")
    for key, wanted in PLAIN.items():
        if (config.get(key) or wanted) != wanted:
            raise ValueError(f"{key} is {config[key]!r}, and here it is {wanted!r}")
    dense = {**config, "model_type": "qwen3", "intermediate_size": config["moe_intermediate_size"]}
    return {
        **llama.sizes(dense),
        **FIXED,
        # transformers 5 renamed it.
        "n_experts": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "normalize_shares": config.get("norm_topk_prob", False),
    }


def config(args: MoeArgs) -> dict[str, object]:
    """A config.json of these args, without rotary embedding, length and tokens.

    Raises:
        ValueError: Qwen3-MoE lacks these options; the message names them.
    """
    if not args.qk_norm or any(mixer.window for mixer in args.mixers):
        raise ValueError("Qwen3-MoE has qk_norm, and no windows")
    if others := [name for name, value in FIXED.items() if getattr(args, name) != value]:
        raise ValueError(f"Qwen3-MoE has no {others[0]} other than {FIXED[others[0]]!r}")
    return {
        **llama.config(args),
        **PLAIN,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": args.ffn_dim,
        "num_experts": args.n_experts,
        "num_experts_per_tok": args.experts_per_token,
        "norm_topk_prob": args.normalize_shares,
        # There the loss is a mean over layers, and shares sum to K.
        "router_aux_loss_coef": args.balance * args.n_layers / args.experts_per_token,
    }


HUB = Hub(NAMES, sizes, config)
