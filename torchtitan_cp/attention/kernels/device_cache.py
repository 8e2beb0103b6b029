"""Small tensors that the host works out for a plan and kernels read on the device: copied once, kept within bounds."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class DeviceCache:
    """An LRU cache by key and device, as far as tensors fit into `budget_bytes`; it keeps at least one."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()  # a loader's thread, the main thread and autograd's use it

    def get(self, key: Hashable, like: Tensor, make: Callable[[], T]) -> T:
        """The value of a key on the device of `like`, or what `make` returns."""
        # Tensors without data belong to the mode that made them.
        key = key, like.device, getattr(like, "fake_mode", None)
        with self._lock:
            if key in self.held:
                self.held.move_to_end(key)
                return self.held[key][0]
        value = make()
        with self._lock:
            self.held[key] = value, _bytes(value)
            while len(self.held) > 1 and self.held_bytes > self.budget_bytes:
                self.held.popitem(last=False)
        return value

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors of all values."""
        return sum(held for _, held in self.held.values())


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
