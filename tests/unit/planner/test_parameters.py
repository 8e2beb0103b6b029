"""Parameters and FLOPs, against the real network and torch's own counter."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models import ARCHITECTURES
from models.architecture import Architecture
from models.llama import Llama, LlamaArgs
from models.moe import Moe, MoeArgs
from torchtitan_cp.attention import attend, make_plan
from torchtitan_cp.config import load_config
from torchtitan_cp.config.sections import Model
from torchtitan_cp.config.training import Lora
from torchtitan_cp.data.errors import DataError
from torchtitan_cp.metrics.throughput import flops_per_token
from torchtitan_cp.parallel.lora import apply_lora
from torchtitan_cp.planner.parameters import (
    count_parameters,
    count_trained_parameters,
    sized_model_args,
    total_parameters,
)
from torchtitan_cp.training.model import LayerAttention, cast_parameters
from torchtitan_cp.training.registry import register


@pytest.mark.parametrize(
    ("architecture", "flavor"),
    [(each, flavor) for each in ARCHITECTURES for flavor in each.flavors],
    ids=lambda value: getattr(value, "name", value),
)
def test_parameters_are_those_of_the_network(architecture: Architecture[Any], flavor: str) -> None:
    register(ARCHITECTURES)
    shape = architecture.flavors[flavor]
    shape = dataclasses.replace(shape, vocab_size=shape.vocab_size or 4096)
    with torch.device("meta"):
        model = architecture.build(shape, LayerAttention())
    counts, layers = count_parameters(Model(architecture.name), shape), list(model.layers.parameters())
    rounded = 2 * shape.n_layers - 1 if architecture.name == "qwen3_5" else 0  # where layers differ, to means
    missing = sum(p.numel() for p in model.parameters()) - total_parameters(Model(architecture.name), shape)
    assert 0 <= missing <= rounded
    assert counts.matrices == sum(p.numel() for p in layers if p.ndim > 1) // shape.n_layers
    assert counts.block - counts.matrices == sum(p.numel() for p in layers if p.ndim == 1) // shape.n_layers
    # The sizes say the same of the weights that a token meets.
    assert counts.active_matrices == (shape.linear_parameters() - shape.dim * shape.vocab_size) // shape.n_layers
    assert counts.fused_norms == (architecture.name != "qwen3_5")
    assert counts.qk_norm == shape.qk_norm


def test_linear_flops_are_those_that_torch_counts() -> None:
    shape = LlamaArgs(64, 3, 4, 2, 16, 96, vocab_size=128)
    plan = make_plan(32)
    model = Llama(shape, lambda q, k, v, plan, window: attend(q, k, v, plan))
    model.set_rope([1.0] * 8, 1.0, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 32, dtype=torch.int64), plan.positions, plan).sum().backward()
    # The operator of attention is ours, so the counter sees the linear layers alone. The embedding's rows have no
    # gradient to pass on, but every linear layer's input has one.
    assert counter.get_total_flops() == flops_per_token(shape, 32, [0.0] * shape.n_layers) * 32


def test_with_adapters_a_frozen_weight_costs_no_gradient_of_its_own() -> None:
    register(ARCHITECTURES)
    shape = LlamaArgs(64, 3, 4, 2, 16, 96, vocab_size=128, tie_embeddings=True)
    lora = Lora(4, targets=("w[qvo]$",), train=("tok_embed", "w2"))
    plan, found = make_plan(32), count_trained_parameters("llama", shape, lora)
    model = Llama(shape, lambda q, k, v, plan, window: attend(q, k, v, plan))
    apply_lora(model, lora)
    cast_parameters(model, torch.float32)
    model.set_rope([1.0] * 8, 1.0, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 32, dtype=torch.int64), plan.positions, plan).sum().backward()
    assert counter.get_total_flops() == flops_per_token(shape, 32, [0.0] * shape.n_layers, found.flops) * 32
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    adapters = sum(size for name, size in trained.items() if "lora_" in name)
    assert (found.adapters * 3, found.block * 3) == (adapters, 3 * 64 * 96)
    assert found.outer(True, True, True) == trained["tok_embeddings.weight"] == 64 * 128
    assert found.output, "it is the embedding"


def test_weights_in_nf4_are_those_of_whole_groups() -> None:
    register(ARCHITECTURES)
    shape = LlamaArgs(128, 3, 4, 2, 32, 256, vocab_size=128)
    found = count_trained_parameters("llama", shape, Lora(4, base="nf4"))
    assert (found.quantized, found.largest_quantized) == (2 * 128 * 128 + 3 * 128 * 256, 128 * 256)
    assert count_trained_parameters("llama", shape, Lora(4)).quantized == 0


def test_tensor_parallel_ranks_share_one_matrix_of_an_adapter() -> None:
    register(ARCHITECTURES)
    shape, lora = LlamaArgs(64, 2, 4, 2, 16, 96, vocab_size=128), Lora(4, targets=("wq", "wo"))
    whole, shared = (count_trained_parameters("llama", shape, lora, tp).adapters for tp in (1, 2))
    assert (whole, shared) == (4 * (64 + 64) * 2, 4 * (64 + 32) * 2)


def test_a_token_meets_the_experts_it_goes_to_and_the_router() -> None:
    register(ARCHITECTURES)
    shape = MoeArgs(64, 3, 4, 2, 16, 96, vocab_size=128, n_experts=8, experts_per_token=2)
    model = Moe(shape, LayerAttention())
    model.set_rope([1.0] * 8, 1.0, torch.device("cpu"))
    plan = make_plan(32)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 32, dtype=torch.int64), plan.positions, {0: plan})
    # For the balance of the experts the router runs a second time, and its sums are multiplied with the shares. The
    # rows of a token's two experts are weighed.
    router, balance, weighed = 3 * 64 * 8, 3 * 8, 3 * 2 * 64
    per_token = flops_per_token(shape, 32, [0.0] * 3) / 3 + 2 * (router + weighed)
    assert counter.get_total_flops() == per_token * 32 + 2 * balance
    counts = count_parameters(Model("moe"), shape)
    assert counts.block - counts.active_matrices == 6 * 3 * 64 * 96 + 2 * 64


def test_attention_flops_are_half_of_those_that_torch_counts_for_a_full_mask() -> None:
    shape = LlamaArgs(64, 1, 4, 4, 16, 96, vocab_size=128)
    q = torch.randn(1, 4, 64, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    attention = flops_per_token(shape, 64) - flops_per_token(shape, 64, [0.0])
    assert attention * 64 == pytest.approx(counter.get_total_flops() / 2)


def test_the_vocabulary_is_the_shapes_or_else_the_tokenizers() -> None:
    def vocabulary(*overrides: str) -> int:
        size: int = sized_model_args(load_config("train_configs/stdlib_on_cpu.toml", overrides)).vocab_size
        return size

    register(ARCHITECTURES)
    assert vocabulary("--model.flavor=debug") == 4096
    assert vocabulary("--model.flavor=8B") == 128256
    with pytest.raises(DataError, match=r"none\.model"):
        vocabulary("--model.flavor=debug", "--tokenizer.path=none.model")
