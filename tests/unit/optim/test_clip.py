"""The global norm of gradients in groups, and clipping to it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.small_net import assert_same, small_net, weights
from torchtitan_cp.config.training import Optimizer
from torchtitan_cp.optim.build import build_optimizer
from torchtitan_cp.optim.clip import square_norms, step_clipped
from torchtitan_cp.optim.offload import keep_state_on_host
from torchtitan_cp.optim.optimizers import OPTIMIZERS, clip_bytes


def small_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3), nn.RMSNorm(3))


def with_gradients(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_clipped_step_is_that_of_gradients_that_torch_clips(name: str) -> None:
    model, twin = small_net(), small_net()
    one, other = (build_optimizer(net, Optimizer(name=name, eps=1e-2)) for net in (model, twin))
    for _ in range(3):
        norm = square_norms([with_gradients(model).parameters()]).sqrt().item()
        expected = nn.utils.clip_grad_norm_(with_gradients(twin).parameters(), 0.5)
        assert norm == pytest.approx(expected.item(), rel=1e-6)
        step_clipped(one, norm, 0.5)
        other.step()
        assert_same(weights(model), weights(twin))
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_fused_step_equals_that_of_gradients_divided_by_the_norms_ratio_bit_for_bit(on_host: bool) -> None:
    model, twin = small_net(), small_net()
    one, other = (build_optimizer(net, Optimizer()) for net in (model, twin))
    if on_host:
        keep_state_on_host(one, OPTIMIZERS["adamw"].parts)
    for norm in (3.7, 0.4, 11.0):
        with_gradients(model)
        for parameter in with_gradients(twin).parameters():
            parameter.grad /= torch.tensor(max(1.0, norm / 0.5))
        step_clipped(one, norm, 0.5)
        other.step()
        assert_same(weights(model), weights(twin), rtol=0)
    assert not hasattr(one, "grad_scale"), "a step that is not clipped would divide by it too"


class Passes(TorchDispatchMode):
    """Counts how often gradients are read before the kernel of the optimizer."""

    def __init__(self, gradients: list[Tensor]) -> None:
        super().__init__()
        self.own, self.operators = {x.data_ptr() for x in gradients}, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, Tensor) and x.data_ptr() in self.own for x in tree_leaves((args, kwargs))):
            self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "read_by"),
    [
        ("adamw", ["aten._fused_adamw_.default"]),
        ("muon", ["aten._foreach_mul_.Scalar"]),
    ],
)
def test_gradients_are_read_once_by_a_fused_step_and_once_more_by_others(name: str, read_by: list[str]) -> None:
    model = with_gradients(small_net())
    optimizer = build_optimizer(model, Optimizer(name=name))
    with Passes([parameter.grad for parameter in model.parameters() if parameter.grad is not None]) as passes:
        step_clipped(optimizer, 10.0, 0.5)
    assert passes.operators[: len(read_by)] == read_by
    assert name == "muon" or len(set(passes.operators)) == 1, "an update for each group of parameters"
    # A pass reads and writes, the fused kernel reads anyway.
    assert clip_bytes(Optimizer(name=name)) == (4 if name == "adamw" else 8)
    assert clip_bytes(Optimizer(name=name, state="8bit")) == 8


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
    step_clipped(torch.optim.AdamW(model.parameters(), fused=True), 10.0, limit)
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
