"""Random numbers of a step follow from the step; what is counted while it is looked at."""

import pytest
import torch

from torchtitan_cp.parallel.stopwatch import Stopwatch
from torchtitan_cp.runtime.device import seed_step


def drawn(*step: object) -> float:
    seed_step(*step)  # type: ignore[arg-type]
    return torch.rand(()).item()


def test_a_step_draws_the_same_numbers_again_and_another_one_others() -> None:
    numbers = [
        drawn(0, 0, 5, (0, 0)),
        drawn(1, 0, 5, (0, 0)),
        drawn(0, 1, 5, (0, 0)),
        drawn(0, 0, 6, (0, 0)),
        drawn(0, 0, 5, (1, 0)),
        drawn(0, 0, 5, (0, 1)),
    ]
    assert len(set(numbers)) == len(numbers)
    assert drawn(0, 0, 5, (0, 0)) == numbers[0]


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
