"""Results that are kept for the newest arguments, as far as they fit: of functions on the host, and on a device.

The small tensors that the host works out for a plan and kernels read on the device are copied once. A sequence of 1M
tokens may hold 100,000 documents: what is worked out for its plan is then tens of megabytes, and a cache that counts
results would keep a thousand of them.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import fields
from functools import _lru_cache_wrapper, lru_cache
from threading import RLock
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
KEPT_RESULTS, KEPT_BYTES = 1024, 256 << 20
ENTRY_BYTES = 192  # of a tuple of a few numbers and what holds it, about


class BoundedCache:
    """An LRU cache by key and device, as far as values fit into `budget_bytes`; it keeps at least one.

    Args:
        size_of: bytes of a value; None: of its tensors.

    Attributes:
        held: (value, bytes) by key, the newest last; held_bytes: of all.
    """

    def __init__(self, budget_bytes: int, size_of: Callable[[Any], int] | None = None) -> None:
        self.budget_bytes, self.size_of = budget_bytes, size_of or _bytes
        self.held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.held_bytes = 0
        self._lock = RLock()  # a loader's thread, the main one and autograd's use it; garbage collection may, within

    def get(self, key: Hashable, like: Tensor | None, make: Callable[[], T]) -> T:
        """The value of a key on the device of `like` (None: the host), or what `make` returns."""
        # Tensors without data belong to the mode that made them.
        key = key, getattr(like, "device", None), getattr(like, "fake_mode", None)
        with self._lock:
            if key in self.held:
                self.held.move_to_end(key)
                return self.held[key][0]
        value = make()
        size = self.size_of(value)
        with self._lock:
            self.held_bytes += size - self.held.pop(key, (None, 0))[1]  # another thread may have made it too
            self.held[key] = value, size
            while len(self.held) > 1 and self.held_bytes > self.budget_bytes:
                self.held_bytes -= self.held.popitem(last=False)[1][1]
        return value


def keep_newest(function: Callable[..., T]) -> "_lru_cache_wrapper[T]":
    """As lru_cache(1,024), but forgets all results once those since the last time have taken KEPT_BYTES.

    Counted with their arguments. For what can be worked out again.
    """
    taken = 0

    @lru_cache(KEPT_RESULTS)
    def run(*arguments: Any, **named: Any) -> T:
        nonlocal taken
        result = function(*arguments, **named)
        size = host_bytes((result, *arguments))
        taken += size
        if taken > KEPT_BYTES:
            run.cache_clear()
            taken = size
        return result

    return run


def hashed_once(cls: type[T]) -> type[T]:
    """Mark a frozen dataclass whose objects keep their hash: every look-up in a cache would hash 100,000 documents.

    What is pickled is only the fields, and made again where it is loaded: there strings have other hashes.
    """
    of_fields = cls.__hash__
    cls.__hash__ = lambda self: vars(self).get("hash") or vars(self).setdefault("hash", of_fields(self))  # type: ignore
    cls.__reduce__ = lambda self: (cls, tuple(getattr(self, each.name) for each in fields(self)))  # type: ignore
    return cls


def host_bytes(value: Any, depth: int = 3) -> int:
    """About what tuples and lists in a value take, three deep, in the value and in its attributes."""
    if not isinstance(value, tuple | list):
        return sum([host_bytes(x, depth) for x in getattr(value, "__dict__", {}).values()])
    # By kind: a call for each of 100,000 documents would take half as long as their plan.
    if depth == 2 and all(issubclass(kind, tuple | list) for kind in set(map(type, value))):
        return ENTRY_BYTES * sum(map(len, value))
    return sum(host_bytes(x, depth - 1) for x in value if type(x) is not int) if depth > 1 else ENTRY_BYTES * len(value)


def _bytes(value: Any) -> int:
    """Of the tensors in a value: in tuples, and in attributes of objects such as a BlockMask."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes, value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()))


def to_device(x: Tensor, like: Tensor) -> Tensor:
    """A copy on the device of `like`, for which the host does not wait."""
    real = getattr(like, "fake_mode", None) is None
    source = x.pin_memory() if like.is_cuda and real and x.is_cpu else x  # not under torch.set_default_device("cuda")
    return like.new_empty(x.shape, dtype=x.dtype).copy_(source, non_blocking=True)
