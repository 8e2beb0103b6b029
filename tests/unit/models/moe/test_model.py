"""Experts against a loop over tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.moe import Moe, MoeArgs
from models.moe.model import Experts, MoeBlock, Router
from tests.support.runs import EXPERTS, write_run
from torchtitan_cp.cli import check as preflight

SHAPE = MoeArgs(48, 2, 4, 2, 16, 40, 97, n_experts=6, experts_per_token=2, balance=0.5)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"normalize_shares": False},
    "normalized": {},
    "scaled": {"routed_scaling_factor": 2.5},
    "sigmoid": {"score_function": "sigmoid"},
    "shared": {"n_shared_experts": 2},
    "bias": {"expert_bias": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_token_gets_the_shared_sum_of_its_experts(option: str) -> None:
    shape = MoeArgs(8, 1, 2, 1, 4, 12, 97, n_experts=5, experts_per_token=3, **OPTIONS[option])
    block = MoeBlock(shape, Attend(), 0).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    bias = torch.zeros(5)
    if block.router.expert_bias is not None:
        bias = torch.nn.init.normal_(block.router.expert_bias)
    hidden = torch.randn(2, 7, 8, dtype=torch.float64)
    got = block.mlp(hidden)
    for row, token in [(0, 0), (1, 6), (1, 3)]:
        x = block.ffn_norm(hidden[row, token])
        logits = (block.router.gate.weight @ x).float()
        scores = logits.sigmoid() if option == "sigmoid" else logits.softmax(-1)
        chosen = (scores + bias).argsort(descending=True)[:3]
        shares = scores[chosen] / (1.0 if option == "plain" else scores[chosen].sum())
        want = hidden[row, token].clone()
        for expert, share in zip(chosen, shares * shape.routed_scaling_factor, strict=True):
            w1, w2, w3 = (getattr(block.experts, name)[expert] for name in ("w1", "w2", "w3"))
            want += share * (w2 @ (F.silu(w1 @ x) * (w3 @ x)))
        if block.shared_experts:
            w1, w2, w3 = (getattr(block.shared_experts, name).weight for name in ("w1", "w2", "w3"))
            assert w1.shape == (24, 8)
            want += w2 @ (F.silu(w1 @ x) * (w3 @ x))
        # Shares are fp32.
        assert (got[row, token] - want).norm() < 1e-6 * want.norm()
    assert [x.dtype for x in block.router.bfloat16()(hidden.bfloat16())] == [torch.float32] * 2 + [
        torch.int64,
        torch.float32,
    ]


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    experts = Experts(SHAPE)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    experts(torch.randn(3, 48), torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.ones(3, 2)).sum().backward()
    assert experts.w1.grad is not None
    assert experts.w1.grad[:2].abs().amin((1, 2)).min() >= 0
    assert experts.w1.grad[:2].norm() > 0
    assert experts.w1.grad[2:].norm() == 0


class Attend:
    """Attention without documents, and the losses that a forward adds."""

    def __init__(self) -> None:
        self.added: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: object, window: int) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)

    def sum_ranks(self, x: Tensor, plan: object) -> Tensor:
        return x

    def add_loss(self, hidden: Tensor, loss_sum: Tensor) -> Tensor:
        self.added.append(loss_sum)
        return hidden


def make(attend: Attend) -> Moe:
    model = Moe(SHAPE, attend)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.set_rope([0.5**pair for pair in range(8)], 1.0, torch.device("cpu"))
    return model


def test_the_balance_loss_is_the_formula_and_only_in_training() -> None:
    attend = Attend()
    model, tokens = make(attend), torch.randint(97, (3, 10))
    routed: list[tuple[Tensor, ...]] = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda module, inputs, output: routed.append(output))
    logits = model(tokens, torch.arange(10), None)
    of_layers = routed[::2]  # of the two times it runs in a layer
    (balance,) = attend.added
    assert torch.equal(model.eval()(tokens, torch.arange(10), None), logits)
    assert attend.added == [balance]
    want = 0.0
    for _, probabilities, chosen, _ in of_layers:
        for row in range(3):
            for expert in range(6):
                share = (chosen[row] == expert).sum() / 20
                want += 0.5 * 6 * float(share * probabilities[row, :, expert].detach().sum())
    assert balance.item() == pytest.approx(want, rel=1e-5)


class LargestStorage(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that an operator gave."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return result


def test_the_losses_of_routers_make_no_tensor_larger_than_the_logits_and_their_inputs() -> None:
    block = MoeBlock(replace(SHAPE, n_experts=64, experts_per_token=8), Attend(), 0)
    with LargestStorage() as largest:
        block.router_losses(torch.randn(2, 512, 48), None)
    assert largest.bytes == 2 * 512 * 64 * 4


def test_routers_that_agree_with_the_loss_are_balanced_by_it() -> None:
    """Followed alone, its gradient evens out how often experts are chosen."""
    torch.manual_seed(1)
    block = MoeBlock(SHAPE, Attend(), 0)
    hidden = torch.randn(4, 64, 48) + 1.0
    torch.nn.init.normal_(block.router.gate.weight, std=0.1)
    block.router.gate.weight.data[0] += 0.1

    def most_chosen() -> float:
        _, _, chosen, _ = block.router(block.ffn_norm(hidden))
        return (chosen.flatten().bincount(minlength=6).max() / chosen.numel()).item()

    before = most_chosen()
    optimizer = torch.optim.SGD(block.router.parameters(), lr=8e-5)
    for _ in range(100):
        optimizer.zero_grad()
        block.router_losses(hidden, None).backward()
        optimizer.step()
    assert before > 0.4
    assert most_chosen() < 0.2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--compile.enable=true", "set compile.enable = false"),
        ("--model.overrides.experts_per_token=7", "experts_per_token = 7 of n_experts = 6 cannot be chosen"),
        ("--model.overrides.balance=-1.0", "balance = -1.0 would reward experts"),
        ("--model.overrides.norm_eps=-1.0", "vocab_size and norm_eps must not be negative"),
        ("--model.hub_checkpoint=/none", "model.hub_checkpoint: /none/config.json cannot be read"),
    ],
)
def test_what_experts_cannot_have_is_refused_before_a_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    path = write_run(tmp_path, EXPERTS)
    assert preflight.main([str(path), "--ranks", "2", override]) == 2
    assert message in capsys.readouterr().err
