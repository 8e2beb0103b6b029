"""Parameter groups and clipping."""

import pytest
import torch
from torch import nn

from torchtitan_cp.config.sections import Optimizer
from torchtitan_cp.optimizer import build_optimizer, scale_gradients, shard_square_norm


def small_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3), nn.RMSNorm(3))


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    decaying, plain = build_optimizer(small_model(), Optimizer(weight_decay=0.3)).param_groups
    assert decaying["weight_decay"] == 0.3
    assert plain["weight_decay"] == 0.0
    assert all(p.ndim == 2 for p in decaying["params"])
    assert [tuple(p.shape) for p in plain["params"]] == [(3,), (3,)]


def test_clipping_equals_torchs_own() -> None:
    model, twin = small_model(), small_model()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    norm = shard_square_norm(model.parameters()).sqrt().item()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    scale_gradients(model.parameters(), norm, 0.5)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("limit", [0.0, 1e9])
def test_a_small_norm_and_a_limit_of_zero_leave_gradients_alone(limit: float) -> None:
    model = small_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scale_gradients(model.parameters(), 10.0, limit)
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
