"""Meshes and process groups, and what makes a model run on them.

Imports `attention` and `config` at most. Each function takes a mesh and plain values; `apply.py` shows their order.
"""

from torchtitan_cp.parallel.apply import parallelize, wrap_blocks
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.parallel.pipeline import HiddenSpec, Pipeline, PipelineStages, bubble_fraction, plan_pipeline
from torchtitan_cp.parallel.stopwatch import Stopwatch
from torchtitan_cp.parallel.tensor import check_tensor_parallel, vocabulary_shard

__all__ = [
    "HiddenSpec",
    "Meshes",
    "Pipeline",
    "PipelineStages",
    "Stopwatch",
    "bubble_fraction",
    "check_tensor_parallel",
    "parallelize",
    "plan_pipeline",
    "vocabulary_shard",
    "wrap_blocks",
]
