"""The optimizers, one file and one entry each: how it is built, what it updates, its state, and what it excludes.

`check`, resume, the planner and offloading ask the entry, so another optimizer is a file here and a name in
`config/names.py`; docs/how_to_add.md shows it.
"""

from torchtitan_cp.optim.optimizers.adamw import ADAMW
from torchtitan_cp.optim.optimizers.kind import OptimizerKind
from torchtitan_cp.optim.optimizers.muon import MUON

OPTIMIZERS: dict[str, OptimizerKind] = {"adamw": ADAMW, "muon": MUON}

__all__ = ["ADAMW", "OPTIMIZERS", "OptimizerKind"]
