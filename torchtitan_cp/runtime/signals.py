"""Stop signals of a scheduler: remembered on the rank that gets them, and answered between steps."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

STOP = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Remembers SIGTERM and SIGUSR1 instead of dying of them, inside the context.

    Attributes:
        received: the number of the last one; None before the first.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._remember) for number in STOP}
        # A launcher starts ranks with both signals blocked, so that one that came earlier arrives now.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            # After a failure the launcher sends SIGTERM, and the failure must still be reported.
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)  # one that comes now waits for the next context
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number


def any_rank(*flags: bool, device: torch.device) -> list[bool]:
    """For each flag, whether it is set on any rank. Collective; every rank gets the same answer."""
    raised = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]
