"""Learning rate as a pure function of the step: nothing to save, nothing to restore.

To add a learning-rate shape, write a function beside `cosine`, and add its name to `LR_SHAPES` here and to
LR_SHAPES in config/names.py; a test holds the two equal. Then regenerate docs/config.md (`CONTRIBUTING.md`).
`end_fraction` may be 0: a shape that cannot end there needs a rule in config/check.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from torchtitan_cp.config.sections import StageLR
from torchtitan_cp.config.training import LRScheduler, Optimizer


def cosine(progress: float, end: float, _decay: float) -> float:
    """Half a cosine from 1 to `end`.

    Args:
        progress: of the steps after warm-up, 0 to 1; the same for every shape.
        end: end_fraction, the last learning rate over the peak.
        _decay: decay_fraction, for shapes that are flat first.
    """
    return end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float, end: float, _decay: float) -> float:
    """A line from 1 to `end`."""
    return 1 - (1 - end) * progress


def wsd(progress: float, end: float, decay: float) -> float:
    """Flat at 1, then a line to `end` over the last `decay` of the steps. Source: MiniCPM (Hu et al., 2024)."""
    start = 1 - decay
    return 1.0 if progress <= start else 1 - (1 - end) * (progress - start) / decay


def constant(_progress: float, _end: float, _decay: float) -> float:
    """1 throughout."""
    return 1.0


LR_SHAPES: dict[str, Callable[[float, float, float], float]] = {
    "cosine": cosine,
    "linear": linear,
    "wsd": wsd,
    "constant": constant,
}


def learning_rate(step: int, steps: int, peak: float, settings: LRScheduler | StageLR) -> float:
    """Warm-up from zero to `peak`, then a shape, which ends at end_fraction * peak unless it is constant.

    Args:
        step: counted from 0 where the schedule starts.
    """
    warmup = min(settings.warmup_steps, steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return peak * LR_SHAPES[settings.shape](progress, settings.end_fraction, settings.decay_fraction)


class LearningRates:
    """The learning rate of every step of a run.

    A stage with its own `lr` follows that over its own steps. The other stages share [lr_scheduler], which counts only
    their steps: after a stage with its own `lr` it continues where it stopped.

    Args:
        optimizer: gives the peak.
        scheduler: the run's schedule.
        stages: (the stage's own settings or None, its number of steps), in order.
    """

    def __init__(
        self, optimizer: Optimizer, scheduler: LRScheduler, stages: Sequence[tuple[StageLR | None, int]]
    ) -> None:
        self.peak, self.scheduler, self.stages = optimizer.lr, scheduler, stages

    def at(self, stage: int, step: int, taken: Mapping[int, int] | None = None) -> float:
        """Learning rate of a stage's optimizer step, both counted from 0.

        Args:
            taken: steps of stages before it that took another number, as a gate ended them early.
        """
        stage_lr, steps = self.stages[stage]
        if stage_lr:
            return learning_rate(step, steps, self.peak if stage_lr.peak is None else stage_lr.peak, stage_lr)
        shared = [0 if other else (taken or {}).get(index, steps) for index, (other, steps) in enumerate(self.stages)]
        return learning_rate(sum(shared[:stage]) + step, sum(shared), self.peak, self.scheduler)
