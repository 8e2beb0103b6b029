"""The nodes of a job: their names, how one reaches another, and whether they share a folder."""

import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

NOTICE_SECONDS, STOP_SECONDS = 60.0, 10.0
SHARED_SECONDS = 10.0  # in which a network file system shows a node what another has written


def node_name() -> str:
    """A name that no other node has: the number that a launcher gave this node, else its host name.

    Machines made from one image may have the same host name.
    """
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def is_first_of_node() -> bool:
    """Whether this is the rank that does what only one rank of each node has to do."""
    return dist.get_rank() == 0 or os.environ.get("LOCAL_RANK", "0") == "0"


def route_to(host: str) -> tuple[str, str]:
    """A host's address, and this machine's own address on the route to it. Sends nothing.

    Raises:
        OSError: the name does not resolve, or no interface leads there.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(address[0]), str(probe.getsockname()[0])


def is_own(host: str) -> bool:
    """Whether a host is this machine, by its name or by an address of an interface.

    Raises:
        OSError: the name does not resolve.
    """
    found = [host == socket.gethostname()]
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe, suppress(OSError):
            probe.bind(address)
            found.append(True)
    return any(found)


@cache
def own_address(host: str) -> str | None:
    """The address at which another machine finds this one, where its own name does not say so; None where it does.

    Debian's /etc/hosts gives a machine's name the address 127.0.1.1, and some names do not resolve at all.

    Raises:
        OSError: as `route_to`.
    """
    with suppress(OSError):
        if not ip_address(socket.getaddrinfo(socket.gethostname(), None)[0][4][0]).is_loopback:
            return None
    return route_to(host)[1]


def ask(question: Callable[[], T], seconds: float, stopping: threading.Event | None = None) -> list[T]:
    """The answer of a store, alone in a list; [] if it fails, or takes longer.

    A thread asks: in the main thread no signal is heard until TCP gives up a lost node, after a quarter of an hour.

    Args:
        stopping: once it is set, 10 s are enough.
    """
    answers: list[T] = []

    def ask_store() -> None:
        with suppress(Exception):
            answers.append(question())

    thread = threading.Thread(target=ask_store, daemon=True)
    thread.start()
    begun, notice_printed, waited = time.monotonic(), False, 0.0
    while thread.is_alive() and waited < seconds and not (stopping and stopping.is_set() and waited > STOP_SECONDS):
        if waited > NOTICE_SECONDS and not notice_printed:
            print(
                f"node 0 has not answered for {NOTICE_SECONDS:g} s; waiting up to {seconds:g} s for it", file=sys.stderr
            )
            notice_printed = True
        thread.join(min(0.2, seconds - waited))
        waited = time.monotonic() - begun
    return answers


def nodes_not_sharing(folder: Path) -> list[str]:
    """Which nodes have another folder of this name than rank 0. Collective.

    Returns:
        by rank, its host if it is the first of such a node; otherwise an empty text.
    """
    name, rank = [f".shared-{uuid.uuid4().hex}"], dist.get_rank()
    if rank == 0:
        with suppress(OSError):  # a complete cache may be read-only
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name[0]).touch()
    dist.broadcast_object_list(name)
    probe, deadline = folder / name[0], time.monotonic() + SHARED_SECONDS
    found = rank == 0 or not is_first_of_node()
    while not found and time.monotonic() < deadline:
        time.sleep(0.1)
        with suppress(OSError):  # this node may not enter it
            found = probe.exists()
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, "" if found else socket.gethostname())
    if rank == 0:
        with suppress(OSError):
            probe.unlink()
    return hosts
