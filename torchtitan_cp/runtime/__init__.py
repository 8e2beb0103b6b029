"""Devices, the launcher, the start of ranks, the watchdog, stop signals, and consistency between ranks.

Imports `config` at most.
"""

from torchtitan_cp.runtime.device import Device, World, seed_step, start_ranks, stop_ranks, use_deterministic_kernels
from torchtitan_cp.runtime.signals import StopSignals, any_rank

__all__ = [
    "Device",
    "StopSignals",
    "World",
    "any_rank",
    "seed_step",
    "start_ranks",
    "stop_ranks",
    "use_deterministic_kernels",
]
