"""Meshes and process groups, and what is done to a model so that it runs on them.

Imports `config` at most. Each function takes a mesh and plain values; the order they are applied in is
visible in `apply.py`.
"""

from torchtitan_cp.parallel.apply import parallelize, wrap_blocks
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.parallel.pipeline import Hidden, Pipeline, bubble_share, plan_stages
from torchtitan_cp.parallel.stopwatch import Stopwatch
from torchtitan_cp.parallel.tensor import check_tensor_parallel, vocabulary_part

__all__ = [
    "Hidden",
    "Meshes",
    "Pipeline",
    "Stopwatch",
    "bubble_share",
    "check_tensor_parallel",
    "parallelize",
    "plan_stages",
    "vocabulary_part",
    "wrap_blocks",
]
