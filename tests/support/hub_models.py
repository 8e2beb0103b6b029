"""Small random-weight models of transformers, one for each family, as saved folders."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.runs import TINY, write_run
from torchtitan_cp.config import ConfigError, load_config
from torchtitan_cp.training.registry import model_args_of

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 288,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, rope_parameters=LLAMA31),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=20),
    "mistral, no window": MistralConfig(**SIZES, sliding_window=None),
    "ministral": MinistralConfig(
        **SIZES, head_dim=12, sliding_window=20, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, windows in the last layers": Qwen2Config(**SIZES, **SLIDING),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}
EXPERTS = Qwen3MoeConfig(
    **SIZES, head_dim=16, moe_intermediate_size=96, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
)
OURS = "dim = 48, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 96"
# Of each: our sizes beside OURS, and the rotary embedding of the stage.
SHAPES = {
    "llama": (
        "head_dim = 12, tie_embeddings = false, norm_eps = 1e-6",
        '{theta = 500000.0, kind = "llama3", factor = 8.0, original_seq_len = 64}',
    ),
    "llama, tied": ("head_dim = 12, norm_eps = 1e-6", "{}"),
    "mistral": ("head_dim = 12, tie_embeddings = false, norm_eps = 1e-6, windows = [20]", "{}"),
    "mistral, no window": ("head_dim = 12, tie_embeddings = false, norm_eps = 1e-6", "{}"),
    "ministral": ("head_dim = 12, tie_embeddings = false, norm_eps = 1e-6, windows = [20, 0]", "{}"),
    "qwen2": ("head_dim = 12, tie_embeddings = false, norm_eps = 1e-6, qkv_bias = true", "{}"),
    "qwen2, windows in the last layers": (
        "head_dim = 12, tie_embeddings = false, norm_eps = 1e-6, qkv_bias = true, windows = [0, 0, 20, 20]",
        "{}",
    ),
    "qwen3": ("head_dim = 16, norm_eps = 1e-6, qk_norm = true", "{}"),
}


def save_model(family: str, folder: Path, max_shard_size: str = "5GB") -> None:
    """Random weights, none of them zero or one: biases and norms count too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            parameter.normal_(center, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def write_start(folder: Path, family: str, max_shard_size: str = "5GB") -> Path:
    """A model of this family, and a config of ours that starts from it."""
    folder.mkdir(exist_ok=True)
    save_model(family, folder / "hub", max_shard_size)
    sizes, rope = SHAPES[family]
    model = f'flavor = "debug"\nhub_checkpoint = "{folder}/hub"\noverrides = {{{OURS}, {sizes}}}'
    lines = [line for line in TINY.splitlines() if not line.startswith("overrides")]
    text = "\n".join(lines).format(folder=folder).replace('flavor = "debug"', model)
    return write_run(folder, f"{text}\nrope = {rope}\n".replace("{", "{{").replace("}", "}}"))


def write_groups_start(folder: Path) -> tuple[Path, list[str]]:
    """A Llama in bf16, most of whose weights are whole groups of NF4, and a config of ours; the keys that start there.

    The weights of keys and values are half a group each.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **sizes}))
    model.to(torch.bfloat16).save_pretrained(folder / "hub")
    return write_run(folder), [*PLAIN, f"--model.hub_checkpoint={folder}/hub"]


def hub_problem(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        model_args_of(load_config(path, overrides).model)
    return str(caught.value)


def change_config(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


PLAIN = ("--model.flavor=", "--model.overrides={}")
