"""gloo process groups that run one collective at a time.

torch gives each gloo group two threads. With several collectives of one group in flight, as tensor parallelism and
compiled blocks have, they race inside gloo, and sooner or later the heap is damaged: ranks die of a segmentation fault
or of "malloc(): unaligned tcache chunk" (torch 2.13, within seconds in a loop; never with one thread).
"""

import os
from typing import Any

from torch.distributed import distributed_c10d


def use_one_thread() -> None:
    """Make every gloo group created from now on run its collectives in one thread."""
    made_by_torch: Any = distributed_c10d.ProcessGroupGloo
    if getattr(made_by_torch, "one_thread", False):
        return

    class Maker(type(made_by_torch)):  # type: ignore[misc]
        """Creates torch's own groups, with other options."""

        def __call__(cls, store: Any, rank: int, size: int, timeout: Any, **others: Any) -> Any:
            options = made_by_torch._Options()
            options._threads, options._timeout = 1, timeout
            names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
            chosen = [made_by_torch.create_device(interface=name) for name in names]
            options._devices = chosen or [made_by_torch.create_default_device()]
            for name, value in others.items():  # enable_reconfigure, from torch 2.15 on
                setattr(options, name, value)
            return made_by_torch(store, rank, size, options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, made_by_torch)

    class OneThread(made_by_torch, metaclass=Maker):
        one_thread = True

    distributed_c10d.ProcessGroupGloo = OneThread  # type: ignore[misc]
