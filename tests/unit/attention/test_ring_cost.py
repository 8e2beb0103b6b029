"""What a ring's messages cost. test_documents.py has the layouts that follow from it."""

import pytest
import torch

from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.attention.codec import CODECS
from torchtitan_cp.attention.layouts import zigzag
from torchtitan_cp.attention.ring_cost import (
    CAUSAL_FRACTION,
    ROW_PAIRS,
    assumed_pairs_per_row,
    pairs_per_row,
    relative_time,
    waiting_time,
)


def test_a_row_costs_the_pairs_that_are_computed_while_it_travels() -> None:
    """8 key heads of 128 in bf16 are 4096 bytes; a pair of 32 query heads takes 2 products of 128 each."""
    assert pairs_per_row(4096, 32 * 4 * 128, 400e12, (400e9, 50e9)) == ROW_PAIRS == (250, 2000)
    assert assumed_pairs_per_row(32, 32) == (1000, 8000), "as many key heads as query heads"


def test_a_rank_waits_for_what_a_step_does_not_hide() -> None:
    assert waiting_time([3.0, 0.0, 5.0], [1.0, 4.0, 5.0]) == 2
    assert waiting_time([], []) == 0


def test_ranks_wait_for_the_message_that_is_larger_than_the_step_before_it() -> None:
    """Of 16 tokens a rank has 68 pairs, 36 of them of its own keys, while 8 rows travel: see waiting_time."""
    for cost in (4, 5, 10):
        waiting = waiting_time([8 * cost], [36])
        assert relative_time(zigzag(16, 2), AttentionMask(), 16, 1, (0, cost)) == pytest.approx((68 + waiting) / 68)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_causal_zigzag_sends_three_quarters_of_what_is_not_its_own(ranks: int) -> None:
    sent = make_plan(64 * ranks, ranks=ranks, layout="zigzag", strategy="ring").keys_sent
    assert sent == CAUSAL_FRACTION * (ranks - 1)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bytes_of_a_row_are_those_of_its_message(name: str, dtype: torch.dtype) -> None:
    k, v = torch.ones(2, 5, 3, 16, dtype=dtype), torch.ones(2, 5, 3, 8, dtype=dtype)
    counted = 2 * 5 * 3 * CODECS[name].row_bytes(16 + 8, dtype.itemsize)
    assert CODECS[name].encode(k, v).nbytes == counted == CODECS[name].new_message(5, k, v).nbytes
