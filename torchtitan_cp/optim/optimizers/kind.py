"""What the rest of the program asks of an optimizer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from torchtitan_cp.config import Config, sections

Groups = list[dict[str, Any]]  # parameter groups, as torch.optim takes them


def one_parameter_each(groups: Groups) -> Iterator[Groups]:
    """The groups in parts that can be updated one after the other: a parameter each."""
    yield from ([{**group, "params": [parameter]}] for group in groups for parameter in group["params"])


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of the registry.

    Attributes:
        build: (parameter groups, [optimizer], compute dtype) -> the optimizer that updates all of them. It must not
            change the groups' keys `lr_scale` and `weight_decay`, and takes `closure=None` in its `step`.
        state_bytes: ([optimizer]) -> bytes of state that a parameter it updates has.
        identity: ([optimizer], experts of a layer, tensor-parallel degree) -> what must be the same to resume, by the
            name that a message gives it.
        check: (config, tensor-parallel degrees of the stages) -> None; raises ConfigError where it cannot run.
        blocks_only: it updates the matrices of the blocks, and AdamW what is left. A group then says whether it is of
            such matrices, by the optimizer's name as its key.
        parts: the groups in parts that a step can update one after the other.
    """

    build: Callable[[Groups, sections.Optimizer, torch.dtype], Optimizer]
    state_bytes: Callable[[sections.Optimizer], float]
    identity: Callable[[sections.Optimizer, int, int], dict[str, Any]]
    check: Callable[[Config, set[int]], None]
    blocks_only: bool = False
    parts: Callable[[Groups], Iterator[Groups]] = one_parameter_each
