"""What is done to a model before it trains changes where its numbers are, and not what they are."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from models.llama import FLAVORS, Llama
from tests.ranks import RankPool
from torchtitan_cp.parallel import Meshes, parallelize
from torchtitan_cp.parallel.apply import fill, recompute_blocks

SHAPE = dataclasses.replace(
    FLAVORS["debug"], dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=64, vocab_size=61
)
TOKENS = torch.arange(48).reshape(2, 24) % 61


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
    rows = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)


def llama(seed: int = 0) -> Llama:
    """A small Llama on the CPU, filled."""
    model = Llama(SHAPE, attend)
    fill(model, seed)
    return with_rope(model)


def with_rope(model: Llama) -> Llama:
    model.set_rope([1.0 / 10 ** (index / 2) for index in range(SHAPE.head_dim // 2)], 1.0, torch.device("cpu"))
    return model


def sharded(seed: int = 0, dtype: torch.dtype = torch.float32) -> Llama:
    """On a rank: the same by way of `parallelize`."""
    with torch.device("meta"):
        model = Llama(SHAPE, attend)
    mesh = Meshes("cpu", dist.get_world_size()).fsdp
    parallelize(model, mesh, compute_dtype=dtype, recompute=False, seed=seed)
    return with_rope(model)


def loss_sum(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1], torch.arange(tokens.shape[1] - 1), None)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def full(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def count_calls(model: Llama) -> Counter[int]:
    calls: Counter[int] = Counter()
    for index, layer in enumerate(model.layers):
        layer.feed_forward.register_forward_hook(lambda *_, index=index: calls.update([index]))
    return calls


def test_recomputed_blocks_run_twice_and_give_the_same_gradients_under_the_same_names() -> None:
    plain, recomputed = llama(), llama()
    names = list(recomputed.state_dict())
    recompute_blocks(recomputed)
    assert list(recomputed.state_dict()) == names
    once, twice = count_calls(plain), count_calls(recomputed)
    losses = [loss_sum(model, TOKENS) for model in (plain, recomputed)]
    for loss in losses:
        loss.backward()
    assert (once, twice) == (Counter({0: 1, 1: 1}), Counter({0: 2, 1: 2}))
    assert torch.equal(*losses)
    want, got = gradients(plain), gradients(recomputed)
    assert all(torch.equal(got[name], want[name]) for name in want)


def saved_bytes(model: nn.Module) -> int:
    """Bytes of the different tensors that the forward keeps for backward."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss_sum(model, TOKENS)
    return sum(kept.values())


def test_recomputed_blocks_keep_less_for_backward() -> None:
    model = llama()
    plain = saved_bytes(model)
    recompute_blocks(model)
    assert saved_bytes(model) < plain / 2


def test_weights_follow_the_seed_and_the_name_and_are_cut_at_three_deviations() -> None:
    one, again, other = (dict(llama(seed).named_parameters()) for seed in (0, 0, 1))
    for name, weight in one.items():
        std = Llama.init_std(llama(), name)
        assert torch.equal(weight, again[name])
        if std is None:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        assert not torch.equal(weight, other[name])
        assert weight.abs().max() <= 3 * std
        # Cutting a normal at three deviations leaves 0.987 of its own.
        assert weight.std().item() == pytest.approx(0.987 * std, rel=4 / (2 * weight.numel()) ** 0.5)
    assert not torch.equal(one["layers.0.attention.wq.weight"], one["layers.1.attention.wq.weight"])


def state_and_gradients(dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor], set[torch.dtype], float]:
    """On a rank that reads its own sequences: weights, gradients, their dtypes, the share of the weights it holds."""
    model = sharded(dtype=dtype)
    weights = {name: full(parameter).detach() for name, parameter in model.named_parameters()}
    loss_sum(model, TOKENS.roll(dist.get_rank(), dims=1)).backward()
    dtypes = {x.dtype for parameter in model.parameters() for x in (parameter, parameter.grad) if x is not None}
    held = sum(parameter.to_local().numel() for parameter in model.parameters())  # type: ignore[attr-defined]
    return weights, gradients(model), dtypes, held / sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sharded_model_has_the_weights_of_a_plain_one_and_the_sum_of_the_ranks_gradients(
    ranks: Callable[[int], RankPool], size: int
) -> None:
    plain = llama()
    for rank in range(size):
        loss_sum(plain, TOKENS.roll(rank, dims=1)).backward()
    want = gradients(plain)
    for weights, got, dtypes, share in ranks(size)(state_and_gradients, torch.float32):
        assert dtypes == {torch.float32}
        # dim 0 of 61 and 32 entries is cut into chunks of the rounded-up size.
        assert share == pytest.approx(1 / size, abs=0.02)
        for name, parameter in plain.named_parameters():
            assert torch.equal(weights[name], parameter), name
            error = (got[name] - want[name]).norm() / want[name].norm()
            assert error < 1e-5, f"{name}: FSDP sums and divides nothing"


def test_computing_in_bf16_leaves_weights_and_gradients_in_fp32(ranks: Callable[[int], RankPool]) -> None:
    fp32 = ranks(2)(state_and_gradients, torch.float32)[0]
    bf16 = ranks(2)(state_and_gradients, torch.bfloat16)[0]
    assert bf16[2] == {torch.float32}
    name = "layers.0.feed_forward.w1.weight"
    assert not torch.equal(bf16[1][name], fp32[1][name]), "the forward ran in fp32"
