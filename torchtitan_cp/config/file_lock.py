"""A lock on a file that the system gives back when its process ends, however it ends."""

import fcntl
import time
from collections.abc import Callable
from itertools import count
from typing import IO


def lock_file(file: IO[bytes] | IO[str], poll_seconds: float, while_locked: Callable[[int], object]) -> None:
    """Lock an open file for this process. While another process has locked it, wait.

    Args:
        poll_seconds: between two attempts.
        while_locked: called after each failed attempt with its number, from 0. It may raise to end the wait.

    Raises:
        OSError: the file system has no locks.
    """
    for attempt in count():
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            while_locked(attempt)
            time.sleep(poll_seconds)
