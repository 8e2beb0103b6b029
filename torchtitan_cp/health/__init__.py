"""Noticing a step that is not finite or far off, on every rank, before the optimizer sees it; and what follows.

Imports `config` and `attention` at most.
"""

from torchtitan_cp.health.inject import Injector
from torchtitan_cp.health.ladder import Ladder, NonFiniteError
from torchtitan_cp.health.spikes import SpikeDetector
from torchtitan_cp.health.watch import BlockWatch, StepReport, exchange

__all__ = ["BlockWatch", "Injector", "Ladder", "NonFiniteError", "SpikeDetector", "StepReport", "exchange"]
