"""Plans by number, so that a compiled graph can take one as an input: a number in a CPU tensor.

Another plan is another number and compiles nothing anew, and a recomputation under activation
checkpointing finds the plan that its own forward was given.
"""

from collections import OrderedDict
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from torchtitan_cp.attention.errors import PlanError

# Micro-batches in flight times the layers' different masks stay far below this.
KEPT_PLANS = 1024

_plans: OrderedDict[int, Any] = OrderedDict()
_numbers: dict[Any, int] = {}
_lock = Lock()  # a loader's thread makes plans too
_last_number = 0


def keep(plan: Any) -> Tensor:
    """The number of a plan in this process, int64 on CPU; equal plans have one number."""
    global _last_number
    with _lock:
        number = _numbers.get(plan)
        if number is None:
            _last_number += 1
            number = _numbers[plan] = _last_number
            _plans[number] = plan
            if len(_plans) > KEPT_PLANS:
                oldest, forgotten = _plans.popitem(last=False)
                if _numbers.get(forgotten) == oldest:
                    del _numbers[forgotten]
        return torch.tensor(number)


def plan_of(handle: Tensor) -> Any:
    """The plan under a number.

    Raises:
        PlanError: more than 1,024 other plans were made or used since it was.
    """
    number = int(handle)
    with _lock:
        if number not in _plans:
            raise PlanError(
                f"plan {number} is no longer kept",
                fix=f"make it again, or run a micro-batch's backward before {KEPT_PLANS} other plans are made",
            )
        _plans.move_to_end(number)
        return _plans[number]
