"""Disks that fail, and what one has for certain."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

Entries = Iterator[os.DirEntry[str]]


@contextmanager
def failing_lists(fails: Callable[[str], bool]) -> Iterator[None]:
    """Folders whose path `fails` accepts cannot be listed."""
    scandir = os.scandir

    def scan(folder: Any = ".") -> Any:
        if not isinstance(folder, int) and fails(os.fspath(folder)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(folder))
        return scandir(folder)

    with patch.object(os, "scandir", scan):
        yield


@contextmanager
def recorded_syncs() -> Iterator[Callable[[Path], bool]]:
    """Gives what says whether a file, or the names in a folder, were flushed to disk since."""
    fsync, flushed = os.fsync, set[tuple[int, int]]()

    def record(handle: int) -> None:
        fsync(handle)
        found = os.fstat(handle)
        flushed.add((found.st_dev, found.st_ino))

    def is_flushed(path: Path) -> bool:
        found = path.stat()
        return (found.st_dev, found.st_ino) in flushed

    with patch.object(os, "fsync", record):
        yield is_flushed
