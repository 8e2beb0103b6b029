"""Intervals that end while they are looked at."""

import pytest
import torch

from torchtitan_cp.parallel.stopwatch import Stopwatch


def test_an_interval_that_ends_while_it_is_looked_at_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """Ends when it is asked the second time."""

        asked = 0

        def query(self) -> bool:
            self.asked += 1
            return self.asked > 1

        def elapsed_time(self, stop: object) -> float:
            return 1000.0

    watch = Stopwatch(torch.device("cpu"))
    watch.on_cuda = True
    watch.intervals = [(Event(), Event())]
    assert (watch.take(), watch.take(), watch.take()) == (0.0, 1.0, 0.0)
