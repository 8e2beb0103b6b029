"""Saving and resuming: complete or absent, the newest found by itself, resharded to any number of ranks.

`store` holds a run's checkpoints, `writer` and `manifest` make and check what is on disk, `reader` reads it without
running any code of it. Imports `config` at most.
"""

from torchtitan_cp.checkpoint.lock import run_dir_lock
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.progress import Progress, check_identity
from torchtitan_cp.checkpoint.schedule import SaveSchedule

__all__ = ["CheckpointManager", "Progress", "SaveSchedule", "check_identity", "run_dir_lock"]
