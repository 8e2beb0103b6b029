"""Noticing a number that is not finite, on every rank, before the optimizer sees it.

Imports `config` at most.
"""

from torchtitan_cp.health.policy import NonFiniteError, Policy
from torchtitan_cp.health.watch import GradientProbe, StepReport, exchange

__all__ = ["GradientProbe", "NonFiniteError", "Policy", "StepReport", "exchange"]
