"""Caches that are bounded by bytes: for results of functions on the host, and for tensors on a device.

A sequence of 1M tokens may hold 100,000 documents. What is worked out for its plan then takes tens of megabytes, and a
cache that is bounded by a number of results would keep a thousand of them.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import fields
from functools import _lru_cache_wrapper, lru_cache
from threading import RLock
from typing import TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
KEPT_RESULTS, KEPT_BYTES = 1024, 256 << 20
ENTRY_BYTES = 192  # about what a tuple of a few numbers and the reference to it take


class BoundedCache:
    """An LRU cache by key and device that holds up to `budget_bytes`, but at least one value.

    Args:
        size_of: bytes of a value; default: the bytes of its tensors.

    Attributes:
        entries: (value, bytes) by key, the least recently used first; held_bytes: the sum of the bytes.
    """

    def __init__(self, budget_bytes: int, size_of: Callable[[object], int] | None = None) -> None:
        self.budget_bytes, self.size_of = budget_bytes, size_of or _tensor_bytes
        self.entries: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()
        self.held_bytes = 0
        # The main thread, a loader's and autograd's use it. Reentrant, as garbage collection may use it in between.
        self._lock = RLock()

    def get(self, key: Hashable, like: Tensor | None, make: Callable[[], T]) -> T:
        """The value of a key on the device of `like` (None: the host), or what `make` returns."""
        # Fake tensors belong to the mode that made them.
        key = key, getattr(like, "device", None), getattr(like, "fake_mode", None)
        with self._lock:
            if key in self.entries:
                self.entries.move_to_end(key)
                return cast(T, self.entries[key][0])
        with torch.inference_mode(False):  # autograd cannot save a tensor of inference mode, and a later call may
            value = make()
        size = self.size_of(value)
        with self._lock:
            self.held_bytes += size - self.entries.pop(key, (None, 0))[1]  # another thread may have made it too
            self.entries[key] = value, size
            while len(self.entries) > 1 and self.held_bytes > self.budget_bytes:
                self.held_bytes -= self.entries.popitem(last=False)[1][1]
        return value


def keep_newest(function: Callable[..., T]) -> "_lru_cache_wrapper[T]":
    """Like lru_cache(KEPT_RESULTS), but forgets everything whenever new results and their arguments reach KEPT_BYTES.

    For results that can be worked out again.
    """
    taken_bytes = 0

    @lru_cache(KEPT_RESULTS)
    def run(*arguments: Hashable, **named: Hashable) -> T:
        nonlocal taken_bytes
        result = function(*arguments, **named)
        size = host_bytes((result, *arguments))
        taken_bytes += size
        if taken_bytes > KEPT_BYTES:
            run.cache_clear()
            taken_bytes = size
        return result

    return run


def hashed_once(cls: type[T]) -> type[T]:
    """Make objects of a frozen dataclass keep their hash: each look-up in a cache would hash 100,000 documents again.

    Only the fields are pickled. Unpickling constructs a new object, since strings hash differently in another process.
    """
    hash_fields = cls.__hash__
    cls.__hash__ = lambda self: vars(self).get("hash") or vars(self).setdefault("hash", hash_fields(self))  # type: ignore
    cls.__reduce__ = lambda self: (cls, tuple(getattr(self, each.name) for each in fields(self)))  # type: ignore
    return cls


def host_bytes(value: object, depth: int = 3) -> int:
    """About how many bytes the tuples and lists in a value and in its attributes take, down to three levels."""
    if not isinstance(value, tuple | list):
        return sum([host_bytes(x, depth) for x in getattr(value, "__dict__", {}).values()])
    # Checked by type, since a call for each of 100,000 documents would take half as long as their plan.
    if depth == 2 and all(issubclass(kind, tuple | list) for kind in set(map(type, value))):
        return ENTRY_BYTES * sum(map(len, value))
    return sum(host_bytes(x, depth - 1) for x in value if type(x) is not int) if depth > 1 else ENTRY_BYTES * len(value)


def _tensor_bytes(value: object) -> int:
    """Bytes of the tensors in a value: in tuples, and in attributes of objects such as a BlockMask."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_tensor_bytes, value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()))


def to_device(x: Tensor, like: Tensor) -> Tensor:
    """A copy of `x` on the device of `like`; the host does not wait for it."""
    fake = getattr(like, "fake_mode", None) is not None
    # `x` is on the GPU already under torch.set_default_device("cuda").
    source = x.pin_memory() if like.is_cuda and x.is_cpu and not fake else x
    return like.new_empty(x.shape, dtype=x.dtype).copy_(source, non_blocking=True)
