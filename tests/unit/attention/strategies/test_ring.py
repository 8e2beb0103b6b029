"""Rows that the ring sends."""

import torch

from benchmarks.simulation import simulate
from tests.support.oracle import draw_inputs
from torchtitan_cp.attention import AttentionMask


def test_ring_sends_the_rows_of_the_plan_and_no_more() -> None:
    q, k, v, _ = draw_inputs(256)
    result = simulate(q, k, v, ranks=8, strategy="ring", mask=AttentionMask(document_lengths=((100, 156),)))
    row_bytes = 2 * 2 * 8 * 8  # K and V, 2 heads, 8 dims, fp64
    for plan, sent in zip(result.plans, result.forward_bytes, strict=True):
        rows = [sum(stop - start for start, stop in step.send) for step in plan.steps[1:]]
        assert sent == [count * row_bytes for count in rows if count]


def test_float8_halves_the_bytes_of_bf16() -> None:
    q, k, v, _ = (torch.randn(1, 128, 4, 64, dtype=torch.bfloat16) for _ in range(4))
    plain, small = (simulate(q, k, v, ranks=4, strategy="ring", kv_transfer=name) for name in ("exact", "float8"))
    ratio = sum(map(sum, small.forward_bytes)) / sum(map(sum, plain.forward_bytes))
    assert ratio == (64 + 4) / (2 * 64)
