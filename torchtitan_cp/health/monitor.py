"""One small vector a rank, exchanged once a step, before any reduction hides who is ill."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

# Of a rank's vector; the blocks' largest outputs and then their squared gradient norms follow.
LOSS, TOKENS, GRADIENT, LOGIT, MEMORY, STOP, SAVE, FIRST_BLOCK = range(8)


class BlockWatch:
    """Largest absolute output of each block here, and gradient at the input of each part, of one step.

    A non-finite value anywhere in a rank's backward flows down the residual stream to its first block, while the
    parameters' gradients are summed over ranks before anybody can look at them. Only forwards that are to be
    differentiated are watched.

    Args:
        parts: of this rank; their `layers` are named by their number in the whole model.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.outputs: dict[int, Tensor] = {}
        self.gradient: Tensor | None = None
        for part in parts:
            blocks: dict[str, nn.Module] = dict(part.layers.items())  # type: ignore[operator, union-attr]
            for number, block in blocks.items():
                block.register_forward_hook(partial(self._see_output, int(number)))
            next(iter(blocks.values())).register_forward_pre_hook(self._watch_input, prepend=True)

    def _see_output(self, number: int, block: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            value = largest(output[0] if isinstance(output, tuple) else output)
            before = self.outputs.get(number)
            # maximum() passes NaN on.
            self.outputs[number] = value if before is None else torch.maximum(before, value)

    def _watch_input(self, block: nn.Module, inputs: Any) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(self._see_gradient)

    def _see_gradient(self, gradient: Tensor) -> None:
        value = largest(gradient)
        self.gradient = value if self.gradient is None else torch.maximum(self.gradient, value)

    def take(self, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """What was seen since the last call.

        Args:
            blocks: of the whole model.

        Returns:
            (largest outputs `[blocks]`, 0 for those that are not here; largest gradient, 0 if none came).
        """
        outputs, gradient, none = self.outputs, self.gradient, torch.zeros((), device=device)
        self.outputs, self.gradient = {}, None
        return torch.stack(
            [outputs.get(number, none) for number in range(blocks)]
        ), none if gradient is None else gradient


def largest(x: Tensor) -> Tensor:
    """Largest absolute value, fp32 scalar, read in one pass; NaN if there is one."""
    return torch.stack(torch.aminmax(x.detach())).abs().amax().float()


@dataclass(frozen=True)
class StepReport:
    """What a step was on every rank, known to every rank.

    Attributes:
        loss: mean over all unmasked tokens of the step.
        grad_norm: global norm before clipping; block_grad_norms: of each block's parameters.
        largest_logit: over all tokens.
        block_outputs: largest absolute output of each block.
        stop, save: some rank wishes to, after the step.
        peak_memory_bytes: the most that any rank has used so far.
        findings: a line for each number that is not finite, naming the rank.
        spikes: a line for each number that is far above what it was lately.
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

    def judged(self, spikes: Callable[["StepReport"], tuple[str, ...]]) -> "StepReport":
        """The report with the spikes that are found in it, if it is finite."""
        return self if self.findings else replace(self, spikes=spikes(self))


def all_gather_report(
    loss_sum: Tensor,
    tokens: Tensor,
    gradient: Tensor,
    logit: Tensor,
    outputs: Tensor,
    square_norms: Tensor,
    peak_memory_bytes: int,
    stop_and_save_requests: tuple[bool, bool] = (False, False),
) -> StepReport:
    """Gather a vector from every rank, with one collective and one wait of the host.

    Args:
        loss_sum: summed loss of this rank's tokens, scalar.
        tokens: unmasked tokens of the step over all ranks, scalar.
        gradient, outputs: from BlockWatch, a scalar and `[blocks]`.
        logit: largest of this rank's, scalar.
        square_norms: of this rank's gradient shards, of each block and of what is in none: `[blocks + 1]`.
        peak_memory_bytes: of this rank.
        wishes: to stop, and to save, after the step.
    """
    device = loss_sum.device
    scalars = torch.stack([x.to(device, non_blocking=True).double() for x in (loss_sum, tokens, gradient, logit)])
    of_host = torch.tensor([peak_memory_bytes, *stop_and_save_requests], dtype=torch.float64).to(
        device, non_blocking=True
    )
    own = torch.cat([scalars, of_host, outputs.double(), square_norms.to(device, non_blocking=True).double()])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return read(torch.stack(gathered).cpu().numpy())


def read(rows: np.ndarray) -> StepReport:
    """The report that the ranks' vectors, `[ranks, 8 + 2 blocks]`, make."""
    blocks = (rows.shape[1] - FIRST_BLOCK - 1) // 2
    outputs, squares = np.split(rows[:, FIRST_BLOCK:], [blocks], axis=1)
    norms = np.sqrt(squares.sum(0))
    return StepReport(
        loss=float(rows[:, LOSS].sum() / max(1.0, rows[0, TOKENS])),
        grad_norm=math.sqrt(squares.sum()),
        peak_memory_bytes=int(rows[:, MEMORY].max()),
        findings=tuple(diagnose(rows)),
        largest_logit=float(rows[:, LOGIT].max()),
        block_grad_norms=tuple(norms[:blocks].tolist()),
        block_outputs=tuple(outputs.max(0).tolist()),
        stop=bool(rows[:, STOP].any()),
        save=bool(rows[:, SAVE].any()),
    )


def diagnose(rows: np.ndarray) -> list[str]:
    """A line for each number that is not finite, nearest to its cause first."""
    blocks = (rows.shape[1] - FIRST_BLOCK - 1) // 2
    findings = []
    for rank, row in enumerate(rows):
        outputs = row[FIRST_BLOCK : FIRST_BLOCK + blocks]
        bad = np.flatnonzero(~np.isfinite(outputs))
        if bad.size:
            findings.append(f"rank {rank}: the output of block {bad[0]} is {outputs[bad[0]]}")
        elif not math.isfinite(row[LOSS]):
            findings.append(f"rank {rank}: the loss is {row[LOSS]}")
        elif not math.isfinite(row[GRADIENT]):
            findings.append(f"rank {rank}: the gradient at its first block is {row[GRADIENT]}, the loss is finite")
    squares = rows[:, FIRST_BLOCK + blocks :]
    if not findings:
        for rank, block in np.argwhere(~np.isfinite(squares)):
            where = f"block {block}" if block < blocks else "the embedding, last norm or output"
            findings.append(
                f"rank {rank}: a weight's gradient in {where} is {squares[rank, block]}, while losses and the "
                "gradients at the first blocks are finite"
            )
    return findings
