"""The global norm of sharded and replicated gradients, and clipping to it."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from tests.ranks import RankPool
from torchtitan_cp.optimizer import scale_gradients, square_norms


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


def summed_over_ranks(parameters: list[nn.Parameter], ranks: int | None = None) -> float:
    part = square_norms([parameters], ranks)
    dist.all_reduce(part)
    return part.item()


def square_norm_of(placements: tuple[Placement, Placement]) -> float:
    mesh = init_device_mesh("cpu", (2, 2))
    # 5 rows and 1 column: shards are uneven, and some empty.
    parameter = nn.Parameter(distribute_tensor(torch.zeros(5, 1), mesh, placements))
    parameter.grad = distribute_tensor(torch.arange(1.0, 6.0).view(5, 1), mesh, placements)
    return summed_over_ranks([parameter])


PLACEMENTS = [
    (Replicate(), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Shard(0), Replicate()),
    (Replicate(), Replicate()),
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_every_value_counts_once_whatever_the_placements(
    ranks: Callable[[int], RankPool], placements: tuple[Placement, Placement]
) -> None:
    assert ranks(4)(square_norm_of, placements) == [pytest.approx(55.0, rel=1e-6)] * 4


def square_norms_of_a_partial_sum_and_a_plain_tensor() -> tuple[float, float]:
    plain = nn.Parameter(torch.zeros(5))
    plain.grad = torch.arange(1.0, 6.0)
    mesh = init_device_mesh("cpu", (2, 2))
    partial = nn.Parameter(distribute_tensor(torch.zeros(5), mesh, [Replicate(), Replicate()]))
    partial.grad = DTensor.from_local(plain.grad / 2, mesh, [Replicate(), Partial()])
    return summed_over_ranks([partial]), summed_over_ranks([plain], ranks=4)


def test_partial_sums_are_added_first_and_a_plain_tensor_on_all_ranks_counts_once(
    ranks: Callable[[int], RankPool],
) -> None:
    assert ranks(4)(square_norms_of_a_partial_sum_and_a_plain_tensor) == [pytest.approx((55.0, 55.0), rel=1e-6)] * 4


class Net(nn.Module):
    """A norm that tensor parallelism leaves whole, and matrices that it splits by rows and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(6), nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh())


def net_and_input() -> tuple[Net, Tensor]:
    torch.manual_seed(1)
    return Net(), torch.randn(2, 4, 6)


def square_norms_under_fsdp_over_tp() -> tuple[float, float]:
    """With the norm a DTensor of both meshes, and with the norm unknown to tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    net, x = net_and_input()
    split = Shard(1)
    plan = {"up": ColwiseParallel(input_layouts=split), "down": RowwiseParallel(output_layouts=split)}
    parallelize_module(net, mesh["tp"], {"norm": SequenceParallel(), **plan})
    fully_shard(net, mesh=mesh["fsdp"])
    net(x.chunk(2, dim=1)[mesh.get_local_rank("tp")]).square().sum().backward()
    assert any(isinstance(placement, _StridedShard) for placement in net.up.weight.placements)
    known = summed_over_ranks(list(net.parameters()))

    net, x = net_and_input()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["fsdp"])
    net(x).square().sum().backward()
    return known, summed_over_ranks(list(net.parameters()), ranks=4)


def test_fsdp_over_tensor_parallel_matrices_and_norms_has_the_norm_of_one_process(
    ranks: Callable[[int], RankPool],
) -> None:
    net, x = net_and_input()
    net(x).square().sum().backward()
    expected = square_norms([net.parameters()]).item()
    assert ranks(4)(square_norms_under_fsdp_over_tp) == [pytest.approx((expected, expected), rel=1e-5)] * 4
