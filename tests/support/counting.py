"""Sequences of ascending numbers, so that a token says where it belongs."""

from functools import partial

import numpy as np
import torch

from torchtitan_cp.attention import make_plan
from torchtitan_cp.data.batches.micro_batches import BatchLayout, MicroBatch
from torchtitan_cp.data.batches.packed_stream import PackedSequence, Span

SEQ_LEN = 32


class Counting:
    """Sequence n holds the tokens from n * SEQ_LEN on; odd ones are two documents. It fails at `broken_at`."""

    def __init__(self, broken_at: int | None = None) -> None:
        self.broken_at = broken_at

    def document_lengths(self, number: int) -> tuple[int, ...]:
        return (5, SEQ_LEN - 5) if number % 2 else (SEQ_LEN,)

    def sequence(self, number: int) -> PackedSequence:
        if self.broken_at is not None and number >= self.broken_at:
            raise OSError("the disk is gone")
        tokens = np.arange(number * SEQ_LEN, (number + 1) * SEQ_LEN)
        lengths = self.document_lengths(number)
        positions = np.concatenate([np.arange(length) for length in lengths])
        spans = tuple(Span("numbers", number, 0, length) for length in lengths)
        return PackedSequence(tokens, tokens + 1, positions, lengths, spans)


def batch_layout_of(
    dp_rank: int = 0, dp: int = 1, cp_rank: int = 0, cp: int = 1, layout: str = "zigzag"
) -> BatchLayout:
    planner = partial(make_plan, ranks=cp, rank=cp_rank, layout=layout)
    return BatchLayout(SEQ_LEN, 3, 2, dp=dp, dp_rank=dp_rank, make_plan=planner, strategies={0: "ring", 8: "ring"})


def tokens_of(step: tuple[MicroBatch, ...]) -> list[int]:
    return torch.cat([batch.tokens.flatten() for batch in step]).tolist()
