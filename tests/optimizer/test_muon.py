"""Muon against torch's own on one process, and sharded in every way against one process."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks import RankPool
from torchtitan_cp.config.sections import Optimizer
from torchtitan_cp.optimizer import build_optimizer, set_learning_rates
from torchtitan_cp.optimizer.muon import orthogonalize

SETTINGS = Optimizer(name="muon", lr=0.02, weight_decay=0.1)


class Net(nn.Module):
    """Five tall and wide matrices, some uneven on ranks, between an embedding and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(8, 12), nn.Linear(12, 8, bias=False)
        sizes = ((12, 20), (20, 12), (12, 14), (14, 20), (20, 13))
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)


def small_net() -> Net:
    torch.manual_seed(1)
    return Net()


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    """Steps along known gradients, sharded as their parameters. Returns the whole weights."""
    for step in range(steps):
        for parameter, gradient in zip(model.parameters(), gradients(model, step), strict=True):
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
            parameter.grad = gradient
        set_learning_rates(optimizer, SETTINGS.lr / (step + 1))
        optimizer.step()
        optimizer.zero_grad()
    tensors = (p.detach() for p in model.parameters())
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in tensors]


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


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (9, 9)])
def test_singular_values_come_near_one_and_a_zero_matrix_stays_zero(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, dtype=torch.float64)))
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert not orthogonalize(torch.zeros(shape)).any()


def train_sharded(shape: tuple[int, ...], layout: str) -> list[Tensor]:
    model = small_net()
    names = {"fsdp": ("fsdp",), "hsdp": ("replicate", "fsdp"), "tp": ("fsdp", "tp")}[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if layout == "tp":
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel(), "layers.3": ColwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["fsdp"] if layout == "tp" else mesh)
    fully_shard(model, mesh=mesh["fsdp"] if layout == "tp" else mesh)
    return train(model, build_optimizer(model, SETTINGS))


@pytest.mark.parametrize(
    ("shape", "layout"), [((2,), "fsdp"), ((4,), "fsdp"), ((2, 2), "hsdp"), ((2, 2), "tp"), ((1, 2), "tp")]
)
def test_sharded_matrices_take_the_steps_of_one_process(
    ranks: Callable[[int], RankPool], shape: tuple[int, ...], layout: str
) -> None:
    model = small_net()
    expected = train(model, build_optimizer(model, SETTINGS))
    size = math.prod(shape)
    for result in ranks(size)(train_sharded, shape, layout):
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
