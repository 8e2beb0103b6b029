"""Plans by number, so that a compiled graph can take one as an input: a number in a CPU tensor.

Another plan is another number and compiles nothing anew, and a recomputation under activation
checkpointing finds the plan of its own forward.
"""

from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchtitan_cp.attention.caching import KEPT_BYTES, KEPT_RESULTS, BoundedCache, host_bytes
from torchtitan_cp.attention.errors import PlanError

_plans: WeakValueDictionary[int, Any] = WeakValueDictionary()
_lock = RLock()  # a loader's thread makes plans too, and garbage collection can end one at any point
_kept = BoundedCache(KEPT_BYTES, lambda plan: max(KEPT_BYTES // KEPT_RESULTS, host_bytes((plan,))))


def register_plan(plan: Any) -> tuple[Tensor, Any]:
    """The number of a plan in this process, int64 on CPU, and the plan registered under it.

    Equal plans share a number and the first of them is registered, as long as it lives: the others must hold it. The
    plans registered or found last are kept alive, even if nobody else holds them: 1,024, or as many as take KEPT_BYTES.
    """
    number = hash(plan)
    with _lock:
        while (first := _plans.setdefault(number, plan)) != plan:
            number += 1
        _kept.get(number, None, lambda: first)
    with torch.inference_mode(False):  # autograd cannot save a tensor of inference mode
        return torch.tensor(number, device="cpu"), first


def find_plan(handle: Tensor) -> Any:
    """The plan registered under a number.

    Raises:
        PlanError: nobody holds it, and others were registered or found since: 1,024, or fewer of many documents.
    """
    number = int(handle)
    plan = _plans.get(number)
    if plan is None:
        raise PlanError(
            f"plan {number} is no longer kept",
            fix=f"hold it until its backward has run, or make fewer others before than {KEPT_RESULTS}, or than take "
            f"{KEPT_BYTES >> 20} MiB",
        )
    return _kept.get(number, None, lambda: plan)
