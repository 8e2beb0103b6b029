"""Layouts by the area of the mask that their ranks have."""

import pytest

from tests.support.oracle import allowed
from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.attention.layout import rank_areas
from torchtitan_cp.attention.layouts import balanced, contiguous, zigzag


def test_documents_that_hold_most_of_the_area_are_cut_finer_until_ranks_are_nearly_even() -> None:
    lengths = (36_000, *(500,) * 452, 144)
    mask = AttentionMask(document_lengths=(lengths,))
    layout = balanced(262_144, 8, mask)
    work = rank_areas(layout, mask, 262_144)
    # Of eight chunks a rank, the last of the long document alone is half as much again as a rank's share.
    assert 1.4 * sum(work) / 8 < 4096 * (36_000 - 4096)
    assert max(work) < 1.1 * sum(work) / 8
    assert len(layout.segments) > 8 * 8


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (3, 2)])
def test_the_area_of_a_rank_is_its_number_of_allowed_pairs(causal: bool, window: tuple[int, int]) -> None:
    rows, used = ((10, 14), (24,)), ((7, 9), (20,))
    mask = AttentionMask(causal, window=window, document_lengths=rows, used_lengths=used)
    of_ranks = allowed(mask, 24).sum((0, 2)).view(4, 6).sum(1)
    assert rank_areas(contiguous(24, 4), mask, 24) == of_ranks.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_layout_knows_its_name(ranks: int) -> None:
    assert contiguous(64, ranks).name == "contiguous"
    assert zigzag(64, ranks).name == ("zigzag" if ranks > 1 else "contiguous")
    packed = AttentionMask(document_lengths=((40, 3, 7, 14),))
    assert balanced(64, ranks, packed).name == "balanced"
