"""The loss of a step: sums over counts. Here, and nowhere else, a loss that is differentiated meets its count.

    loss = weighted sum of the losses of tokens / divisor + sum of the losses that the model adds / tokens

The sums grow over ranks, micro-batches and parts of the model, none of which has the whole, while both counts are known
before the first forward. So the sums stay sums, and backward gives each of them its derivative: one over its count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_cp.attention.autograd import Context
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.loader import MicroBatch
from torchtitan_cp.optim.loss import ChunkedCrossEntropy, VocabularyShard
from torchtitan_cp.parallel.tensor import vocabulary_shard


class StepCounts(NamedTuple):
    """What a step has over all ranks, int64 scalars.

    Attributes:
        divisor: of the sum of the losses of tokens; see training.loss_normalization.
        learned_tokens: those with a label.
        tokens: all of them, the divisor of losses that the model adds.
    """

    divisor: Tensor
    learned_tokens: Tensor
    tokens: Tensor


def count_step(micro_batches: Sequence[MicroBatch], normalization: str, device: torch.device) -> StepCounts:
    """Count a step's tokens over all ranks. Collective.

    With l[t] the loss of a learned token, the loss of tokens is sum l[t] / learned tokens (`token`), sum l[t] / all
    tokens (`batch_tokens`), or the sum of l[t] / (learned tokens of t's document in its sequence) over the number
    of documents that have any (`conversation`).

    Args:
        micro_batches: of this rank; none if another rank counts the same tokens.
        normalization: training.loss_normalization.
    """
    counts = np.zeros(3)
    for batch in micro_batches:
        learned, tokens = int((batch.labels != IGNORED).sum()), batch.labels.numel()
        # The weights of a document add up to 1 over its ranks, up to rounding.
        documents = 0.0 if batch.weights is None else float(batch.weights.double().sum())
        divisors = {"token": learned, "conversation": documents, "batch_tokens": tokens}
        counts += divisors[normalization], learned, tokens
    # Filled on the device, since copying numbers from pageable memory would make the host wait.
    summed = torch.stack([torch.full((), x, dtype=torch.float64, device=device) for x in counts.tolist()])
    dist.all_reduce(summed)
    return StepCounts(*summed.round_().long())


def add_loss(x: Tensor, loss_sum: Tensor, count: Tensor | None) -> Tensor:
    """Return `x` unchanged. Backward through it also differentiates `loss_sum / count`.

    Args:
        x: what a part of the model returns, or a tensor on the way there.
        loss_sum: scalar, a sum of losses on this rank.
        count: scalar, what the sum over all ranks is divided by; None only where nothing is differentiated.
    """
    return _AddLoss.apply(x, loss_sum, count)


class _Context(Context, Protocol):
    count: Tensor | None
    dtype: torch.dtype


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, loss_sum: Tensor, count: Tensor | None) -> Tensor:
        ctx.count, ctx.dtype = count, loss_sum.dtype
        return x.clone()  # FSDP and zero-bubble schedules refuse a view as the output of a part

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if not ctx.needs_input_grad[1]:
            return gradient, None, None
        assert ctx.count is not None
        return gradient, 1 / ctx.count.to(ctx.dtype), None


@dataclass
class LossHead:
    """Ends the forward of a model's last part in training: adds the losses of a micro-batch's tokens to the step's.

    Attributes:
        labels: `[B, S/cp]` int64.
        weights: `[B, S/cp]` fp32, of each token's loss; None: 1.
        divisor: of the step's weighted sum of the losses of tokens.
        losses: `[B, S/cp]` fp32, the loss of each token without its weight; None before the head has run.
    """

    token_loss: ChunkedCrossEntropy
    labels: Tensor
    weights: Tensor | None
    divisor: Tensor
    losses: Tensor | None = None

    def __call__(self, hidden: Tensor, output: nn.Linear) -> Tensor:
        """A zero to differentiate.

        Args:
            hidden: `[B, S/cp, E]`, as the norm before the output layer returns it.
        """
        hidden, weight, vocabulary = output_rows(hidden, output)
        loss_sum, self.losses = self.token_loss(hidden, weight, self.labels, vocabulary, self.weights)
        divisor = self.divisor.clamp_min(1)  # a step may have no learned token
        return add_loss(torch.zeros_like(loss_sum), loss_sum, divisor)

    def weighted_sum(self) -> Tensor:
        """The sum of the weighted losses, for the records."""
        assert self.losses is not None, "the head has not run"
        return (self.losses if self.weights is None else self.losses * self.weights).sum()


def output_rows(hidden: Tensor, output: nn.Linear) -> tuple[Tensor, Tensor, VocabularyShard | None]:
    """Hidden states `[B, S/cp, E]`, this rank's rows of the output matrix, and which these are (None: all)."""
    hidden, weight, group, first = vocabulary_shard(hidden, output.weight)
    return hidden, weight, VocabularyShard(group, first) if group else None
