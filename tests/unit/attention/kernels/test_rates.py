"""The table of rates: one row for each kernel, GPU, head dim and mask, within what a GPU can reach."""

import pytest

from torchtitan_cp.attention.kernels import KERNELS
from torchtitan_cp.attention.kernels.rates import RATES, find_rate


def test_rows_are_of_kernels_that_exist_and_narrower_heads_come_first() -> None:
    for rate in RATES:
        assert rate.kernel in KERNELS
        assert 0 < rate.backward <= rate.forward < 1
        same = [other for other in RATES if other[:2] == rate[:2] and other.dense == rate.dense]
        assert [other.head_dim for other in same] == sorted({other.head_dim for other in same})


@pytest.mark.parametrize(
    ("kernel", "capability", "head_dim", "dense", "found"),
    [
        ("cudnn", (9, 0), 128, True, (0.59, 0.54)),
        ("cudnn", (9, 0), 128, False, None),
        ("cudnn", (9, 0), 136, True, None),
        ("flash", (9, 0), 256, False, (0.34, 0.32)),
        ("flash4", (9, 0), 64, False, (0.69, 0.62)),
        ("flash4", (9, 0), 192, False, (0.73, 0.37)),
        ("flash4", (9, 0), 128, True, None),
        ("flash4", (10, 3), 128, False, (0.62, 0.48)),
        ("flash4", (10, 0), 192, False, None),
        ("efficient", (8, 0), 512, True, (0.49, 0.25)),
        ("flash", (12, 0), 128, True, None),
        ("flash", None, 128, True, None),
    ],
)
def test_a_rate_is_found_by_generation_head_dim_and_mask(
    kernel: str, capability: tuple[int, int] | None, head_dim: int, dense: bool, found: tuple[float, float] | None
) -> None:
    rate = find_rate(kernel, capability, head_dim, dense)
    assert (rate and (rate.forward, rate.backward)) == found
