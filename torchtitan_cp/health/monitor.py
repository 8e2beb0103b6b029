"""Bad steps are detected from one vector of each rank, gathered before a reduction hides which rank is at fault."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_cp.config.run import Health

logger = logging.getLogger(__name__)

# Entries of a rank's vector; then follow the blocks' largest outputs and their squared gradient norms.
LOSS, DIVISOR, LEARNED, LOGIT, GRADIENT, MEMORY, STOP, SAVE, FIRST_BLOCK = range(9)

MAD_TO_STD = 1.4826  # standard deviation over median absolute deviation (MAD) of a normal distribution
MIN_STD_FRACTION = 0.05  # of the median: the least standard deviation that is assumed
SPIKE_WINDOW = 64  # healthy steps that a step is compared with
MIN_STEPS = 8  # before these many steps, nothing is a spike


@dataclass(frozen=True)
class StepReport:
    """The numbers of a step over all ranks; every rank has the same report.

    Attributes:
        loss: of the step, as training.loss_normalization says; learned_tokens: tokens that have a label.
        grad_norm: global norm before clipping; block_grad_norms: of each block's parameters.
        peak_memory_bytes: the most that any rank has used so far.
        findings: a line for each non-finite number, naming the rank.
        spikes: a line for each number far above its recent values.
        largest_logit: over all tokens.
        block_outputs: largest absolute output of each block.
        stop, save: a rank asks to stop, or to save, after the step.
    """

    loss: float
    grad_norm: float
    peak_memory_bytes: int
    findings: tuple[str, ...] = ()
    spikes: tuple[str, ...] = ()
    largest_logit: float = 0.0
    block_grad_norms: tuple[float, ...] = ()
    block_outputs: tuple[float, ...] = ()
    stop: bool = False
    save: bool = False
    learned_tokens: int = 0

    @property
    def summary(self) -> str:
        """Why the step is bad."""
        verdict = "is not finite" if self.findings else "has spiked"
        return f"{verdict}: {'; '.join(self.findings or self.spikes)}"


class HealthMonitor:
    """Checks every step before the optimizers see it.

    It watches the largest absolute output of each block on this rank, and the largest gradient at the input of each
    part. A non-finite value in a rank's backward reaches that rank's first block through the residual stream, whereas
    the parameters' gradients are summed over ranks before they can be read. Forwards without gradients are ignored.

    Args:
        settings: which finite values count as spikes.
        parts: the model's modules on this rank; the keys of their `layers` are block numbers of the whole model.
        blocks: number of blocks of the whole model.
        device: where the largest values are kept until the step is checked.

    Attributes:
        spikes: finds spikes; its `recent` numbers are saved in checkpoints.
    """

    def __init__(self, settings: Health, parts: Iterable[nn.Module], blocks: int, device: torch.device) -> None:
        self.settings = settings
        self.spikes = SpikeDetector(settings.spike_threshold, SPIKE_WINDOW)
        self._largest = torch.zeros(blocks + 1, device=device)  # each block's output, then the gradient
        for part in parts:
            layers: dict[str, nn.Module] = dict(part.layers.items())  # type: ignore[operator, union-attr]
            for number, block in layers.items():
                block.register_forward_hook(partial(self._watch_output, int(number)))
            next(iter(layers.values())).register_forward_pre_hook(self._watch_input, prepend=True)

    def _watch_output(self, number: int, block: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self._update_largest(number, output[0] if isinstance(output, tuple) else output)

    def _watch_input(self, block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs and inputs[0].requires_grad:
            inputs[0].register_hook(partial(self._update_largest, -1))

    def _update_largest(self, index: int, x: Tensor) -> None:
        # maximum() propagates NaN.
        torch.maximum(self._largest[index], largest(x), out=self._largest[index])

    def pop_largest(self) -> Tensor:
        """Return the largest values since the last call, and reset them.

        Returns:
            `[blocks + 1]` fp32: output of each block, 0 for blocks of other ranks; then the gradient, 0 if none came.
        """
        values = self._largest.clone()
        self._largest.zero_()
        return values

    def check_step(
        self, sums: Sequence[Tensor], square_norms: Tensor, peak_memory_bytes: int, requests: tuple[bool, bool]
    ) -> StepReport:
        """Gather the numbers of the newest forward and backward from every rank. Collective.

        Args:
            sums: four scalars: the summed loss of this rank's tokens, its divisor and the learned tokens of all ranks,
                the largest logit of this rank.
            square_norms: `[blocks + 1]`, this rank's share of the squared gradient norm of each block, and of the
                parameters outside the blocks.
            peak_memory_bytes: most device memory that this rank held; the report has the largest of all ranks.
            requests: whether this rank asks to stop, and to save, after the step.
        """
        largest_values = self.pop_largest()
        on_host = torch.tensor([peak_memory_bytes, *requests], dtype=torch.float64)
        numbers = (*sums, largest_values[-1], on_host, largest_values[:-1], square_norms)
        vector = torch.cat([x.to(sums[0].device, torch.float64, non_blocking=True).flatten() for x in numbers])
        report = read_report(gather_rows(vector))
        if report.findings or not self.settings.spike_threshold:
            return report
        return replace(report, spikes=self.spikes.find(report))

    def is_bad(self, report: StepReport, step: int) -> bool:
        """Whether the optimizer must not see the step. Spikes that are trained on are logged.

        Args:
            step: its number, from 1, for the log.
        """
        spikes_are_bad = self.settings.on_spike == "handle"
        if report.spikes and not spikes_are_bad and dist.get_rank() == 0:
            logger.warning("spike at step %d: %s", step, "; ".join(report.spikes))
        return bool(report.findings or (report.spikes and spikes_are_bad))


def largest(x: Tensor) -> Tensor:
    """Largest absolute value, a scalar, computed in one pass; NaN if a value is NaN."""
    lowest, highest = torch.aminmax(x.detach())
    return torch.maximum(highest, -lowest)


def gather_rows(vector: Tensor) -> np.ndarray:
    """The vectors of all ranks, `[ranks, ...]`, with one collective and one wait of the host."""
    gathered = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, vector)
    return torch.stack(gathered).cpu().numpy()


def read_report(rows: np.ndarray) -> StepReport:
    """Make the report from the ranks' vectors, `[ranks, 9 + 2 blocks]`."""
    blocks = (rows.shape[1] - FIRST_BLOCK - 1) // 2
    outputs, squares = np.split(rows[:, FIRST_BLOCK:], [blocks], axis=1)
    return StepReport(
        loss=float(rows[:, LOSS].sum() / max(1.0, rows[0, DIVISOR])),
        grad_norm=math.sqrt(squares.sum()),
        peak_memory_bytes=int(rows[:, MEMORY].max()),
        findings=tuple(_nonfinite(rows, outputs, squares)),
        largest_logit=float(rows[:, LOGIT].max()),
        block_grad_norms=tuple(np.sqrt(squares.sum(0))[:blocks].tolist()),
        block_outputs=tuple(outputs.max(0).tolist()),
        stop=bool(rows[:, STOP].any()),
        save=bool(rows[:, SAVE].any()),
        learned_tokens=int(rows[0, LEARNED]),
    )


