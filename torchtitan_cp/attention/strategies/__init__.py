"""Strategies: how the ranks of a group exchange keys and values, one file each. hybrid runs the code of all_to_all.

KV is sent in `exchange_kv` of ring.py, `gather_heads` of all_gather.py and `HeadAllToAll.to_heads` of all_to_all.py.

To add a strategy:

1. Write a file here with a `STRATEGY`; strategy.py has the interface, ring.py is the model to follow.
2. Add it to `STRATEGIES` below, its name to STRATEGIES in config/names.py (then regenerate docs/config.md), and its
   cost to STRATEGY_COSTS in planner/strategy_costs.py. A test fails until the names agree.
3. Put rules that only it has (a mesh of two axes, no float8) into api.py. The loader prepares the tiles of the plan's
   steps, or those for all keys if it `gathers_keys` (operator.prepare_plan).
4. The conformance tests run every strategy of this registry. Add a row to tests/ranks/training/test_parity.py.

A plan for one rank names the ring; `benchmarks.simulation.simulate` runs a strategy on many ranks in one process.
"""

import logging
from functools import lru_cache

from torchtitan_cp.attention.errors import check_name
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.ring_cost import CAUSAL_FRACTION
from torchtitan_cp.attention.strategies import all_gather, all_to_all, ring
from torchtitan_cp.attention.strategies.strategy import Strategy

logger = logging.getLogger(__name__)

STRATEGIES: dict[str, Strategy] = {
    "ring": ring.STRATEGY,
    "all_gather": all_gather.STRATEGY,
    "all_to_all": all_to_all.STRATEGY,
    # On a 2-D mesh: heads are traded within a node, and KV travels in a ring between nodes.
    "hybrid": all_to_all.STRATEGY,
}


def check_strategy(name: str) -> str:
    """Return `name`, or raise PlanError unless it is `auto` or a registered strategy."""
    return check_name("strategy", name, ("auto", *STRATEGIES))


def choose_strategy(query_heads: int, key_heads: int, ranks: int, band: Band, kv_transfer: str = "exact") -> str:
    """The strategy that `auto` takes on a 1-D mesh.

    With a window, the ring's messages only go to neighbours. Without one, the ring sends about three quarters of P - 1
    shards of K and V. all_to_all sends one shard of q, k, v and out whatever P is, but its messages do not overlap with
    compute: it is taken if P divides the heads and it sends less than half. It cannot send keys in 8 bits.

    Args:
        query_heads, key_heads: Hq and Hkv; ranks: P.
        band: the keys that a query may see; `band.low` is None without a window on the left.
        kv_transfer: as for ContextParallel.

    Returns:
        "ring" or "all_to_all".
    """
    # torch.compile traces this function with symbolic sizes, so it must not format text.
    if kv_transfer != "exact" or band.low is not None or query_heads % ranks or key_heads % ranks:
        return "ring"
    return "all_to_all" if _volume_fraction(query_heads, key_heads, ranks) < 0.5 else "ring"


def ranks_trading_heads(plan: Plan, query_heads: int, key_heads: int) -> int:
    """How many ranks trade heads in an attention: as the plan says, or for `auto` as `choose_strategy` does."""
    if plan.strategy != "auto":
        return plan.all_to_all_ranks
    chosen = choose_strategy(query_heads, key_heads, plan.ranks, plan.mask.band, plan.kv_transfer)
    return plan.ranks if STRATEGIES[chosen].uses_all_to_all else 1


@lru_cache(maxsize=256)
def log_choice(chosen: str, query_heads: int, key_heads: int, ranks: int, band: Band) -> None:
    """Log once which strategy `choose_strategy` chose for exact keys and values, and why."""
    window = "no window" if band.low is None else f"a window of {1 - band.low} tokens"
    fraction = _volume_fraction(query_heads, key_heads, ranks)
    why = f"{query_heads} query and {key_heads} key heads, {window}; all_to_all (if heads divide, without a window) "
    why += f"carries {fraction:.0%} of the ring's volume"
    logger.info("attention strategy %s on %d ranks: %s", chosen, ranks, why)


def _volume_fraction(query_heads: int, key_heads: int, ranks: int) -> float:
    """The volume of all_to_all divided by the ring's."""
    return (query_heads + key_heads) / (CAUSAL_FRACTION * ranks * key_heads)
