"""Exchanges: how the ranks of a group see each other's keys and values. One file each."""

from torchtitan_cp.attention.strategies import ring
from torchtitan_cp.attention.strategies.strategy import Strategy

STRATEGIES: dict[str, Strategy] = {"ring": ring.STRATEGY}

__all__ = ["STRATEGIES", "Strategy"]
