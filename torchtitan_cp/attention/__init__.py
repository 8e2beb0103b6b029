"""Context-parallel attention as a library of its own. Imports torch, and no other room of this house.

Three choices that do not know each other: a layout says which chunk of the sequence a rank holds, a plan
says which tiles it computes and which keys must travel, a kernel computes one tile.
"""

from torchtitan_cp.attention.api import ContextParallel, attend, make_plan, sum_ranks
from torchtitan_cp.attention.collectives import watch_messages
from torchtitan_cp.attention.errors import ContextParallelError, LayoutError, PlanError
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.operator import OPERATOR
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.sdpa_context import context_parallel
from torchtitan_cp.attention.simulate import Simulation, simulate
from torchtitan_cp.attention.strategies import choose_strategy

__all__ = [
    "OPERATOR",
    "AttentionMask",
    "ContextParallel",
    "ContextParallelError",
    "LayoutError",
    "Plan",
    "PlanError",
    "Simulation",
    "attend",
    "choose_strategy",
    "context_parallel",
    "make_plan",
    "simulate",
    "sum_ranks",
    "watch_messages",
]
