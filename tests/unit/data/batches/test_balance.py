"""The sequences of a step assigned to ranks: all of them once, and near-equal work at any time."""

from itertools import permutations
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_cp.data.batches.balance import attention_work, balanced_order


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Work of each sequence, data-parallel ranks, micro-batches."""
    dp, micro_batches, rows = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    count = dp * micro_batches * rows
    return draw(st.lists(st.integers(0, 10**12), min_size=count, max_size=count)), dp, micro_batches


@settings(deadline=None)
@given(steps())
def test_every_sequence_is_run_once(step: Any) -> None:
    work, dp, micro_batches = step
    order = balanced_order(work, dp, micro_batches)
    assert order.dtype == np.int64
    assert order.shape == (micro_batches, dp, len(work) // (dp * micro_batches))
    assert sorted(order.flatten()) == list(range(len(work)))


@settings(deadline=None)
@given(steps())
def test_ranks_wait_at_most_the_difference_of_two_sequences_of_like_work(step: Any) -> None:
    work, dp, micro_batches = step
    loads = np.array(work)[balanced_order(work, dp, micro_batches)].sum(axis=2)
    rounds = np.array(sorted(work, reverse=True)).reshape(micro_batches, -1, dp)
    waits = np.ptp(loads, axis=1)
    assert (waits <= np.ptp(rounds, axis=2).max(axis=1)).all()
    assert waits.sum() <= max(work) - min(work)


@settings(deadline=None)
@given(steps())
def test_with_one_sequence_a_rank_no_order_takes_less_time(step: Any) -> None:
    """The slowest rank of each micro-batch, summed: at least the work of places 0, dp, 2 dp, ... of the sorted."""
    work, dp, micro_batches = step
    work = work[: dp * micro_batches]
    order = balanced_order(work, dp, micro_batches)
    seconds = np.array(work)[order].sum(axis=2).max(axis=1).sum()
    assert seconds == sum(sorted(work, reverse=True)[::dp])
    assert seconds <= np.array(work).reshape(micro_batches, dp).max(axis=1).sum()


def test_a_small_step_takes_the_least_time_of_all_orders() -> None:
    work = [9, 1, 4, 7, 7, 2]
    best = min(sum(max(order[at : at + 2]) for at in (0, 2, 4)) for order in permutations(work))
    assert np.array(work)[balanced_order(work, 2, 3)].sum(axis=2).max(axis=1).sum() == best


def test_the_rank_with_less_work_so_far_takes_the_heavier_sequence() -> None:
    assert balanced_order([10, 8, 6, 5], dp=2, micro_batches=2).tolist() == [[[0], [1]], [[3], [2]]]
    assert balanced_order([10, 8, 6, 5], dp=2, micro_batches=1).tolist() == [[[0, 3], [1, 2]]]


def test_work_is_the_sum_of_squared_document_lengths() -> None:
    assert attention_work((3, 4)) == 25
    assert attention_work((1 << 20,)) == 1 << 40
