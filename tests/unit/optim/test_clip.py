"""The global norm of gradients in groups, and clipping to it."""

import pytest
import torch
from torch import nn

from torchtitan_cp.optim.clip import scale_gradients, square_norms


def small_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3), nn.RMSNorm(3))


def test_clipping_equals_torchs_own() -> None:
    model, twin = small_model(), small_model()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    norm = square_norms([model.parameters()]).sqrt().item()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    scale_gradients(model.parameters(), norm, 0.5)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=0)


def test_each_group_has_its_own_norm_and_a_nan_stays_in_its_group() -> None:
    model = small_model()
    embedding, linear, norm = model
    for parameter in (*embedding.parameters(), *linear.parameters()):
        parameter.grad = torch.randn_like(parameter)
    linear.weight.grad[0, 0] = torch.nan  # type: ignore[index]
    groups = [list(embedding.parameters()), list(linear.parameters()), list(norm.parameters()), []]
    found = square_norms(groups).tolist()
    assert found[0] == pytest.approx(embedding.weight.grad.double().square().sum().item(), rel=1e-6)  # type: ignore[union-attr, operator]
    assert torch.isnan(torch.tensor(found)).tolist() == [False, True, False, False]
    assert found[2:] == [0.0, 0.0]
    assert square_norms([norm.parameters()]).tolist() == [0.0]


@pytest.mark.parametrize("limit", [0.0, 1e9])
def test_a_small_norm_and_a_limit_of_zero_leave_gradients_alone(limit: float) -> None:
    model = small_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scale_gradients(model.parameters(), 10.0, limit)
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