def _nonfinite(rows: np.ndarray, outputs: np.ndarray, squares: np.ndarray) -> list[str]:
    """A line for each rank with a non-finite number; for weight gradients only if nothing before them is non-finite."""
    findings = []
    for rank, row in enumerate(rows):
        bad = np.flatnonzero(~np.isfinite(outputs[rank]))
        if bad.size:
            findings.append(f"rank {rank}: the output of block {bad[0]} is {outputs[rank, bad[0]]}")
        elif not math.isfinite(row[LOSS]):
            findings.append(f"rank {rank}: the loss is {row[LOSS]}")
        elif not math.isfinite(row[GRADIENT]):
            findings.append(f"rank {rank}: the gradient at its first block is {row[GRADIENT]}, the loss is finite")
    for rank, block in () if findings else np.argwhere(~np.isfinite(squares)):
        where = f"block {block}" if block < outputs.shape[1] else "the embedding, last norm or output"
        findings.append(
            f"rank {rank}: a weight's gradient in {where} is {squares[rank, block]}, while losses and the "
            "gradients at the first blocks are finite"
        )
    return findings


class SpikeDetector:
    """Compares a step's loss, gradient norm, largest logit and block outputs with those of the healthy steps before it.

    It uses median and median absolute deviation (MAD), because outliers do not move them. Only values above the median
    are spikes.

    Args:
        threshold: standard deviations (estimated by the MAD, at least 5 % of the median) above the median.
        window: how many healthy steps are compared; nothing is a spike before a quarter of them, and at least 8.

    Attributes:
        recent: numbers of the last healthy steps, oldest first; plain JSON.
    """

    def __init__(self, threshold: float, window: int) -> None:
        self.threshold, self.window = threshold, window
        self.recent: list[list[float]] = []

    def find(self, report: StepReport) -> tuple[str, ...]:
        """A line for each number of a finite step that is a spike."""
        if len(self.recent) < max(MIN_STEPS, self.window // 4):
            return ()
        past, now = np.array(self.recent), np.array(_numbers(report))
        median = np.median(past, axis=0)
        deviation = MAD_TO_STD * np.median(np.abs(past - median), axis=0)
        deviation = np.maximum(deviation, MIN_STD_FRACTION * np.abs(median))
        far = (now - median) / np.maximum(deviation, np.finfo(float).tiny)
        names = ["the loss", "the gradient norm", "the largest logit"]
        names += [f"the largest output of block {block}" for block in range(len(report.block_outputs))]
        return tuple(
            f"{names[index]} is {now[index]:.4g}, {far[index]:.0f} standard deviations above its median "
            f"{median[index]:.4g}"
            for index in np.flatnonzero(far > self.threshold).tolist()
        )

    def record_healthy_step(self, report: StepReport) -> None:
        """Remember the numbers of a healthy step."""
        self.recent = [*self.recent, _numbers(report)][-self.window :]


def _numbers(report: StepReport) -> list[float]:
    return [report.loss, report.grad_norm, report.largest_logit, *report.block_outputs]
