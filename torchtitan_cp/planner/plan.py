"""A whole config on a cluster: the checks that a run makes of it, then an estimate of each stage."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_cp.config import Config
from torchtitan_cp.config.check import check_config
from torchtitan_cp.config.degrees import Degrees, resolve_degrees
from torchtitan_cp.curriculum import StagePlan, check_head_dim, resolve_stages
from torchtitan_cp.planner.devices import Cluster
from torchtitan_cp.planner.estimate import Estimate, Volume, estimate_stage, stage_volumes
from torchtitan_cp.planner.parameters import vocabulary_of
from torchtitan_cp.training import registry
from torchtitan_cp.training.resolve import check_stage


def model_args_of(config: Config) -> Any:
    """The config's shape with its vocabulary set.

    Raises:
        UserError: an unknown flavor or override, or a tokenizer that cannot be read.
    """
    shape = registry.model_args_of(config.model)
    return dataclasses.replace(shape, vocab_size=vocabulary_of(config, shape))


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
    check_config(config, cluster.ranks)
    shape = shape or model_args_of(config)
    stages = resolve_stages(config, cluster.ranks)
    check_head_dim(stages, shape.head_dim)
    planned = []
    for stage in stages:
        check_stage(config, shape, stage)
        parallel = replace(config.parallel, tp=stage.tp, pp=stage.pp)
        own = replace(config, parallel=parallel, activation=stage.activation)
        planned.append(StageToPlan(own, shape, resolve_degrees(parallel, cluster.ranks), stage, cluster))
    return tuple(planned)


def plan_config(config: Config, cluster: Cluster) -> tuple[Estimate, ...]:
    """An estimate of each stage; raises as `stages_to_plan`."""
    return tuple(estimate_stage(**vars(stage)) for stage in stages_to_plan(config, cluster))


def plan_volumes(config: Config, cluster: Cluster) -> tuple[dict[str, Volume], ...]:
    """What the busiest rank sends in each stage, by strategy; raises as `stages_to_plan`."""
    return tuple(stage_volumes(**vars(stage)) for stage in stages_to_plan(config, cluster))
