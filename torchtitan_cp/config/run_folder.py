"""The run's folder: what every start writes there, and whether it can."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_cp.config.errors import ConfigError

# Two files that every start writes, and a folder.
RUN_CONFIG, LOCK_FILE, CHECKPOINTS = "config.toml", ".lock", "checkpoints"
START_BYTES = 2**16  # about what a start writes


def check_run_folder(folder: str) -> None:
    """Refuse a folder that a start could not make or write, without writing anything.

    What only a write finds, such as a used-up quota, is found by the start itself: `prepare_run_folder`.

    Raises:
        ConfigError: naming what is in the way.
    """
    with name_run_folder_errors(folder):
        _raise_obstacle(Path(folder))


def prepare_run_folder(folder: str) -> None:
    """Make the folder, and write about as much to it as a start does; a job that trains holds its lock.

    Raises:
        ConfigError: the folder, or what each start writes to it, cannot be made or written.
    """
    with name_run_folder_errors(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-") as file:
            file.write(bytes(START_BYTES))
        if (run_config := Path(folder, RUN_CONFIG)).exists():
            run_config.open("a").close()
        if (checkpoints := Path(folder, CHECKPOINTS)).exists():
            checkpoints.mkdir(exist_ok=True)  # raises where it is a file


@contextmanager
def name_run_folder_errors(folder: str) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the key, and the file of the folder that is in the way."""
    try:
        yield
    except OSError as error:
        name = Path(error.filename or folder).name
        blocked = f"{name}: " if name in (RUN_CONFIG, LOCK_FILE, CHECKPOINTS) else ""
        raise ConfigError(
            f"job.dump_folder = {folder!r} cannot be written: {blocked}{error.strerror}",
            fix="free some space, or give a folder you may write to, e.g. --job.dump_folder=outputs/mine",
        ) from None


def _raise_obstacle(folder: Path) -> None:
    """Raise the OSError that making or writing the folder would."""
    place = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not place.is_dir():
        raise _error(errno.ENOTDIR, place)
    disk = os.statvfs(place)
    if not os.access(place, os.W_OK | os.X_OK):
        raise _error(errno.EROFS if disk.f_flag & os.ST_RDONLY else errno.EACCES, place)
    free_blocks = disk.f_bavail if os.geteuid() else disk.f_bfree  # the difference is kept for root
    # Some file systems count neither blocks nor files.
    if (disk.f_blocks and free_blocks * disk.f_frsize < START_BYTES) or (disk.f_files and not disk.f_ffree):
        raise _error(errno.ENOSPC, place)
    for path in (folder / RUN_CONFIG, folder / LOCK_FILE):
        if path.is_dir():
            raise _error(errno.EISDIR, path)
        if path.exists() and not os.access(path, os.W_OK):
            raise _error(errno.EACCES, path)
    if (folder / CHECKPOINTS).exists() and not (folder / CHECKPOINTS).is_dir():
        raise _error(errno.EEXIST, folder / CHECKPOINTS)


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
