"""Times work on a device without waiting for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time of intervals of work.

    Args:
        device: on CUDA an interval is the time between two events in the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.intervals: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.host_seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is launched inside."""
        if not self.on_cuda:
            started = time.perf_counter()
            yield
            self.host_seconds += time.perf_counter() - started
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        stop.record()
        self.intervals.append((start, stop))

    def take(self) -> float:
        """Seconds of the intervals that ended since the last call; unfinished ones count in the next."""
        intervals, self.intervals = self.intervals, []
        seconds, self.host_seconds = self.host_seconds, 0.0
        for start, stop in intervals:
            if stop.query():
                seconds += start.elapsed_time(stop) / 1000
            else:
                self.intervals.append((start, stop))
        return seconds
