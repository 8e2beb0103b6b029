"""Stop signals of a scheduler and Ctrl-C: remembered on the rank that gets them, and answered between steps."""

import signal
import time
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A wrapper such as `uv run` passes Ctrl-C on to a process that has it from the terminal already: that is one press.
SAME_PRESS_SECONDS = 0.5


class StopSignals:
    """Remembers stop signals instead of dying of them, inside the context. Ctrl-C after one ends the process.

    Under the launcher a rank gets SIGTERM only: it is in a session of its own, where a terminal's Ctrl-C does not come.

    Args:
        announce: called at the first signal, in its handler.

    Attributes:
        received: the number of the first one; None before it.
    """

    def __init__(self, announce: Callable[[], None] = lambda: None) -> None:
        self.announce = announce
        self.received: int | None = None

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._remember) for number in STOP}
        # A launcher starts ranks with these signals blocked, so that one that came earlier arrives now.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            # After a failure the launcher sends SIGTERM, and the failure must still be reported.
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)  # one that comes now waits for the next context
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = number, now
            self.announce()
        elif number == signal.SIGINT and now - self._since > SAME_PRESS_SECONDS:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends the process even where Python waits
            raise KeyboardInterrupt


def any_rank(*flags: bool, device: torch.device) -> list[bool]:
    """For each flag, whether it is set on any rank. Collective; every rank gets the same answer."""
    raised = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]
