"""What one rank finds is known to all."""

import math
from collections.abc import Callable

import torch

from tests.support.rank_pool import RankPool
from torchtitan_cp.health.monitor import StepReport, all_gather_report


def run_exchange() -> StepReport:
    rank = torch.distributed.get_rank()
    scalars = [torch.tensor(value) for value in (10.0 * (rank + 1), 6.0, 0.5, 2.0 + rank)]
    outputs, squares = torch.tensor([1.0, 0.0 if rank else 4.0]), torch.tensor([9.0, 7.0, 0.0 if rank else 24.0])
    return all_gather_report(scalars, outputs, squares, peak_memory_bytes=1000 + rank)


def test_every_rank_learns_the_same(ranks: Callable[[int], RankPool]) -> None:
    for report in ranks(2)(run_exchange):
        assert report == StepReport(
            loss=5.0,
            grad_norm=math.sqrt(56.0),
            peak_memory_bytes=1001,
            largest_logit=3.0,
            block_grad_norms=(math.sqrt(18.0), math.sqrt(14.0)),
            block_outputs=(1.0, 4.0),
        )
