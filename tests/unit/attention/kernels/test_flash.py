"""What FlashAttention makes of a window, by its own rules, against what a band means."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.plan_cases import in_band
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.attention.kernels import KERNELS, flash
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.tiles import CAUSAL, FULL


def read_by_flash(queries: int, keys: int, left: int, right: int, longest: int = 0) -> Tensor:
    """`[Sq, Sk]` the pairs that FlashAttention-2 (its mha_fwd and set_params_fprop) makes of a window.

    Args:
        longest: keys of the longest tile of a call of several (mha_varlen_fwd), if that is another.
    """
    longest = max(longest, keys)
    left, right = (-1 if side >= longest else side for side in (left, right))
    if left < 0 <= right:
        left = longest
    if right < 0 <= left:
        right = longest
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - (keys - queries)
    everything = torch.ones(queries, keys, dtype=torch.bool)
    return everything if left < 0 and right < 0 else (distance >= -left) & (distance <= right)


BANDS = (st.integers(1, 24), st.integers(1, 24), *2 * [st.none() | st.integers(-30, 30)])


@given(*BANDS)
@settings(max_examples=300, deadline=None)
def test_flash_takes_the_bands_that_it_computes_correctly(
    queries: int, keys: int, low: int | None, high: int | None
) -> None:
    check_band(queries, keys, low, high)


@pytest.mark.deep
@given(*BANDS)
@settings(max_examples=2000, deadline=None)
def test_flash_takes_many_more_bands_that_it_computes_correctly(
    queries: int, keys: int, low: int | None, high: int | None
) -> None:
    check_band(queries, keys, low, high)


def check_band(queries: int, keys: int, low: int | None, high: int | None) -> None:
    band = Band(low, high)
    meant = in_band(queries, keys, band)
    assume(meant.any(1).all())
    if flash.takes_band(queries, keys, band):
        assert torch.equal(read_by_flash(queries, keys, *flash._window(queries, keys, band)), meant)
        for longest in (keys + 1, keys + 7, 100):
            shared = flash.kind(queries, keys, band)
            assert torch.equal(read_by_flash(queries, keys, *shared, longest), meant)
    square = queries == keys and band in (FULL, CAUSAL)
    assert flash.takes_band(queries, keys, band) or not square


def test_tiles_of_a_window_that_flash_misreads_reach_it_in_parts() -> None:
    """The window ends inside a later piece, so its tile has more queries than keys, and a bounded side."""
    mask = AttentionMask(causal=False, window=(90, 90), document_lengths=((130, 126),))
    misread = 0
    for rank in range(4):
        for step in make_plan(256, mask=mask, ranks=4, rank=rank, layout="zigzag").steps:
            for tile in KERNELS["flash"].plain_tiles(step.tiles):
                assert flash.takes_band(tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, tile.band)
            misread += any(
                not flash.takes_band(tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, tile.band)
                for tile in step.tiles
            )
    assert misread, "this mask has such tiles"
