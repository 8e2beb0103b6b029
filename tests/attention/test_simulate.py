"""Simulated groups: as many ranks as one likes, against the whole sequence, and byte by byte against the plan."""

import pytest
import torch
from torch import Tensor

from tests.attention.oracle import attention_with_gradients, attention_with_sinks
from torchtitan_cp.attention import AttentionMask, PlanError, simulate
from torchtitan_cp.attention.kernels import KERNELS, Kernel


def inputs(seq_len: int, heads: tuple[int, int] = (8, 2)) -> list[Tensor]:
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(1, seq_len, count, 8, dtype=torch.float64) for count in counts]


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all", "hybrid"])
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=(40, -1), document_lengths=((100, 3, 409),))])
def test_64_ranks_equal_the_full_sequence(strategy: str, mask: AttentionMask) -> None:
    q, k, v, dout = inputs(512)
    inner = 4 if strategy == "hybrid" else 1
    result = simulate(q, k, v, ranks=64, mask=mask, strategy=strategy, all_to_all_ranks=inner, dout=dout)
    expected = attention_with_gradients(q, k, v, dout, mask)
    for got, want in zip((result.out, result.dq, result.dk, result.dv), expected, strict=True):
        assert got is not None
        assert (got - want).norm() < 1e-10 * want.norm()


def test_sinks_of_all_ranks_sum_to_those_of_one_process() -> None:
    q, k, v, dout = inputs(96, (6, 2))
    sinks = torch.linspace(-4, 4, 6, dtype=torch.float64)
    result = simulate(q, k, v, ranks=4, strategy="all_to_all", sinks=sinks, dout=dout, scale=0.3)
    *_, dsinks = attention_with_sinks(q, k, v, dout, sinks, AttentionMask(), 0.3)
    assert result.dsinks is not None
    assert (result.dsinks - dsinks).norm() < 1e-10 * dsinks.norm()


def test_ring_sends_the_rows_of_the_plan_and_no_more() -> None:
    q, k, v, _ = inputs(256)
    result = simulate(q, k, v, ranks=8, strategy="ring", mask=AttentionMask(document_lengths=((100, 156),)))
    row_bytes = 2 * 2 * 8 * 8  # K and V, 2 heads, 8 dims, fp64
    for plan, sent in zip(result.plans, result.forward_bytes, strict=True):
        rows = [sum(stop - start for start, stop in step.send) for step in plan.steps[1:]]
        assert list(sent) == [count * row_bytes for count in rows if count]


def test_float8_halves_the_bytes_of_bf16() -> None:
    q, k, v, _ = (torch.randn(1, 128, 4, 64, dtype=torch.bfloat16) for _ in range(4))
    plain, small = (simulate(q, k, v, ranks=4, strategy="ring", kv_transfer=name) for name in ("exact", "float8"))
    ratio = sum(map(sum, small.forward_bytes)) / sum(map(sum, plain.forward_bytes))
    assert ratio == (64 + 4) / (2 * 64)


def test_a_kernel_that_fails_on_one_rank_ends_the_simulation_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(*arguments: object) -> tuple[Tensor, Tensor]:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("out of order")
        return KERNELS["reference"].forward(*arguments)  # type: ignore[arg-type]

    broken = Kernel(failing, KERNELS["reference"].backward, lambda case: None, bands=True)
    monkeypatch.setitem(KERNELS, "broken", broken)
    with pytest.raises(ValueError, match="out of order"):
        simulate(*inputs(64)[:3], ranks=4, strategy="ring", kernel="broken")


def test_shapes_are_checked_as_on_ranks() -> None:
    q, k, v, _ = inputs(64)
    with pytest.raises(PlanError, match="dtypes differ"):
        simulate(q, k.float(), v, ranks=4)
