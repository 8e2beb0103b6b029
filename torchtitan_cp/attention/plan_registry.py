"""Plans by number, so that a compiled graph can take one as an input: a number in a CPU tensor.

Another plan is another number and compiles nothing anew, and a recomputation under activation
checkpointing finds the plan that its own forward was given.
"""

from collections import OrderedDict
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from torchtitan_cp.attention.errors import PlanError

# Those made or used last are found though nobody holds them any more.
KEPT_PLANS = 1024

_newest: OrderedDict[int, Any] = OrderedDict()
_plans: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_lock = RLock()  # a loader's thread makes plans too, and plans end wherever memory is collected
_last_number = 0


def keep(plan: Any) -> tuple[Tensor, Any]:
    """The number of a plan in this process, int64 on CPU, and the plan that is found under it.

    Equal plans have one number, and the first of them is the one that is found: while it lives. So the others hold it.
    """
    global _last_number
    with _lock:
        first = _plans.get(_numbers.get(plan, 0))
        if first is None:
            _last_number += 1
            _numbers[plan], _plans[_last_number], first = _last_number, plan, plan
        number = _numbers[first]
        _use(number, first)
        return torch.tensor(number), first


def _use(number: int, plan: Any) -> None:
    _newest[number] = plan
    _newest.move_to_end(number)
    if len(_newest) > KEPT_PLANS:
        _newest.popitem(last=False)


def plan_of(handle: Tensor) -> Any:
    """The plan under a number.

    Raises:
        PlanError: nobody holds it, and more than 1,024 other plans were made or used since it was.
    """
    number = int(handle)
    with _lock:
        plan = _plans.get(number)
        if plan is None:
            raise PlanError(
                f"plan {number} is no longer kept",
                fix=f"hold it until its backward has run, or make fewer than {KEPT_PLANS} others before",
            )
        _use(number, plan)
        return plan
