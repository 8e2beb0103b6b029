"""What one rank finds is known to all."""

import math
from collections.abc import Callable

import torch
from torch import nn

from tests.support.rank_pool import RankPool
from torchtitan_cp.config.run import Health
from torchtitan_cp.health.monitor import HealthMonitor, StepReport


def run_exchange() -> StepReport:
    rank, part = torch.distributed.get_rank(), nn.Module()
    part.layers = nn.ModuleDict({"0": nn.Identity(), "1": nn.Identity()})
    monitor = HealthMonitor(Health(), [part], 2, torch.device("cpu"))
    part.layers["0"](torch.ones(1, requires_grad=True)).backward()
    part.layers["1"](torch.tensor([0.0 if rank else -4.0]))
    sums = tuple(torch.tensor(value) for value in (10.0 * (rank + 1), 6.0, 4, 2.0 + rank))
    squares = torch.tensor([9.0, 7.0, 0.0 if rank else 24.0])
    return monitor.check_step(sums, squares, 1000 + rank, (bool(rank), False))


def test_every_rank_learns_the_same(ranks: Callable[[int], RankPool]) -> None:
    for report in ranks(2)(run_exchange):
        assert report == StepReport(
            loss=5.0,
            grad_norm=math.sqrt(56.0),
            peak_memory_bytes=1001,
            largest_logit=3.0,
            block_grad_norms=(math.sqrt(18.0), math.sqrt(14.0)),
            block_outputs=(1.0, 4.0),
            stop=True,
            learned_tokens=4,
        )
