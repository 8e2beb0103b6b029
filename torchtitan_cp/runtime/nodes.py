"""The nodes of a job: what tells one from the others, and which folders they share."""

import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist


def node_name() -> str:
    """What tells this node from others: its number if a launcher gave one, as images may share a host name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def is_first_of_node() -> bool:
    """Whether this rank does what one rank of each node has to do."""
    return dist.get_rank() == 0 or os.environ.get("LOCAL_RANK", "0") == "0"


def hosts_without(folder: Path, seconds: float) -> list[str]:
    """Which nodes have another folder of this name than rank 0. Collective.

    Args:
        seconds: in which a network file system shows a node what another has written.

    Returns:
        by rank, its host if it is the first of such a node; otherwise an empty text.
    """
    name, rank = [f".shared-{uuid.uuid4().hex}"], dist.get_rank()
    if rank == 0:
        with suppress(OSError):  # a complete cache may be read-only
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name[0]).touch()
    dist.broadcast_object_list(name)
    probe, deadline = folder / name[0], time.monotonic() + seconds
    looks = rank > 0 and is_first_of_node()
    while looks and not probe.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname() if looks and not probe.exists() else "")
    if rank == 0:
        with suppress(OSError):
            probe.unlink()
    return hosts
