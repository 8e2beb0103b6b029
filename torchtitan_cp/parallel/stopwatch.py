"""Times work on a device without waiting for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Adds up the time of intervals of work.

    Args:
        device: on CUDA an interval is the time between two events in the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.intervals: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is launched inside."""
        started = self._now()
        yield
        self.intervals.append((started, self._now()))

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> float:
        """Seconds of the intervals that ended since the last call; unfinished ones count in the next."""
        intervals, self.intervals = self.intervals, []
        if not self.on_cuda:
            return sum(stop - start for start, stop in intervals)
        seconds = 0.0
        for start, stop in intervals:
            if stop.query():
                seconds += start.elapsed_time(stop) / 1000
            else:
                self.intervals.append((start, stop))
        return seconds
