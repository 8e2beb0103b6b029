"""Context-parallel attention as a library of its own. Imports nothing else of this repository.

Three independent choices: a layout says which chunks of the sequence a rank holds, a strategy how keys travel
between ranks, a kernel how one tile is computed. The plan lists each rank's tiles and the keys they need.
"""

from torchtitan_cp.attention.api import ContextParallel, attend, make_plan, sum_ranks
from torchtitan_cp.attention.collectives import watch_messages
from torchtitan_cp.attention.doctor import doctor
from torchtitan_cp.attention.errors import ContextParallelError, LayoutError, PlanError
from torchtitan_cp.attention.linear.convolution import causal_conv
from torchtitan_cp.attention.linear.operator import DELTA_RULE, gated_delta_rule, selective_scan
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.operator import OPERATOR, prepare_plan
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.sdpa_context import context_parallel
from torchtitan_cp.attention.strategies import choose_strategy

# Operators of torch.library (attention; the delta rule): policies of selective activation checkpointing keep what they
# give instead of computing it again.
OPERATORS = (OPERATOR, DELTA_RULE)

__all__ = [
    "OPERATOR",
    "OPERATORS",
    "AttentionMask",
    "ContextParallel",
    "ContextParallelError",
    "LayoutError",
    "Plan",
    "PlanError",
    "attend",
    "causal_conv",
    "choose_strategy",
    "context_parallel",
    "doctor",
    "gated_delta_rule",
    "make_plan",
    "prepare_plan",
    "selective_scan",
    "sum_ranks",
    "watch_messages",
]
