"""Qwen3-MoE beside transformers' own, and what its format cannot express."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from models.moe import Moe, MoeArgs
from models.moe.hub import HUB, NAMES
from models.moe.model import balance_loss
from tests.support.hub_models import EXPERTS
from torchtitan_cp.checkpoint.hub import hub_names
from torchtitan_cp.training.plain_attention import PlainAttention


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


def test_the_exported_weight_gives_the_balance_loss_its_value_in_transformers() -> None:
    args = MoeArgs(*(48, 3, 4, 2, 16, 40, 97), n_experts=8, experts_per_token=2, balance=0.01, qk_norm=True)
    scores = torch.randn(1, 50, 8).softmax(-1)
    ours = args.balance * balance_loss([scores], [scores.topk(2).indices.flatten(1)], lambda x, _: x, None) / 50
    theirs = load_balancing_loss_func((scores[0].log(),) * args.n_layers, args.n_experts, args.experts_per_token)
    assert HUB.config(args)["router_aux_loss_coef"] * theirs == pytest.approx(args.n_layers * ours.item())


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
