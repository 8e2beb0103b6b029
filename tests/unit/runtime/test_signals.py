"""Stop signals on a rank: remembered, said once, and a second Ctrl-C ends the process."""

import os
import signal
from collections.abc import Iterator

import pytest

from torchtitan_cp.runtime import signals
from torchtitan_cp.runtime.signals import STOP, StopSignals


@pytest.fixture(autouse=True)
def _same_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP)
def test_a_stop_signal_is_remembered_and_said_once(number: signal.Signals) -> None:
    said: list[int | None] = []
    stop = StopSignals(lambda: said.append(stop.received))
    with stop:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received == number
    assert said == [number]


def test_one_press_that_arrives_twice_is_one_and_a_second_press_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = StopSignals()
    with pytest.raises(KeyboardInterrupt), stop:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        monkeypatch.setattr(signals, "SAME_PRESS_SECONDS", -1.0)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "a third one needs no Python"


def test_ctrl_c_after_a_schedulers_signal_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_PRESS_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt), StopSignals():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
