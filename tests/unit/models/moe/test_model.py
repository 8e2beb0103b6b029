"""Experts against a loop over tokens, routers against transformers and plain formulae, and the losses they add."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from models.moe import Moe, MoeArgs
from models.moe import model as moe
from models.moe.model import Experts, MoeBlock, Router, swiglus
from tests.support.runs import EXPERTS, write_run
from torchtitan_cp.cli import check
from torchtitan_cp.training.plain_attention import PlainAttention

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
    assert check.main([str(path), "--ranks", "2", override]) == 2
    assert message in capsys.readouterr().err


DEEPSEEK = MoeArgs(
    *(48, 2, 4, 2, 16, 40, 97),
    n_experts=16,
    experts_per_token=4,
    score_function="sigmoid",
    routed_scaling_factor=2.5,
    n_groups=4,
    groups_per_token=2,
    n_shared_experts=2,
    expert_bias=True,
)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("draw", range(3))
def test_a_router_of_deepseek_v3_chooses_what_transformers_chooses(normalized: bool, draw: int) -> None:
    torch.manual_seed(draw)
    args = dataclasses.replace(DEEPSEEK, normalize_shares=normalized)
    config = DeepseekV3Config(
        hidden_size=48,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=normalized,
        routed_scaling_factor=2.5,
    )
    ours, theirs = Router(args), DeepseekV3TopkRouter(config)
    bias: Any = ours.expert_bias
    with torch.no_grad():
        bias.normal_(0.0, 0.3)
        theirs.weight.copy_(ours.gate.weight)
        theirs.e_score_correction_bias.copy_(bias)
    x = torch.randn(2, 50, 48)
    _, _, chosen, shares = ours(x)
    _, want_shares, want_chosen = theirs(x)
    for row, want_row in (
        (
            shares.flatten(0, 1).gather(1, chosen.flatten(0, 1).argsort(1)),
            want_shares.gather(1, want_chosen.argsort(1)),
        ),
        (chosen.flatten(0, 1).sort(1).values, want_chosen.sort(1).values),
    ):
        assert torch.allclose(row, want_row, rtol=1e-6)
    bias.zero_()
    assert not torch.equal(ours(x)[2], chosen), "the bias changes choices"


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_balance_and_z_loss_are_their_formulae_in_value_and_gradient(score_function: str) -> None:
    args = dataclasses.replace(DEEPSEEK, score_function=score_function, balance=0.5, router_z_loss=0.25)
    block = MoeBlock(args, PlainAttention(), 0)
    hidden = torch.randn(3, 10, 48).requires_grad_()
    got = block.router_losses(hidden, None)
    found = torch.autograd.grad(got, (hidden, block.router.gate.weight))

    logits = F.rms_norm(hidden, (48,), block.ffn_norm.weight, 1e-5) @ block.router.gate.weight.T
    if score_function == "softmax":
        probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    else:
        scores = 1 / (1 + torch.exp(-logits))
        probabilities = scores / scores.sum(-1, keepdim=True)
    chosen = block.router(block.ffn_norm(hidden))[2]
    want = 0.25 * logits.exp().sum(-1).log().square().sum()
    for row in range(3):
        for expert in range(16):
            share = (chosen[row] == expert).sum() / 40
            want = want + 0.5 * 16 * share * probabilities[row, :, expert].sum()
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    for mine, plain in zip(found, torch.autograd.grad(want, (hidden, block.router.gate.weight)), strict=True):
        assert (mine - plain).norm() < 1e-5 * plain.norm()


def test_grouped_products_are_those_of_each_expert_and_leave_no_gradient_out(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.tensor([5, 0, 11, 0])
    rows = torch.randn(16, 24).bfloat16()
    weights = [torch.randn(4, *shape).mul(0.2).bfloat16() for shape in ((40, 24), (40, 24), (24, 40))]
    gated = MoeBlock(SHAPE, Attend(), 0).experts.gated
    noise, found = torch.randn(16, 24).bfloat16(), []
    for grouped in (False, True):
        monkeypatch.setattr(moe, "has_grouped_products", lambda *_, grouped=grouped: grouped)
        given = [x.clone().requires_grad_() for x in (rows, *weights)]
        out = swiglus(given[0], counts, *given[1:], gated)
        found.append([out, *torch.autograd.grad((out * noise).sum(), given)])
    for loop, kernel in zip(*found, strict=True):
        assert (loop - kernel).float().norm() <= 2**-7 * loop.float().norm()
        assert kernel.ndim == 2 or not kernel[[1, 3]].any()


def test_fewer_experts_than_the_model_has_take_no_tokens_or_some() -> None:
    experts = MoeBlock(DEEPSEEK, PlainAttention(), 0).experts
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(torch.randn_like(parameter[:3])))
    for rows in (0, 4):
        experts.zero_grad()
        out = experts(torch.randn(rows, 48), torch.arange(rows).view(-1, 1) % 2, torch.ones(rows, 1))
        assert out.shape == (rows, 48)
        out.sum().backward()
        for parameter in experts.parameters():
            assert parameter.grad is not None
            assert [bool(of_one.any()) for of_one in parameter.grad] == [rows > 0, rows > 0, False]


def test_biases_start_at_zero_and_are_saved_with_the_weights() -> None:
    with torch.device("meta"):
        model = Moe(DEEPSEEK, PlainAttention())
    model.keep_layers(1, 2)
    model.to_empty(device="cpu")
    assert {number: bias.tolist() for number, bias in model.router_biases.items()} == {1: [0.0] * 16}
    assert model.router_biases[1].dtype == torch.float32
    assert "layers.1.router.expert_bias" in model.state_dict()
    assert not Moe(dataclasses.replace(DEEPSEEK, expert_bias=False), PlainAttention()).router_biases


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"score_function": "tanh"}, "score_function = 'tanh' is none of softmax, sigmoid"),
        ({"n_groups": 3}, "groups_per_token = 2 of n_groups = 3 cannot be chosen"),
        ({"groups_per_token": 5}, "groups_per_token = 5 of n_groups = 4 cannot be chosen"),
        ({"n_groups": 16}, "n_groups = 16 leaves a group one expert"),
        ({"experts_per_token": 9}, "experts_per_token = 9 are more than 2 groups have"),
        ({"router_z_loss": -1.0}, "cannot be negative"),
    ],
)
def test_options_that_fit_no_model_are_refused(options: dict[str, Any], problem: str) -> None:
    assert problem in (dataclasses.replace(DEEPSEEK, **options).problem() or "")


def test_sizes_are_those_of_the_model() -> None:
    assert DEEPSEEK.problem() is None
    model = Moe(DEEPSEEK, PlainAttention())
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "tok_embeddings" not in name)
    unused = 2 * sum(p[4:].numel() for p in MoeBlock(DEEPSEEK, PlainAttention(), 0).experts.parameters())
    assert DEEPSEEK.linear_parameters() == matrices - unused
    assert DEEPSEEK.active_ffn_dim == (4 + 2) * 40
