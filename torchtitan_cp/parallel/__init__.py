"""Devices, process groups, meshes, and what is done to a model so that it runs on them.

Imports `config` at most. Each function takes a mesh and plain values; the order they are applied in is
visible in `apply.py`.
"""

from torchtitan_cp.parallel.apply import parallelize, wrap_blocks
from torchtitan_cp.parallel.device import Device, World, seed_step, start_ranks, stop_ranks, use_deterministic_kernels
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.parallel.pipeline import Hidden, Pipeline, bubble_share, plan_stages
from torchtitan_cp.parallel.signals import StopSignals, any_rank
from torchtitan_cp.parallel.stopwatch import Stopwatch
from torchtitan_cp.parallel.tensor import check_shape, vocabulary_part

__all__ = [
    "Device",
    "Hidden",
    "Meshes",
    "Pipeline",
    "StopSignals",
    "Stopwatch",
    "World",
    "any_rank",
    "bubble_share",
    "check_shape",
    "parallelize",
    "plan_stages",
    "seed_step",
    "start_ranks",
    "stop_ranks",
    "use_deterministic_kernels",
    "vocabulary_part",
    "wrap_blocks",
]
