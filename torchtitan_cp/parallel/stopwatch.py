"""How long a device works on what it is given, without ever waiting for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Adds up the time of stretches of work.

    Args:
        device: on CUDA it is the time between two places in the current stream, by the device's own clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.stretches: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is launched inside."""
        begun = self._now()
        yield
        self.stretches.append((begun, self._now()))

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> float:
        """Seconds of the stretches that have ended since the last call; those that have not are left for the next."""
        stretches, self.stretches = self.stretches, []
        if not self.on_cuda:
            return sum(stop - start for start, stop in stretches)
        seconds = 0.0
        for start, stop in stretches:
            if stop.query():  # asked once: it may end meanwhile
                seconds += start.elapsed_time(stop) / 1000
            else:
                self.stretches.append((start, stop))
        return seconds
