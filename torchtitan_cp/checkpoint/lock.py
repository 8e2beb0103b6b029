"""One job at a time on a run's folder."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.check import LOCK_FILE, check_dump_folder

logger = logging.getLogger(__name__)


@contextmanager
def run_dir_lock(folder: str | Path) -> Iterator[None]:
    """Lock a run's folder for this job; the system unlocks it when the first rank ends, however it ends. Collective.

    Raises:
        ConfigError: another job has locked it, or it cannot be written.
    """
    with ExitStack() as stack:
        refusal: list[ConfigError | None] = [None]
        if dist.get_rank() == 0:
            try:
                _lock(Path(folder), stack)
            except ConfigError as error:
                refusal = [error]
        dist.broadcast_object_list(refusal)
        if refusal[0]:
            raise refusal[0]
        yield


def _lock(folder: Path, stack: ExitStack) -> None:
    check_dump_folder(str(folder))
    file = stack.enter_context((folder / LOCK_FILE).open("a"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another job is training in job.dump_folder = {str(folder)!r}",
            fix="wait for it or end it, or give this run a folder of its own: --job.dump_folder=...",
        ) from None
    except OSError as error:
        logger.warning("%s: this file system has no locks (%s); start no second job on it", file.name, error.strerror)
