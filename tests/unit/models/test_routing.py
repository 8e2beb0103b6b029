"""Routers against transformers and plain formulae, and the losses they add."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from models.huggingface.args import args_from_config
from models.huggingface.model import HuggingFaceModel
from models.moe import Moe, MoeArgs
from models.moe import model as moe
from models.moe.hub import HUB, NAMES
from models.moe.model import MoeBlock, Router, balance_loss, swiglus
from tests.support.hub_models import EXPERTS
from tests.support.huggingface_families import FAMILIES
from torchtitan_cp.checkpoint.hub import hub_names
from torchtitan_cp.training.model import LayerAttention
from torchtitan_cp.training.plain_attention import PlainAttention

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


def test_qwen3_moe_has_the_logits_and_gradients_of_transformers() -> None:
    theirs = AutoModelForCausalLM.from_config(EXPERTS, attn_implementation="eager", experts_implementation="eager")
    sizes = {"balance": 0.0, "router_z_loss": 0.0, "vocab_size": 288}
    ours = Moe(MoeArgs(**HUB.sizes(EXPERTS.to_dict()) | sizes), PlainAttention())
    weights = dict(theirs.named_parameters())
    for parameter in weights.values():
        nn.init.normal_(parameter, 0.5, 0.2) if parameter.ndim == 1 else nn.init.normal_(parameter, std=0.2)

    def in_theirs(name: str, of: Any) -> Tensor:
        """Their tensor with our name: transformers fuses w1 and w3 of all experts."""
        ((first, _), *_) = hub_names(name, (1, 1), NAMES)
        if ".experts." not in name:
            return of(weights[first])  # type: ignore[no-any-return]
        layer = first.partition("experts.")[0] + "experts."
        fused = of(weights[layer + ("down_proj" if name.endswith("w2") else "gate_up_proj")])
        return fused if name.endswith("w2") else fused.chunk(2, 1)[name.endswith("w3")]  # type: ignore[no-any-return]

    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(in_theirs(name, lambda x: x))
    ours.set_rope([10000.0 ** (-pair / 8) for pair in range(8)], 1.0, torch.device("cpu"))
    tokens, labels = torch.randint(288, (2, 2, 40))
    logits = ours(tokens, torch.arange(40), torch.zeros_like(tokens))
    want = theirs(tokens).logits
    assert (logits - want).abs().max() <= 1e-5 * want.abs().max()
    for one in (logits, want):
        F.cross_entropy(one.flatten(0, 1), labels.flatten()).backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        gradient = in_theirs(name, lambda x: x.grad)
        assert (parameter.grad - gradient).norm() <= 1e-5 * gradient.norm(), name


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


def test_the_exported_weight_gives_the_balance_loss_its_value_in_transformers() -> None:
    args = MoeArgs(*(48, 3, 4, 2, 16, 40, 97), n_experts=8, experts_per_token=2, balance=0.01, qk_norm=True)
    scores = torch.randn(1, 50, 8).softmax(-1)
    ours = args.balance * balance_loss([scores], [scores.topk(2).indices.flatten(1)], lambda x, _: x, None) / 50
    theirs = load_balancing_loss_func((scores[0].log(),) * args.n_layers, args.n_experts, args.experts_per_token)
    assert HUB.config(args)["router_aux_loss_coef"] * theirs == pytest.approx(args.n_layers * ours.item())


def test_a_loss_of_the_model_is_divided_by_the_tokens_of_the_step_and_leaves_the_hidden_states() -> None:
    attend = LayerAttention()
    attend.step_tokens = torch.tensor(8)
    hidden, weight = torch.randn(2, 3, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    out = attend.add_loss(hidden, weight.square() + hidden.sum())
    assert torch.equal(out, hidden)
    out.backward(torch.full((2, 3), 7.0))
    assert weight.grad == 10 * 0.125
    assert torch.equal(hidden.grad, torch.full((2, 3), 7.125))


def test_grouped_products_are_those_of_each_expert_and_leave_no_gradient_out(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.tensor([5, 0, 11, 0])
    rows = torch.randn(16, 24).bfloat16()
    weights = [torch.randn(4, *shape).mul(0.2).bfloat16() for shape in ((40, 24), (40, 24), (24, 40))]
    noise, found = torch.randn(16, 24).bfloat16(), []
    for grouped in (False, True):
        monkeypatch.setattr(moe, "has_grouped_products", lambda *_, grouped=grouped: grouped)
        given = [x.clone().requires_grad_() for x in (rows, *weights)]
        out = swiglus(given[0], counts, *given[1:])
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
    ("family", "layers"), [("DeepSeek-V3", [1]), ("GLM-4.5", [1]), ("Qwen3-MoE", []), ("ERNIE 4.5 MoE", [])]
)
def test_biases_of_transformers_are_found_by_their_layer(family: str, layers: list[int]) -> None:
    model = HuggingFaceModel(args_from_config(FAMILIES[family], {}), LayerAttention())
    assert list(model.router_biases) == layers
    for number, bias in model.router_biases.items():
        assert bias.shape == (model.args.probe.layers[number].n_experts,)
        assert bias.dtype == torch.float32
        assert any(bias is own for own in model.buffers())


@pytest.mark.parametrize(
    "option",
    [
        {"score_function": "sigmoid"},
        {"routed_scaling_factor": 2.5},
        {"n_groups": 2},
        {"n_shared_experts": 1},
        {"expert_bias": True},
    ],
)
def test_what_qwen3_moe_cannot_express_is_not_exported(option: dict[str, Any]) -> None:
    args = MoeArgs(48, 2, 4, 2, 16, 40, 97, qk_norm=True, **option)
    with pytest.raises(ValueError, match=f"Qwen3-MoE has no {next(iter(option))} other than"):
        HUB.config(args)


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
    assert DEEPSEEK.matrix_parameters() == matrices
    unused = 2 * sum(p[4:].numel() for p in MoeBlock(DEEPSEEK, PlainAttention(), 0).experts.parameters())
    assert DEEPSEEK.linear_parameters() == matrices - unused
    assert DEEPSEEK.active_ffn_dim == (4 + 2) * 40
