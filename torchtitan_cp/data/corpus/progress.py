"""How far a long pass over the corpus is: a bar on a terminal, a line in the log now and then elsewhere."""

import logging
import time
from types import TracebackType

from rich import progress
from rich.console import Console

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 10.0


class PassProgress:
    """Progress of one pass, in bytes of the corpus. Use it as a context.

    Args:
        title: what is being done, e.g. `tokenizing`.
        total_bytes: of the corpus; 0 where it is not known.
    """

    def __init__(self, title: str, total_bytes: int) -> None:
        self.title, self.total_bytes = title, total_bytes
        console = Console(stderr=True)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total_bytes or None)
        self._next_log_seconds = time.monotonic() + LOG_INTERVAL_SECONDS

    def update(self, done_bytes: int) -> None:
        """`done_bytes` of the corpus are done, from its beginning."""
        self._bar.update(self._task, completed=done_bytes)
        if self._bar.disable and time.monotonic() >= self._next_log_seconds:
            self._next_log_seconds = time.monotonic() + LOG_INTERVAL_SECONDS
            megabytes, total_megabytes = done_bytes / 1e6, self.total_bytes / 1e6
            if self.total_bytes:
                logger.info("%s: %.0f of %.0f MB", self.title, megabytes, total_megabytes)
            else:
                logger.info("%s: %.0f MB", self.title, megabytes)

    def __enter__(self) -> "PassProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
