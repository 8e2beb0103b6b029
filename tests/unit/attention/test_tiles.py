"""Parts of a band that plain kernels take."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plan_cases import in_band
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.tiles import CAUSAL, count_pairs, dense_parts

BOUNDS = st.one_of(st.none(), st.integers(-30, 30))


@given(st.integers(1, 24), st.integers(1, 24), BOUNDS, BOUNDS)
@settings(max_examples=500, deadline=None)
def test_plain_parts_of_a_band_cover_it_exactly_once(
    queries: int, keys: int, low: int | None, high: int | None
) -> None:
    if low is not None and high is not None and low > high:
        low, high = high, low
    band = Band(low, high).shifted(0, queries, keys)
    covered = torch.zeros(queries, keys, dtype=torch.int64)
    for part in dense_parts(queries, keys, band):
        rows, columns = part.q_stop - part.q_start, part.k_stop - part.k_start
        assert rows > 0
        assert columns > 0
        block = torch.ones(rows, columns, dtype=torch.int64)
        if part.band == CAUSAL:
            assert rows == columns, "a kernel's causal call is square"
            block = block.triu() if part.flipped else block.tril()
        covered[part.q_start : part.q_stop, part.k_start : part.k_stop] += block
    expected = in_band(queries, keys, band)
    assert torch.equal(covered, expected.long())
    assert count_pairs(queries, keys, band) == expected.sum()
