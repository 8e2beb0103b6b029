"""From the stream to the micro-batches of one rank, read ahead in a thread by torchdata's nodes.

Ranks come in as integers. Which sequences a step holds depends on its cursor alone; which of them a rank
reads, on its place among the data-parallel ranks; which tokens of those, on its plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torchdata.nodes as nodes
from torch import Tensor

from torchtitan_cp.attention import Plan


class Stream(Protocol):
    """Where sequences come from: TokenStream."""

    def sequence(self, cursor: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class StepShape:
    """How the tokens of one optimizer step are dealt out, and which share is this rank's.

    Attributes:
        seq_len: S.
        micro_batches: forwards of one step on one rank.
        micro_batch_sequences: B, sequences of one forward on one rank.
        dp: data-parallel ranks; dp_rank: this one's place among them.
        plan: cuts each sequence for this rank, and goes with it to the attention.
    """

    seq_len: int
    micro_batches: int
    micro_batch_sequences: int
    dp: int
    dp_rank: int
    plan: Plan

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks: how far the cursor moves."""
        return self.seq_len * self.micro_batches * self.micro_batch_sequences * self.dp


@dataclass(frozen=True)
class MicroBatch:
    """One forward of one rank.

    Attributes:
        tokens: `[B, S/cp]` int64.
        labels: `[B, S/cp]` int64, the token after each.
        positions: `[S/cp]` int64, global positions.
        plan: for the attention.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    plan: Plan


def read_step(stream: Stream, cursor: int, shape: StepShape) -> tuple[MicroBatch, ...]:
    """This rank's micro-batches of the step that starts at `cursor`."""
    return tuple(_read_micro_batch(stream, cursor, shape, index) for index in range(shape.micro_batches))


def _read_micro_batch(stream: Stream, cursor: int, shape: StepShape, index: int) -> MicroBatch:
    first = (index * shape.dp + shape.dp_rank) * shape.micro_batch_sequences
    starts = [cursor + (first + row) * shape.seq_len for row in range(shape.micro_batch_sequences)]
    rows = [stream.sequence(start, shape.seq_len) for start in starts]
    tokens, labels = (
        shape.plan.shard(torch.from_numpy(np.stack([row[part] for row in rows])), dim=1) for part in (0, 1)
    )
    return MicroBatch(tokens, labels, shape.plan.positions, shape.plan)


def read_steps(
    stream: Stream, cursor: int, steps: int, shape: StepShape, *, read_ahead: int, pin: bool
) -> Iterator[tuple[MicroBatch, ...]]:
    """The micro-batches of `steps` steps from `cursor` on, read in a thread.

    Args:
        read_ahead: steps kept ready.
        pin: copy them to pinned memory, so that a GPU can fetch them while it computes.
    """
    cursors = range(cursor, cursor + steps * shape.tokens, shape.tokens)
    node: nodes.BaseNode = nodes.IterableWrapper(cursors)
    node = nodes.ParallelMapper(node, lambda start: read_step(stream, start, shape), num_workers=1, method="thread")
    if pin:
        node = nodes.ParallelMapper(node, _pin, num_workers=1, method="thread")
    return iter(nodes.Loader(nodes.Prefetcher(node, prefetch_factor=read_ahead)))


def _pin(step: tuple[MicroBatch, ...]) -> tuple[MicroBatch, ...]:
    return tuple(
        MicroBatch(batch.tokens.pin_memory(), batch.labels.pin_memory(), batch.positions.pin_memory(), batch.plan)
        for batch in step
    )
