"""The global norm of sharded and replicated gradients."""

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

from tests.support.rank_pool import RankPool
from torchtitan_cp.optim.clip import square_norms, step_clipped


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


def differences_of_clipped_steps() -> float:
    """The largest between weights of two clipped steps, and of two with gradients that are divided before them."""
    mesh, nets = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")), []
    for _ in range(2):
        net, x = net_and_input()
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["fsdp"])
        nets.append(net)
    clipped, divided = nets
    # Of one mesh, as the groups of a run's optimizer are.
    one, other = (torch.optim.AdamW([net.up.weight, net.down.weight], fused=True) for net in nets)
    for norm in (3.7, 11.0):
        for net in nets:
            net(x).square().sum().backward()
        step_clipped(one, norm, 0.5)
        for parameter in divided.parameters():
            assert parameter.grad is not None
            parameter.grad /= torch.tensor(norm / 0.5)
        other.step()
        one.zero_grad()
        other.zero_grad()
    pairs = zip(clipped.parameters(), divided.parameters(), strict=True)
    return max((a.full_tensor() - b.full_tensor()).abs().max().item() for a, b in pairs)  # type: ignore[attr-defined]


def test_shards_are_clipped_by_the_kernel_of_their_update(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(4)(differences_of_clipped_steps) == [0.0] * 4
