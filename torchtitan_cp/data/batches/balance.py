"""Which rank runs which sequence of a step in which micro-batch, so that all have like work."""

from collections.abc import Sequence

import numpy as np


def attention_work(document_lengths: Sequence[int]) -> int:
    """The cost of causal attention over packed documents, up to a factor: the sum of squared lengths, in tokens²."""
    return sum(length * length for length in document_lengths)


def balanced_order(work: Sequence[float], dp: int, micro_batches: int) -> np.ndarray:
    """Which sequence each rank runs in each micro-batch of a step.

    Ranks meet in every micro-batch (parameters are gathered, gradients reduced), so the slowest sets its time.
    Sequences of similar work go to the same micro-batch, the heaviest to the first. Within it they are assigned in
    rounds of one to each rank, the heaviest of a round to the rank with the least work so far in this micro-batch,
    then in the step (longest processing time first, Graham 1969, with equal counts).

    In a micro-batch the largest load exceeds the smallest by no more than the sequences of one round differ; summed
    over micro-batches, by no more than the heaviest and the lightest sequence of the step differ. The sequences of the
    step stay the same, and so does its gradient.

    Args:
        work: of each of the step's dp * micro_batches * B sequences, in any unit.
        dp: data-parallel ranks.
        micro_batches: forwards of one step on one rank.

    Returns:
        `[micro_batches, dp, B]` int64, indices into `work`. Equal work gives the same order everywhere.
    """
    assert len(work) % (dp * micro_batches) == 0, "every rank runs as many sequences"
    works = np.asarray(work)
    rounds = np.argsort(-works, kind="stable").reshape(micro_batches, -1, dp)
    assigned = np.empty_like(rounds)
    total = np.zeros(dp, dtype=works.dtype)
    for index, micro_batch in enumerate(rounds):
        load = np.zeros(dp, dtype=works.dtype)
        for number, sequences in enumerate(micro_batch):
            ranks = np.lexsort((total, load))
            assigned[index, number, ranks] = sequences
            load[ranks] += works[sequences]
            total[ranks] += works[sequences]
    return assigned.transpose(0, 2, 1)
