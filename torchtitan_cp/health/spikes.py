"""Numbers that are finite and far above what they were lately, told by median and MAD over a window of steps."""

from collections.abc import Sequence

import numpy as np

from torchtitan_cp.health.monitor import StepReport

# MADs of a normal distribution in a standard deviation.
MAD_TO_STD = 1.4826
# A number that hardly varies has not spiked before it is so far above its median, as a share of it, a threshold unit.
LEAST_STD_FRACTION = 0.05
# A median of fewer says nothing.
LEAST_STEPS = 8


class SpikeDetector:
    """Judges each step by the healthy ones before it: loss, gradient norm, largest logit, and each block's output.

    Median and median absolute deviation (MAD) are not moved by the few wild values they are to find. Only values
    above the median are spikes.

    Args:
        threshold: standard deviations (as the MAD estimates them, at least 5 % of the median) above the median.
        window: healthy steps looked back on; nothing is judged before a quarter of them, and 8, are there.
        recent: what an earlier process knew.

    Attributes:
        recent: numbers of the last healthy steps, oldest first; plain JSON.
    """

    def __init__(self, threshold: float, window: int, recent: Sequence[Sequence[float]] = ()) -> None:
        self.threshold, self.window = threshold, window
        self.recent = [list(row) for row in recent]

    def judge(self, report: StepReport) -> tuple[str, ...]:
        """A line for each number of a finite step that is a spike."""
        if len(self.recent) < max(LEAST_STEPS, self.window // 4):
            return ()
        past, now = np.array(self.recent), np.array(numbers(report))
        median = np.median(past, axis=0)
        deviation = MAD_TO_STD * np.median(np.abs(past - median), axis=0)
        deviation = np.maximum(deviation, LEAST_STD_FRACTION * np.abs(median))
        far = (now - median) / np.maximum(deviation, np.finfo(float).tiny)
        return tuple(
            f"{_name(index)} is {now[index]:.4g}, {far[index]:.0f} standard deviations above its median "
            f"{median[index]:.4g}"
            for index in np.flatnonzero(far > self.threshold).tolist()
        )

    def healthy(self, report: StepReport) -> None:
        """Remember a step that was taken."""
        self.recent = [*self.recent, numbers(report)][-self.window :]

    def forget(self) -> None:
        """Begin anew, as a stage does: another length has other numbers."""
        self.recent = []


def numbers(report: StepReport) -> list[float]:
    """What is judged of a step."""
    return [report.loss, report.grad_norm, report.largest_logit, *report.block_outputs]


def _name(index: int) -> str:
    names = ("the loss", "the gradient norm", "the largest logit")
    return names[index] if index < len(names) else f"the largest output of block {index - len(names)}"
