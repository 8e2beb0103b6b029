"""First weights follow the rules of transformers, by name and seed alone; buffers have a real model's values."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    PreTrainedConfig,
)

from models.huggingface.args import args_from_config, parse_config
from models.huggingface.init import Initializer
from models.huggingface.model import HuggingFaceModel
from tests.support.huggingface_families import FAMILIES
from torchtitan_cp.config import ConfigError
from torchtitan_cp.parallel.apply import init_weights
from torchtitan_cp.training.model import LayerAttention

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
GEMMA = Gemma3TextConfig(
    **SIZES, num_key_value_heads=2, head_dim=16, layer_types=["sliding_attention", "full_attention"]
)
DEEPSEEK = DeepseekV3Config(
    **SIZES,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=32,
)


NEMOTRON_H = parse_config(FAMILIES["Nemotron-H"])


@pytest.mark.parametrize("config", [GEMMA, DEEPSEEK, NEMOTRON_H], ids=lambda config: config.model_type)
def test_weights_and_buffers_are_those_of_a_model_that_transformers_builds(config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    want = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    initializer = Initializer(config)
    for name, parameter in want.requires_grad_(False).named_parameters():
        found = initializer.parameter(name, 0, CPU)
        assert found.shape == parameter.shape
        tolerance = 6 * float(parameter.std(unbiased=False)) / found.numel() ** 0.5
        assert abs(found.mean() - parameter.mean()) <= tolerance, name
        assert abs(found.std(unbiased=False) - parameter.std(unbiased=False)) <= tolerance, name
    buffers = dict(initializer.shadow.named_buffers())
    assert buffers.keys() == dict(want.named_buffers()).keys()
    for name, buffer in want.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_a_weight_depends_on_its_name_and_the_seed_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    names = ["model.layers.1.mlp.experts.down_proj", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    initializer = Initializer(DEEPSEEK)
    first = {name: initializer.parameter(name, 1, CPU) for name in names}
    assert torch.equal(torch.get_rng_state(), state), "other code draws as before"
    torch.manual_seed(6)
    again = Initializer(DEEPSEEK)
    for name in reversed(names):
        assert torch.equal(again.parameter(name, 1, CPU), first[name])
        assert not torch.equal(again.parameter(name, 2, CPU), first[name])


def test_a_weight_that_its_class_leaves_to_a_checkpoint_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = HuggingFaceModel(args_from_config(FAMILIES["Apertus"], {}), LayerAttention())
    model.to_empty(device="cpu")
    with pytest.raises(
        ConfigError, match=r"transformers does not initialize model.layers.0.mlp.act_fn.alpha_p\n.*hub_checkpoint"
    ):
        init_weights(model, 0)
    init_weights(model, 0, loads=True)
    assert model.get_buffer("model.layers.1.mlp.act_fn.beta").isnan()
