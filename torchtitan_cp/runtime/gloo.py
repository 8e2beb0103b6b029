"""gloo process groups that run one collective at a time.

torch gives each gloo group two threads. With several collectives of one group in flight, as tensor parallelism and
compiled blocks have, they race inside gloo, and sooner or later the heap is damaged: ranks die of a segmentation fault
or of "malloc(): unaligned tcache chunk" (torch 2.13, within seconds in a loop; never with one thread).
"""

import os
import socket
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroup, Store, distributed_c10d

from torchtitan_cp.config import ConfigError
from torchtitan_cp.runtime.nodes import own_address


@cache
def use_one_thread() -> None:
    """Make every gloo group created from now on run its collectives in one thread."""
    group: Any = distributed_c10d.ProcessGroupGloo
    made_by_torch = group.__init__

    def make(self: ProcessGroup, store: Store, rank: int, size: int, timeout: timedelta, **others: object) -> None:
        """As torch makes its groups, with other options."""
        options = group._Options()
        options._threads, options._timeout = 1, timeout
        address = own_address(os.environ.get("MASTER_ADDR", "localhost"))
        default = group.create_device(hostname=address) if address else group.create_default_device()
        try:
            options._devices = [group.create_device(interface=name) for name in _interfaces()] or [default]
        except RuntimeError:
            variable = "GLOO_SOCKET_IFNAME" if os.environ.get("GLOO_SOCKET_IFNAME") else "NCCL_SOCKET_IFNAME"
            raise ConfigError(
                f"{variable} = {','.join(_interfaces())!r}, and {socket.gethostname()} has no address there",
                fix=f"name the one that reaches other nodes: {', '.join(name for _, name in socket.if_nameindex())}",
            ) from None
        for name, value in others.items():  # enable_reconfigure, from torch 2.15 on
            setattr(options, name, value)
        made_by_torch(self, store, rank, size, options)

    group.__init__ = make


def _interfaces() -> list[str]:
    """The interfaces that GLOO_SOCKET_IFNAME names, else NCCL's if that is the whole name of one, not a prefix."""
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return list(filter(None, names.split(",")))
    name = os.environ.get("NCCL_SOCKET_IFNAME")
    return [name] if name in [known for _, known in socket.if_nameindex()] else []
