"""Muon sharded in every way against one process."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.muon_net import SETTINGS, NetWithExperts, small_net, train
from tests.support.rank_pool import RankPool
from torchtitan_cp.optim.build import build_optimizer


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


def train_experts(ep: int, dim: int) -> list[Tensor]:
    """FSDP cuts the experts of each of `ep` ranks along a dim."""
    model = small_net(NetWithExperts)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("efsdp", "ep"))
    experts = model.experts[5]
    for name, parameter in list(experts.named_parameters()):
        if ep > 1:
            setattr(experts, name, nn.Parameter(distribute_tensor(parameter, mesh["ep"], [Shard(0)])))
    fully_shard(experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(dim))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return train(model, build_optimizer(model, SETTINGS))


@pytest.mark.parametrize(("size", "ep", "dim"), [(2, 1, 0), (2, 1, 1), (4, 1, 1), (4, 2, 1), (4, 2, 0), (2, 2, 0)])
def test_sharded_experts_take_the_steps_of_one_process(
    ranks: Callable[[int], RankPool], size: int, ep: int, dim: int
) -> None:
    model = small_net(NetWithExperts)
    expected = train(model, build_optimizer(model, SETTINGS))
    for result in ranks(size)(train_experts, ep, dim):
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


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
