"""The order of gathered keys."""

import pytest
from torch import Tensor

from benchmarks.simulation import simulate
from tests.support.oracle import draw_inputs
from torchtitan_cp.attention.kernels import KERNELS, Kernel


@pytest.mark.parametrize(("ranks", "calls"), [(2, 2 + 2), (4, 3 + 4 + 4 + 2), (16, 3 + 14 * 4 + 2)])
def test_gathered_keys_are_put_in_order_only_where_that_saves_kernel_calls(
    ranks: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counting(*arguments: object) -> tuple[Tensor, Tensor]:
        made.append(1)
        return KERNELS["reference"].forward(*arguments)  # type: ignore[arg-type]

    counted = Kernel(counting, KERNELS["reference"].backward)
    monkeypatch.setitem(KERNELS, f"counted-{ranks}", counted)  # a kernel is chosen once a name
    simulate(*draw_inputs(256, (1, 1))[:3], ranks=ranks, strategy="all_gather", kernel=f"counted-{ranks}")
    # Each of two ranks calls the kernel once a shard. In order, a rank's two chunks cost a rectangle and a triangle
    # each; the first chunk of the sequence is a triangle alone, and the last rank's chunks are neighbours.
    assert len(made) == calls
