"""The layers and the owner of each pipeline stage, and how long a rank waits for the others. Only arithmetic.

Source: GPipe (Huang et al., 2019), 1F1B (Narayanan et al., 2021), zero bubble (Qi et al., 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch.torch_version import TorchVersion

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.names import SCHEDULES
from torchtitan_cp.config.training import Parallel

Span = tuple[int, int]

# Zero-bubble schedules split a backward, which before torch 2.13 failed at any autograd.Function.
SPLITS_ANY_BACKWARD = TorchVersion(torch.__version__) >= "2.13"


@dataclass(frozen=True)
class PipelineStages:
    """The layers and the owner of each pipeline stage, in order.

    Attributes:
        layers: [first, stop) of each.
        owner: the pipeline rank that has it.
    """

    layers: tuple[Span, ...]
    owner: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        """Numbers of the pipeline stages that a pipeline rank has."""
        return [number for number, owner in enumerate(self.owner) if owner == rank]


def plan_pipeline(settings: Parallel, ranks: int, costs: Sequence[float]) -> PipelineStages:
    """Split the layers into pipeline stages over `ranks` pipeline ranks.

    Args:
        settings: the schedule and pipeline stages per rank.
        costs: of each layer, in any unit; the first includes the embedding, the last the output layer.

    Raises:
        ConfigError: there are more pipeline stages than layers, or a number that the schedule does not take.
    """
    schedule = SCHEDULES[settings.pp_schedule]
    if ranks > 1 and schedule.splits_backward and not SPLITS_ANY_BACKWARD:
        raise ConfigError(
            f"parallel.pp_schedule = {settings.pp_schedule!r} needs torch 2.13; {torch.__version__} cannot split "
            "the backward of a custom operator",
            fix="use 1f1b or interleaved_1f1b",
        )
    per_rank = 1 if ranks == 1 else settings.pp_stages_per_rank or schedule.stages_per_rank
    if ranks > 1 and not schedule.stages_per_rank <= per_rank <= (schedule.most or per_rank):
        takes = str(schedule.stages_per_rank) if schedule.most else f"{schedule.stages_per_rank} or more"
        raise ConfigError(
            f"parallel.pp_stages_per_rank = {per_rank}, and {settings.pp_schedule} takes {takes}",
            fix=f"use {takes}, or another parallel.pp_schedule",
        )
    count = ranks * per_rank
    if count > len(costs):
        raise ConfigError(
            f"a pipeline of {ranks} ranks x {per_rank} pipeline stages is longer than the model's {len(costs)} layers",
            fix="lower parallel.pp or parallel.pp_stages_per_rank",
        )
    # Pipeline stages go round the ranks, or for a V-shaped schedule there and back.
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    owner = there_and_back[:count] if settings.pp_schedule.startswith("zbv") else [n % ranks for n in range(count)]
    return PipelineStages(tuple(split_layers(costs, count)), tuple(owner))


def split_layers(costs: Sequence[float], stages: int) -> list[Span]:
    """[first, stop) of each pipeline stage, so that the dearest one costs as little as possible; none is empty."""
    costs_before = [sum(costs[:count]) for count in range(len(costs) + 1)]

    @cache
    def best(stages: int, stop: int) -> tuple[float, tuple[int, ...]]:
        """Over the first `stop` layers: the cost of the dearest pipeline stage, and all edges."""
        if stages == 1:
            return costs_before[stop], (0, stop)

        def dearest(cut: int) -> float:
            return max(best(stages - 1, cut)[0], costs_before[stop] - costs_before[cut])

        cut = min(range(stages - 1, stop), key=dearest)
        return dearest(cut), (*best(stages - 1, cut)[1], stop)

    return list(pairwise(best(stages, len(costs))[1]))


def bubble_fraction(settings: Parallel, ranks: int, per_rank: int, micro_batches: int) -> float:
    """Fraction of a step in which a pipeline rank waits.

    Assumes that a backward takes as long as two forwards, that messages take no time, and that zero-bubble schedules,
    which fill the wait with gradients of weights, leave a third of it.
    """
    waits = (ranks - 1) / (3 if SCHEDULES[settings.pp_schedule].splits_backward else 1)
    return waits / (per_rank * micro_batches + waits)
