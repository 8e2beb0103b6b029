"""A whole config on a cluster: the checks that a run makes of it, then an estimate of each stage."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torchtitan_cp.config import Config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.curriculum import StagePlan
from torchtitan_cp.planner.devices import Cluster
from torchtitan_cp.planner.estimate import Estimate, Volume, estimate_stage, stage_volumes
from torchtitan_cp.planner.parameters import vocabulary_of
from torchtitan_cp.training import registry
from torchtitan_cp.training.resolve import ResolvedRun, resolve_run


def model_args_of(config: Config) -> Any:
    """The config's model sizes with the vocabulary set.

    Raises:
        UserError: an unknown flavor or override, or a tokenizer that cannot be read.
    """
    args = registry.model_args_of(config.model)
    return dataclasses.replace(args, vocab_size=vocabulary_of(config, args))


def resolve_with_vocabulary(config: Config, ranks: int, model_args: Any = None) -> ResolvedRun:
    """The run of a config on so many ranks, without preparing its corpus.

    Args:
        model_args: what `model_args_of` gives, if it is at hand.

    Raises:
        UserError, ContextParallelError: what a run on so many ranks would refuse.
    """
    run = resolve_run(config, ranks, model_args)
    vocab_size = vocabulary_of(config, run.model_args)
    return dataclasses.replace(run, model_args=dataclasses.replace(run.model_args, vocab_size=vocab_size))


@dataclass(frozen=True)
class StageToPlan:
    """All that is known of a stage before it is estimated; the fields are the arguments of `estimate_stage`."""

    config: Config
    shape: Any
    degrees: Degrees
    stage: StagePlan
    cluster: Cluster


def stages_to_plan(config: Config, cluster: Cluster, shape: Any = None) -> tuple[StageToPlan, ...]:
    """The stages of a config on all ranks of a cluster.

    Args:
        shape: what `shape_of` gives, if it is at hand.

    Raises:
        UserError, ContextParallelError: what a run on so many ranks would refuse.
    """
    run = resolve_with_vocabulary(config, cluster.ranks, shape)
    return tuple(
        StageToPlan(run.config_of(stage), run.model_args, degrees, stage, cluster)
        for stage, degrees in zip(run.stages, run.degrees, strict=True)
    )


def plan_config(config: Config, cluster: Cluster) -> tuple[Estimate, ...]:
    """An estimate of each stage; raises as `stages_to_plan`."""
    return tuple(estimate_stage(**vars(stage)) for stage in stages_to_plan(config, cluster))


def plan_volumes(config: Config, cluster: Cluster) -> tuple[dict[str, Volume], ...]:
    """What the busiest rank sends in each stage, by strategy; raises as `stages_to_plan`."""
    return tuple(stage_volumes(**vars(stage)) for stage in stages_to_plan(config, cluster))
