"""A whole config on a cluster: every check a run makes, then an estimate of each stage."""

import dataclasses
from typing import Any

from torchtitan_cp import registry
from torchtitan_cp.config import Config
from torchtitan_cp.config.check import check_config
from torchtitan_cp.curriculum import check_head_dim, resolve_stages
from torchtitan_cp.parallel import check_shape
from torchtitan_cp.planner.devices import Cluster
from torchtitan_cp.planner.estimate import Estimate, estimate_stage
from torchtitan_cp.planner.parameters import vocabulary_of


def shape_of(config: Config) -> Any:
    """The config's shape with its vocabulary set.

    Raises:
        UserError: an unknown flavor or override, or a tokenizer that cannot be read.
    """
    shape = registry.shape_of(config.model)
    return dataclasses.replace(shape, vocab_size=vocabulary_of(config, shape))


def plan_config(config: Config, cluster: Cluster) -> tuple[Estimate, ...]:
    """An estimate of each stage on all ranks of a cluster.

    Raises:
        UserError, ContextParallelError: what a run on so many ranks would refuse.
    """
    degrees = check_config(config, cluster.ranks)
    shape = shape_of(config)
    check_shape(shape, degrees.tp)
    stages = resolve_stages(config, degrees)
    check_head_dim(stages, shape.head_dim)
    return tuple(estimate_stage(config, shape, degrees, stage, cluster) for stage in stages)
