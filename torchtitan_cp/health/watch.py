"""One small vector a rank, exchanged once a step: it carries the loss, the gradient norm, and who is ill."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GradientProbe:
    """Largest absolute gradient that reaches the first layer's input on this rank, before any reduction.

    A non-finite value anywhere in a rank's backward flows down the residual stream to here, while the
    parameters' gradients are summed over ranks before anybody can look at them.

    Args:
        layer: the first of the rank's layers; its first input is the residual stream.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.largest: Tensor | None = None
        layer.register_forward_pre_hook(self._watch_input)

    def _watch_input(self, module: nn.Module, inputs: Any) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(self._see)

    def _see(self, gradient: Tensor) -> None:
        largest = gradient.detach().abs().amax().double()
        # maximum() passes NaN on.
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def take(self, device: torch.device) -> Tensor:
        """The largest since the last call, fp64 scalar; 0 if no gradient came."""
        largest, self.largest = self.largest, None
        return torch.zeros((), dtype=torch.float64, device=device) if largest is None else largest


@dataclass(frozen=True)
class StepReport:
    """What a step was on every rank, known to every rank.

    Attributes:
        loss: mean over all unmasked tokens of the step.
        grad_norm: global norm before clipping.
        peak_memory_bytes: the most that any rank has used so far.
        findings: a line for each number that is not finite, naming the rank.
    """

    loss: float
    grad_norm: float
    peak_memory_bytes: int
    findings: tuple[str, ...]


def exchange(
    loss_sum: Tensor, tokens: Tensor, largest_gradient: Tensor, shard_square_norm: Tensor, peak_memory_bytes: int
) -> StepReport:
    """Gather five numbers from every rank, with one collective and one wait of the host.

    Args:
        loss_sum: summed loss of this rank's tokens, scalar.
        tokens: unmasked tokens of the step over all ranks, scalar.
        largest_gradient: from GradientProbe, scalar.
        shard_square_norm: of this rank's gradient shards, scalar.
        peak_memory_bytes: of this rank.
    """
    memory = torch.tensor(peak_memory_bytes, device=loss_sum.device)
    own = torch.stack(
        [x.to(loss_sum.device).double() for x in (loss_sum, tokens, largest_gradient, shard_square_norm, memory)]
    )
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    rows = torch.stack(gathered).tolist()
    loss = sum(row[0] for row in rows) / max(1.0, rows[0][1])
    grad_norm = math.sqrt(sum(row[3] for row in rows))
    return StepReport(loss, grad_norm, int(max(row[4] for row in rows)), tuple(diagnose(rows)))


def diagnose(rows: list[list[float]]) -> list[str]:
    """A line for each number that is not finite, nearest to its cause first.

    Args:
        rows: per rank, what `exchange` gathers, in its order.
    """
    findings = []
    for rank, (loss_sum, _, largest_gradient, *_) in enumerate(rows):
        if not math.isfinite(loss_sum):
            findings.append(f"rank {rank}: the loss is {loss_sum}")
        elif not math.isfinite(largest_gradient):
            findings.append(f"rank {rank}: the gradient at its first layer is {largest_gradient}, the loss is finite")
    shards = [(rank, row[3]) for rank, row in enumerate(rows) if not math.isfinite(row[3])]
    if shards and not findings:
        findings.append(
            f"gradient norm of the shards on rank {', '.join(str(rank) for rank, _ in shards)} is {shards[0][1]}, "
            "while losses and the gradients at the first layers are finite: a weight's gradient overflowed"
        )
    return findings
