"""Exchanges: how the ranks of a group see each other's keys and values. One file each."""

from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.strategies import all_gather, all_to_all, ring
from torchtitan_cp.attention.strategies.strategy import Call, Residuals, Strategy

# Hybrid is all_to_all within the groups of a ring.
STRATEGIES: dict[str, Strategy] = {
    "ring": ring.STRATEGY,
    "all_gather": all_gather.STRATEGY,
    "all_to_all": all_to_all.STRATEGY,
    "hybrid": all_to_all.STRATEGY,
}


def check_strategy(name: str) -> str:
    """A name of the strategies' registry, or `auto`."""
    if name != "auto" and name not in STRATEGIES:
        raise PlanError(f"strategy {name!r} is not available", fix=f"use one of auto, {', '.join(STRATEGIES)}")
    return name


def choose_strategy(query_heads: int, key_heads: int, ranks: int, band: Band) -> str:
    """What `auto` means on a 1-D mesh.

    A window keeps the ring's messages to the neighbours. Without one the ring carries about three quarters
    of P - 1 shards of K and V, all-to-all one shard of q, k, v and out whatever P is, but it needs heads that
    divide, and nothing hides its messages: it is taken where it carries less than half.
    """
    # A compiler traces this, with sizes that it may not know: no text here.
    if ranks == 1 or band.low is not None or query_heads % ranks or key_heads % ranks:
        return "ring"
    return "all_to_all" if _traded_share(query_heads, key_heads, ranks) < 0.5 else "ring"


def explain_strategy(query_heads: int, key_heads: int, ranks: int, band: Band) -> str:
    """Why `choose_strategy` chooses what it does."""
    if ranks == 1:
        return "one rank has nothing to exchange"
    if band.low is not None:
        return f"a window of {-band.low} tokens leaves little to carry"
    if query_heads % ranks or key_heads % ranks:
        return f"{query_heads} and {key_heads} heads do not divide by {ranks} ranks"
    share = _traded_share(query_heads, key_heads, ranks)
    if share < 0.5:
        return f"it carries {share:.0%} of the ring's volume"
    return f"all_to_all would carry {share:.0%} of its volume, with nothing to hide it"


def _traded_share(query_heads: int, key_heads: int, ranks: int) -> float:
    """What all_to_all carries over what the ring carries."""
    return (query_heads + key_heads) / (0.75 * ranks * key_heads)


__all__ = ["STRATEGIES", "Call", "Residuals", "Strategy", "check_strategy", "choose_strategy", "explain_strategy"]
