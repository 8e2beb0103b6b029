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
def run_dir_lock(folder: str | Path) -> Iterator[None]:
    """Hold a run's folder for this job; the system lets it go when the first rank ends, however it ends. Collective.

    Raises:
        ConfigError: another job holds it, or it cannot be written.
    """
    with ExitStack() as stack:
        refusal: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                _hold(Path(folder), stack)
            except ConfigError as error:
                refusal = [(error.message, error.fix)]
        dist.broadcast_object_list(refusal)
        if refusal[0]:
            message, fix = refusal[0]
            raise ConfigError(message, fix=fix)
        yield


def _hold(folder: Path, stack: ExitStack) -> None:
    check_dump_folder(str(folder))
    if not _lock(stack.enter_context((folder / LOCK_FILE).open("a"))):
        raise ConfigError(
            f"another job is training in job.dump_folder = {str(folder)!r}",
            fix="wait for it or end it, or give this run a folder of its own: --job.dump_folder=...",
        )


def _lock(file: TextIO) -> bool:
    """Whether nobody else holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s: this file system has no locks (%s); start no second job on it", file.name, error.strerror)
    return True
