"""One job at a time on a run's folder, which all its nodes share."""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.file_lock import lock_file
from torchtitan_cp.config.run_folder import LOCK_FILE, name_run_folder_errors, prepare_run_folder
from torchtitan_cp.runtime.nodes import nodes_not_sharing

logger = logging.getLogger(__name__)

LOST_SECONDS = 150.0  # NFS keeps the lock of a lost node for 90 s, while the job may start again on other nodes


@contextmanager
def run_dir_lock(folder: str | Path) -> Iterator[None]:
    """Lock a run's folder for this job. The system unlocks it when rank 0 ends, however it ends. Collective.

    Raises:
        ConfigError: another job has locked it, it cannot be written, or a node has another folder of this name.
    """
    with ExitStack() as stack:
        refused: list[ConfigError | None] = [None]
        if dist.get_rank() == 0:
            try:
                _lock(Path(folder), stack)
            except ConfigError as error:
                refused = [error]
        dist.broadcast_object_list(refused)
        if refused[0]:
            raise refused[0]
        if others := ", ".join(sorted({*nodes_not_sharing(Path(folder))} - {""})):
            raise ConfigError(
                f"job.dump_folder = {str(folder)!r} is not shared: on {others} it is another folder than on rank 0's "
                "node",
                fix="put it on a file system that all nodes share: --job.dump_folder=...",
            )
        yield


def _lock(folder: Path, stack: ExitStack) -> None:
    """Make the folder, lock it until the stack ends, and write to it what tells whether a run can."""
    with name_run_folder_errors(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context((folder / LOCK_FILE).open("a+"))
    several_nodes = dist.get_world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    deadline = time.monotonic() + LOST_SECONDS * several_nodes

    def while_locked(attempt: int) -> None:
        file.seek(0)
        holder = file.readline().strip() or "pid unknown"
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"another job is training in job.dump_folder = {str(folder)!r} ({holder})",
                fix="wait for it or end it, or give this run a folder of its own: --job.dump_folder=...",
            )
        if attempt == 0:
            logger.warning("%s is locked (%s); waiting %.0f s for it", file.name, holder, LOST_SECONDS)

    try:
        lock_file(file, 1.0, while_locked)
    except OSError as error:
        logger.warning("%s: this file system has no locks (%s); run only one job on it", file.name, error.strerror)
    prepare_run_folder(str(folder))
    with suppress(OSError):  # a disk that was filled meanwhile
        file.truncate(0)
        os.write(file.fileno(), f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
