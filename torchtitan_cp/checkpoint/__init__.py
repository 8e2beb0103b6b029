"""Saving and resuming: complete or absent, the newest found by itself, resharded to any number of ranks.

Imports `config` at most.
"""

from torchtitan_cp.checkpoint.store import Checkpoints, Progress

__all__ = ["Checkpoints", "Progress"]
