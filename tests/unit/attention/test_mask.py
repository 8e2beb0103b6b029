"""Masks: what they are made of, and what their tiles are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plan_cases import plans_of_all_ranks
from torchtitan_cp.attention import AttentionMask, PlanError, make_plan
from torchtitan_cp.attention.layouts import LAYOUTS
from torchtitan_cp.attention.tiles import CAUSAL, FULL


@pytest.mark.parametrize(
    ("mask", "dense"),
    [
        (AttentionMask(), True),
        (AttentionMask(causal=False), True),
        (AttentionMask(window=(20, -1)), False),
        (AttentionMask(causal=False, window=(-1, 20)), False),
        (AttentionMask(document_lengths=((4, 4),)), False),
        (AttentionMask(document_lengths=((8,),), used_lengths=((5,),)), False),
    ],
)
def test_a_mask_says_whether_its_tiles_are_full_or_causal(mask: AttentionMask, dense: bool) -> None:
    assert mask.dense is dense
    for rank in range(2):
        tiles = [tile for step in make_plan(8, mask=mask, ranks=2, rank=rank).steps for tile in step.tiles]
        assert not dense or all(tile.band in (FULL, CAUSAL) for tile in tiles)


def test_cu_seqlens_become_a_mask_and_each_rank_gets_its_own_back() -> None:
    mask = AttentionMask.from_cu_seqlens(torch.tensor([0, 5, 5, 12]), torch.tensor([0, 8, 8, 16]))
    assert mask.document_lengths == ((8, 8),)
    assert mask.used_lengths == ((5, 7),)
    plans = plans_of_all_ranks(16, 2, mask, "contiguous")
    assert [plan.cu_seqlens.tolist() for plan in plans] == [[0, 5], [0, 7]]
    with pytest.raises(PlanError, match="cu_seqlens does not rise from 0"):
        AttentionMask.from_cu_seqlens([1, 5])
    with pytest.raises(PlanError, match=r"a document of batch row 0 uses 9 of 8 rows"):
        make_plan(8, mask=AttentionMask.from_cu_seqlens([0, 9], [0, 8]))


@pytest.mark.parametrize(
    "tuples",
    [
        {"window": 31},
        {"window": (31,)},
        {"window": (2.5, -1)},
        {"window": (None, None)},
        {"document_lengths": (10, 54)},
        {"document_lengths": [[10, 54]]},
        {"document_lengths": ((10.0, 54.0),)},
    ],
)
def test_a_mask_says_what_its_tuples_are(tuples: dict[str, Any]) -> None:
    wanted = r"made of tuples of integers: .*; give window \(left, right\), .* a tuple for each row"
    with pytest.raises(PlanError, match=wanted):
        AttentionMask(**tuples)


@pytest.mark.parametrize("integers", [torch.tensor, np.array])
def test_integers_of_numpy_and_torch_are_those_of_python(integers: Callable[[Any], Any]) -> None:
    """Tensors that a plan summed up in place described other tiles, on which a kernel ended the process."""
    lengths = ((10, 20, 34), (60, 2, 2))
    given = AttentionMask(True, tuple(integers((9, -1))), *(tuple(tuple(integers(row)) for row in lengths),) * 2)
    want = AttentionMask(True, (9, -1), lengths, lengths)
    assert given == want
    for layout in LAYOUTS:
        got, plan = (make_plan(n, mask=m, ranks=2, layout=layout) for n, m in ((integers(64), given), (64, want)))
        assert (got, got.steps, got.local_tokens) == (plan, plan.steps, 32)


@pytest.mark.parametrize("seq_len", [64.0, None])
def test_a_length_that_is_no_integer_is_refused(seq_len: Any) -> None:
    with pytest.raises(PlanError, match=f"seq_len = {seq_len} is not an integer; give the length in tokens"):
        make_plan(seq_len)


@pytest.mark.parametrize("lengths", [(30, 30), (64, 0), (-1, 65), ()])
def test_documents_that_do_not_fill_the_sequence_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="give lengths of at least 1 that sum to seq_len = 64"):
        make_plan(64, mask=AttentionMask(document_lengths=(lengths,)))
