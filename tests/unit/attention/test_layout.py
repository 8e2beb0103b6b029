"""The area of the mask that each rank of a layout has."""

import pytest

from tests.support.oracle import allowed
from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.attention.layout import rank_areas
from torchtitan_cp.attention.layouts import contiguous


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (3, 2)])
def test_the_area_of_a_rank_is_its_number_of_allowed_pairs(causal: bool, window: tuple[int, int]) -> None:
    rows, used = ((10, 14), (24,)), ((7, 9), (20,))
    mask = AttentionMask(causal, window=window, document_lengths=rows, used_lengths=used)
    of_ranks = allowed(mask, 24).sum((0, 2)).view(4, 6).sum(1)
    assert rank_areas(contiguous(24, 4), mask, 24) == of_ranks.tolist()
