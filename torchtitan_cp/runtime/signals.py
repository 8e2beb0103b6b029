"""A scheduler's wish that the job end: heard between steps, on whichever rank it arrives."""

import signal
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

STOP = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Remembers SIGTERM and SIGUSR1 instead of dying of them, while it is entered.

    Attributes:
        received: the number of the last one; None before the first.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._hear) for number in STOP}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            # After a failure the launcher sends SIGTERM, and what went wrong is still to be told.
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.received = number


def any_rank(*flags: bool, device: torch.device) -> list[bool]:
    """For each flag, whether any rank has it set. Collective, and the same answer everywhere."""
    raised = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]
