"""How far the host runs ahead of a GPU's messages."""

from collections import deque

import pytest

from torchtitan_cp.attention import collectives


class Event:
    """Of a GPU that passes it when the host waits for it, or by itself if it is `passed`."""

    def __init__(self, name: int, waited: list[int], *, passed: bool = False) -> None:
        self.name, self.waited, self.passed = name, waited, passed

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        if not self.passed:
            self.waited.append(self.name)


@pytest.mark.parametrize(
    ("gibibytes", "passed", "waited", "left"),
    [
        ([0.1] * 9, 0, [], 9),
        ([0.1] * 9, 4, [], 5),
        ([0.5] * 4, 0, [0, 1], 2),
        ([0.5] * 4, 1, [1], 2),
        ([8.0] * 3, 0, [0], 2),
        ([8.0] * 2, 0, [], 2),
        ([2.0, 0.1, 0.1, 0.1], 0, [0], 3),
    ],
)
def test_the_host_waits_for_large_messages_alone_and_never_for_the_last_two(
    monkeypatch: pytest.MonkeyPatch, gibibytes: list[float], passed: int, waited: list[int], left: int
) -> None:
    done: list[int] = []
    events = [(Event(number, done, passed=number < passed), int(size * 2**30)) for number, size in enumerate(gibibytes)]
    monkeypatch.setattr(collectives, "_ahead", deque(events))
    collectives._limit_bytes_ahead()
    assert (done, len(collectives._ahead)) == (waited, left)


def test_no_event_is_asked_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    events = deque([(Event(number, []), 1 << 34) for number in range(4)])
    monkeypatch.setattr(collectives, "_ahead", events)
    monkeypatch.setattr(collectives, "_captures_graph", lambda: True)
    collectives._limit_bytes_ahead()
    assert len(events) == 4
