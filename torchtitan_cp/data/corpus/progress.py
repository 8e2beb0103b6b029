"""How far a long pass over the corpus is: a bar on a terminal, elsewhere a line in the log now and then."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 10.0


@contextmanager
def show_progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of one pass over the corpus.

    Args:
        title: what is being done, e.g. `tokenizing`.
        total_bytes: of the corpus; 0 if unknown.

    Returns:
        a function to call with the bytes that are done, counted from the corpus's beginning.
    """
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn(title), *columns, console=console, disable=not console.is_terminal)
    task = bar.add_task(title, total=total_bytes or None)
    total = f" of {total_bytes / 1e6:.0f}" if total_bytes else ""
    next_log_seconds = time.monotonic() + LOG_INTERVAL_SECONDS

    def update(done_bytes: int) -> None:
        nonlocal next_log_seconds
        bar.update(task, completed=done_bytes)
        if bar.disable and time.monotonic() >= next_log_seconds:
            next_log_seconds = time.monotonic() + LOG_INTERVAL_SECONDS
            logger.info("%s: %.0f%s MB", title, done_bytes / 1e6, total)

    with bar:
        yield update
