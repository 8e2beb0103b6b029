"""Saving and resuming: complete or absent, the newest found by itself, resharded to any number of ranks.

`store` holds a run's checkpoints, `writer` and `manifest` make and check what is on disk, `reader` reads it without
running any code of it. Imports `config` at most.
"""

from torchtitan_cp.checkpoint.lock import hold_folder
from torchtitan_cp.checkpoint.progress import Progress, check_identity
from torchtitan_cp.checkpoint.schedule import SaveSchedule
from torchtitan_cp.checkpoint.store import Checkpoints

__all__ = ["Checkpoints", "Progress", "SaveSchedule", "check_identity", "hold_folder"]
