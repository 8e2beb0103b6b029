"""Simulated ranks: what ends a simulation."""

import pytest
from torch import Tensor

from benchmarks.simulation import simulate
from tests.support.oracle import draw_inputs
from torchtitan_cp.attention import PlanError
from torchtitan_cp.attention.kernels import KERNELS, Kernel


def test_a_kernel_that_fails_on_one_rank_ends_the_simulation_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(*arguments: object) -> tuple[Tensor, Tensor]:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("out of order")
        return KERNELS["reference"].forward(*arguments)  # type: ignore[arg-type]

    broken = Kernel(failing, KERNELS["reference"].backward, takes_band=lambda queries, keys, band: True)
    monkeypatch.setitem(KERNELS, "broken", broken)
    with pytest.raises(ValueError, match="out of order"):
        simulate(*draw_inputs(64)[:3], ranks=4, strategy="ring", kernel="broken")


def test_shapes_are_checked_as_on_ranks() -> None:
    q, k, v, _ = draw_inputs(64)
    with pytest.raises(PlanError, match="dtypes differ"):
        simulate(q, k.float(), v, ranks=4)
