"""Strategies: how the ranks of a group exchange keys and values, one file each; hybrid runs the code of all_to_all.

To add one: write a file here with a `STRATEGY` (strategy.py has the interface), add its line to `STRATEGIES` below and
its name to STRATEGIES in config/names.py (then regenerate docs/config.md), and what it costs to STRATEGY_COSTS in
planner/strategy_costs.py.
Rules that only it has (a mesh of two axes, no float8) belong in api.py. The loader prepares the tiles of the plan's
steps, or with `gathers_keys` the gathered ones (operator.prepare_plan). One rank always runs the ring: try a strategy
on several with `benchmarks.simulation.simulate`. Tests fail until the names agree, and the conformance tests run every
strategy of this registry; add a row to tests/ranks/training/test_parity.py.
"""

import logging
from functools import lru_cache

from torchtitan_cp.attention.errors import check_name
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.plan import Plan
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

    A window limits the ring's messages to the neighbours. Without one, the ring carries about three quarters
    of P - 1 shards of K and V. all_to_all carries one shard of q, k, v and out whatever P is, but needs heads
    that divide, and its messages are not overlapped: it is taken if it carries less than half. What it carries is
    exact, so keys in 8 bits stay on the ring.

    Args:
        query_heads, key_heads: Hq and Hkv; ranks: P.
        band: of the mask, see AttentionMask.band.
        kv_transfer: as for ContextParallel.

    Returns:
        "ring" or "all_to_all".
    """
    # torch.compile traces this function with sizes it may not know, so it must not format text.
    if kv_transfer != "exact" or band.low is not None or query_heads % ranks or key_heads % ranks:
        return "ring"
    return "all_to_all" if _traded_share(query_heads, key_heads, ranks) < 0.5 else "ring"


def resolve_strategy(plan: Plan, query_heads: int, key_heads: int) -> tuple[str, int]:
    """A plan's strategy and how many ranks trade heads; `auto` is decided by the heads."""
    if plan.strategy != "auto":
        return plan.strategy, plan.all_to_all_ranks
    chosen = choose_strategy(query_heads, key_heads, plan.ranks, plan.mask.band, plan.kv_transfer)
    return chosen, plan.ranks if STRATEGIES[chosen].uses_all_to_all else 1


@lru_cache(maxsize=256)
def log_choice(query_heads: int, key_heads: int, ranks: int, band: Band) -> None:
    """Log once what `choose_strategy` chose, and why."""
    chosen = choose_strategy(query_heads, key_heads, ranks, band)
    window = "no window" if band.low is None else f"a window of {1 - band.low} tokens"
    share = _traded_share(query_heads, key_heads, ranks)
    why = f"{query_heads} query and {key_heads} key heads, {window}; all_to_all (if heads divide, without a window) "
    why += f"carries {share:.0%} of the ring's volume"
    logger.info("attention strategy %s on %d ranks: %s", chosen, ranks, why)


def _traded_share(query_heads: int, key_heads: int, ranks: int) -> float:
    """The volume of all_to_all divided by the ring's."""
    return (query_heads + key_heads) / (0.75 * ranks * key_heads)
