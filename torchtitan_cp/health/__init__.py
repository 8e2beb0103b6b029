"""Noticing a step that is not finite or far off, on every rank, before the optimizer sees it; and what follows.

Imports `config` and `attention` at most.
"""

from torchtitan_cp.health.inject import Injector
from torchtitan_cp.health.monitor import BlockWatch, StepReport, all_gather_report
from torchtitan_cp.health.recovery import NonFiniteError, RecoveryPolicy
from torchtitan_cp.health.spikes import SpikeDetector

__all__ = [
    "BlockWatch",
    "Injector",
    "RecoveryPolicy",
    "NonFiniteError",
    "SpikeDetector",
    "StepReport",
    "all_gather_report",
]
