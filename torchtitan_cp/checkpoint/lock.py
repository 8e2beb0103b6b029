"""One job at a time on a run's folder."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.check import check_dump_folder

logger = logging.getLogger(__name__)
LOCK_FILE = ".lock"


@contextmanager
def hold_folder(folder: str | Path) -> Iterator[None]:
    """Hold a run's folder for this job; the system lets it go when the first rank ends, however it ends. Collective.

    Raises:
        ConfigError: another job holds it, or it cannot be written.
    """
    with ExitStack() as stack:
        free: list[Any] = [True]
        if dist.get_rank() == 0:
            check_dump_folder(str(folder))
            free = [_lock(stack.enter_context((Path(folder) / LOCK_FILE).open("a")))]
        dist.broadcast_object_list(free)
        if not free[0]:
            raise ConfigError(
                f"another job is training in job.dump_folder = {str(folder)!r}",
                fix="wait for it or end it, or give this run a folder of its own: --job.dump_folder=...",
            )
        yield


def _lock(file: TextIO) -> bool:
    """Whether nobody else holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s: this file system has no locks (%s); start no second job on it", file.name, error.strerror)
    return True
