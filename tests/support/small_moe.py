"""A small mixture of experts on one process, and a step of it."""

from typing import Any

import torch
from torch import Tensor, nn

from models.moe import Moe, MoeArgs
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.training.model import LayerAttention

SHAPE = MoeArgs(32, 2, 4, 2, 8, 48, 61, n_experts=6, experts_per_token=2, balance=0.5, n_shared_experts=1)


def make_mixture() -> Moe:
    """Always with the same weights."""
    torch.manual_seed(3)
    attend = LayerAttention()
    attend.step_tokens = torch.tensor(50)
    model = Moe(SHAPE, attend)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=model.init_std(name) or 0.1)
    model.set_rope([1.0, 0.1, 0.01, 0.001], 1.0, torch.device("cpu"))
    return model


def step(model: Moe, length: int, seed: int) -> list[Tensor]:
    """The loss of two sequences of random tokens, and the gradients of all parameters."""
    model.zero_grad()
    tokens = torch.randint(61, (2, length), generator=torch.Generator().manual_seed(seed))
    plans: dict[int, Any] = {0: make_plan(length, mask=AttentionMask())}
    logits = model(tokens, torch.arange(length), plans)
    assert isinstance(logits, Tensor)
    loss = logits.square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
