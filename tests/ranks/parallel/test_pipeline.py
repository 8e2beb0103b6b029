"""The idle share of a pipeline's ranks."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.deep import deep_rows
from tests.support.rank_pool import RankPool
from torchtitan_cp.config.training import Parallel
from torchtitan_cp.parallel.pipeline import Pipeline
from torchtitan_cp.parallel.pipeline_stages import bubble_fraction, plan_pipeline

FORWARD_SECONDS = 0.2


class Slow(torch.autograd.Function):
    """The identity, which takes its time both ways, backward twice as long as forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(2 * FORWARD_SECONDS)
        return gradients[0]


class SlowStage(nn.Module):
    """A layer of the pipeline that sleeps more than it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x * self.weight)


def idle_shares(schedule: str, micro_batches: int) -> list[float]:
    """On a rank: share of each of a few steps in which it computed nothing."""
    mesh = init_device_mesh("cpu", (2,))
    settings, hidden = Parallel(pp=2, pp_schedule=schedule), torch.empty(1, 4, device="meta")
    stages = plan_pipeline(settings, 2, [1.0] * 4)
    parts = [SlowStage() for _ in stages.of_rank(mesh.get_local_rank())]
    pipeline = Pipeline(parts, stages, mesh, schedule, torch.device("cpu"), tied=False)

    def run_part(forward: Callable[..., Any], state: Tensor | None, batch: Tensor) -> Tensor:
        out = forward(batch if state is None else state)
        return out.sum() if forward is last else out

    last = pipeline.parts[pipeline.last_stage].forward.args[1] if pipeline.has_last else None  # type: ignore[union-attr]
    shares = []
    for _ in range(4):
        dist.barrier()  # ranks meet after every step of a run
        pipeline.train_step([torch.ones(1, 4)] * micro_batches, hidden, run_part)
        seconds = {name: watch.take() for name, watch in pipeline.watches.items()}
        shares.append(1 - (seconds["forward"] + seconds["backward"]) / seconds["pipeline"])
    assert pipeline.watches["forward"].take() == 0.0
    return shares


@deep_rows(("schedule", "micro_batches"), [("1f1b", 2), ("1f1b", 4)], default=[])
def test_the_measured_idle_share_is_the_bubble(
    ranks: Callable[[int], RankPool], schedule: str, micro_batches: int
) -> None:
    expected = bubble_fraction(Parallel(pp=2, pp_schedule=schedule), 2, 1, micro_batches)
    # Rank 0 begins and ends a step. Sleeping costs no core, but messages wait on a busy machine: the best step.
    assert min(ranks(2)(idle_shares, schedule, micro_batches)[0]) == pytest.approx(expected, abs=0.08)
