"""Muon against torch's own on one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.muon_net import SETTINGS, NetWithExperts, gradients, small_net, train
from torchtitan_cp.optim.build import build_optimizer
from torchtitan_cp.optim.muon import orthogonalize
from torchtitan_cp.optim.optimizers import MUON


def test_matrices_of_the_blocks_are_muons_and_all_else_is_adamws() -> None:
    model = small_net()
    optimizer = build_optimizer(model, SETTINGS)
    muon = {p for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    assert muon == {layer.weight for layer in model.layers}
    train(model, optimizer, 1)
    assert all(set(optimizer.state[p]) == {"momentum_buffer"} for p in muon)
    assert set(optimizer.state[model.output.weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_steps_are_those_of_torchs_muon_and_adamw() -> None:
    model, twin = small_net(), small_net()
    ours = train(model, build_optimizer(model, SETTINGS, compute_dtype=torch.bfloat16))
    matrices = [layer.weight for layer in twin.layers]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    others = [[twin.tok_embeddings.weight, twin.output.weight], [layer.bias for layer in twin.layers]]
    groups = [{"params": others[0], "weight_decay": 0.1}, {"params": others[1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))
    for step in range(3):
        for parameter, gradient in zip(twin.parameters(), gradients(twin, step), strict=True):
            parameter.grad = gradient
        for optimizer in (muon, adamw):
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[-1]["lr"] = 0.02 / (step + 1)
            optimizer.step()
    for mine, theirs in zip(ours, twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-7)


def test_each_expert_takes_the_step_of_a_matrix_and_a_convolution_that_of_adamw() -> None:
    model, twin = small_net(NetWithExperts), small_net(NetWithExperts)
    optimizer = build_optimizer(model, SETTINGS)
    train(model, optimizer, 1)
    assert set(optimizer.state[model.layers[6].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    known = dict(zip(twin.parameters(), gradients(twin, 0), strict=True))
    experts = [nn.Parameter(matrix) for p in twin.layers[5].parameters() for matrix in p.detach()]
    for expert, gradient in zip(experts, (x for p in twin.layers[5].parameters() for x in known[p]), strict=True):
        expert.grad = gradient
    torch.optim.Muon(experts, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw").step()
    for mine, theirs in zip((x for p in model.layers[5].parameters() for x in p), experts, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-3)  # torch's works in bf16


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (9, 9), (3, 6, 40)])
def test_singular_values_come_near_one_and_a_zero_matrix_stays_zero(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, dtype=torch.float64)))
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert not orthogonalize(torch.zeros(shape)).any()


class MovedBytes(TorchDispatchMode):
    """Adds up what operators that are no matrix products read and write, by the sizes of their tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name not in ("aten::mm", "aten::addmm"):
            self.count += sum(x.nbytes for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor))
        return result


@pytest.mark.parametrize("shape", [(96, 256), (256, 96)])
def test_an_update_moves_the_bytes_that_the_planner_counts(shape: tuple[int, int]) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(*shape)])  # its bias, which is AdamW's, is small
    optimizer = build_optimizer(model, SETTINGS, compute_dtype=torch.bfloat16)
    train(model, optimizer, 1)  # makes the momentum
    for parameter, gradient in zip(model.parameters(), gradients(model, 1), strict=True):
        parameter.grad = gradient
    with MovedBytes() as moved:
        optimizer.step()
    assert moved.count / (shape[0] * shape[1]) == pytest.approx(MUON.update_bytes(SETTINGS), abs=2.5)
