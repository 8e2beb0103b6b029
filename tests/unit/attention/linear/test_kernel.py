"""Chunks of the recurrence in torch: what their maps hold, and groups of them."""

import pytest
import torch
from torch import Tensor

from tests.support.linear_cases import relative_error
from torchtitan_cp.attention.linear.kernel import CHUNK, GROUPED_FROM, Factors, scan


def test_a_map_that_decays_to_nothing_holds_no_subnormal_numbers() -> None:
    """CPUs take a hundred times as long for them, and a long segment's map spends most of its chunks there."""
    chunks, dims = 40, 8
    keys, gamma = 0.01 * torch.randn(chunks, 1, 1, 1, CHUNK, dims), torch.full((chunks, 1, 1, 1, 1, 1), 0.1)
    states, last = scan(
        Factors(keys, keys, keys, keys, keys, gamma), torch.zeros(chunks, 1, 1, 1, dims, dims), {0: torch.eye(dims)}
    )
    assert not states[-1].any()
    assert not last.any()
    assert not states[(states != 0) & (states.abs() < torch.finfo(torch.float32).tiny)].numel()


@pytest.mark.parametrize("back", [False, True])
def test_chunks_in_groups_carry_the_states_of_chunks_one_after_the_other(back: bool) -> None:
    generator = torch.Generator().manual_seed(int(back))

    def normal(chunks: int, *shape: int) -> Tensor:
        return torch.randn(chunks, 2, 1, 2, *shape, generator=generator, dtype=torch.float64)

    for chunks in (GROUPED_FROM, GROUPED_FROM + 17):
        w, k_out = 0.3 * normal(chunks, 4, 3), 0.3 * normal(chunks, 4, 3)
        for gamma in (normal(chunks, 1, 1).sigmoid(), normal(chunks, 3, 1).sigmoid()):
            factors, added = Factors(w, w, w, w, k_out, gamma), normal(chunks, 3, 5)
            for places in ((), (0,), (chunks - 1,), (0, 100, 101)):
                starts = {place: normal(1, 3, 5)[0] for place in places}
                want = scan(factors, added, starts, back)
                for got, exact in zip(scan(factors, added, starts, back, in_groups=True), want, strict=True):
                    assert relative_error(got, exact) < 1e-13
