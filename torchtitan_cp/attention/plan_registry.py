"""Plans by number, so that a compiled graph can take a plan as an input: as a number in a CPU tensor.

A new plan is a new number, and recompiles nothing. A recomputation under activation checkpointing finds the plan of
its own forward.
"""

from threading import RLock
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchtitan_cp.attention.caching import KEPT_BYTES, KEPT_RESULTS, BoundedCache, host_bytes
from torchtitan_cp.attention.errors import PlanError

if TYPE_CHECKING:
    from torchtitan_cp.attention.plan import Plan

_plans: "WeakValueDictionary[int, Plan]" = WeakValueDictionary()
_lock = RLock()  # a loader's thread registers plans too; reentrant, as garbage collection may remove one in between
_kept = BoundedCache(KEPT_BYTES, lambda plan: max(KEPT_BYTES // KEPT_RESULTS, host_bytes((plan,))))


def register_plan(plan: "Plan") -> "tuple[Tensor, Plan]":
    """The number of a plan in this process, int64 on CPU, and the plan that is registered under it.

    Equal plans share a number, and the first of them is registered, for as long as it lives: the others must hold a
    reference to it. The latest plans that were registered or found are kept alive here, even if nobody else holds
    them: KEPT_RESULTS of them, or as many as fit into KEPT_BYTES.
    """
    number = hash(plan)
    with _lock:
        while (registered := _plans.setdefault(number, plan)) != plan:
            number += 1
        _kept.get(number, None, lambda: registered)
    with torch.inference_mode(False):  # autograd cannot save a tensor of inference mode
        return torch.tensor(number, device="cpu"), registered


def find_plan(handle: Tensor) -> "Plan":
    """The plan registered under a number.

    Raises:
        PlanError: nobody holds it, and too many other plans have been registered or found since.
    """
    number = int(handle)
    plan = _plans.get(number)
    if plan is None:
        raise PlanError(f"plan {number} is no longer kept", fix="hold a reference to it until its backward has run")
    return _kept.get(number, None, lambda: plan)
