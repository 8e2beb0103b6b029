"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan_cp.config.sections import LRScheduler, Optimizer, StageLR


def cosine(progress: float, end: float, _decay: float) -> float:
    """Half a cosine from 1 to `end`."""
    return end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float, end: float, _decay: float) -> float:
    """A line from 1 to `end`."""
    return 1 - (1 - end) * progress


def wsd(progress: float, end: float, decay: float) -> float:
    """Flat at 1, then a line to `end` over the last `decay` share. Source: MiniCPM (Hu et al., 2024)."""
    start = 1 - decay
    return 1.0 if progress <= start else 1 - (1 - end) * (progress - start) / decay


def constant(_progress: float, _end: float, _decay: float) -> float:
    """1 throughout."""
    return 1.0


SHAPES: dict[str, Callable[[float, float, float], float]] = {
    "cosine": cosine,
    "linear": linear,
    "wsd": wsd,
    "constant": constant,
}


@dataclass(frozen=True)
class Schedule:
    """Warm-up from zero to `peak`, then a curve that reaches end_fraction * peak on the last of `steps`."""

    peak: float
    settings: LRScheduler | StageLR
    steps: int

    def at(self, step: int) -> float:
        """Learning rate of the step-th step, counted from 0 where the schedule starts."""
        warmup = min(self.settings.warmup_steps, self.steps)
        if step < warmup:
            return self.peak * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - 1 - warmup)
        shape = SHAPES[self.settings.shape]
        return self.peak * shape(min(1.0, progress), self.settings.end_fraction, self.settings.decay_fraction)


class LearningRates:
    """The learning rate of every step of a run.

    A stage with its own `lr` follows that over its own steps. The other stages share [lr_scheduler],
    which runs over their steps alone, so that it goes on where it was after a stage that left it.

    Args:
        optimizer: gives the peak.
        scheduler: the run's curve.
        stages: (the stage's own settings or None, its number of steps), in order.
    """

    def __init__(
        self, optimizer: Optimizer, scheduler: LRScheduler, stages: Sequence[tuple[StageLR | None, int]]
    ) -> None:
        shared = Schedule(optimizer.lr, scheduler, sum(steps for own, steps in stages if own is None))
        self._stages: list[tuple[int, Schedule]] = []  # steps of the schedule that lie before the stage
        shared_done = 0
        for own, steps in stages:
            if own is None:
                self._stages.append((shared_done, shared))
                shared_done += steps
            else:
                peak = optimizer.lr if own.peak is None else own.peak
                self._stages.append((0, Schedule(peak, own, steps)))

    def at(self, stage: int, step: int) -> float:
        """Learning rate of a stage's optimizer step, both counted from 0."""
        before, schedule = self._stages[stage]
        return schedule.at(before + step)
