"""Recurrences on one process: dtypes, and sizes at the edge. tests/ranks/attention has them on several."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.linear_cases import draw, with_gradients
from torchtitan_cp.attention import AttentionMask, attend, causal_conv, gated_delta_rule, make_plan, selective_scan

S = 130
PLAN = make_plan(S, mask=AttentionMask(document_lengths=((50, 80),)))
REFERENCE = make_plan(S, kernel="reference")


def rule_inputs(batch: int = 2) -> list[Tensor]:
    """q, k, v, g, beta and dout in fp32."""
    generator = torch.Generator().manual_seed(1)
    return [x.float() for x in draw(generator, (2, 4), "GDN", "soft", "between", S, batch)]


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v, g, beta: gated_delta_rule(q, k, v, g, beta, PLAN),
        lambda q, k, v, g, beta: selective_scan(v, beta, g[0, 0], k, q, PLAN),
        lambda q, k, v, g, beta: causal_conv(v.flatten(2), k.flatten()[:96].view(24, 4), PLAN).view_as(v),
        lambda q, k, v, g, beta: attend(q, k, v[:, :, :2], REFERENCE).repeat_interleave(2, 2),
    ],
    ids=["gated delta rule", "scan", "convolution", "attention"],
)
def test_autocast_changes_no_dtype_inside_an_operator(function: Callable[..., Tensor]) -> None:
    *inputs, dout = rule_inputs()

    def answers() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        gradients = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        return [out, *(x for x in gradients if x is not None)]

    want = answers()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = answers()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_an_empty_batch_gives_empty_tensors() -> None:
    *inputs, dout = rule_inputs(batch=0)
    answers = with_gradients(lambda *x: gated_delta_rule(*x, PLAN), inputs, dout)
    assert [x.shape for x in answers] == [dout.shape, *(x.shape for x in inputs)]
    out, dx, dweight = with_gradients(
        lambda *x: causal_conv(*x, PLAN), [torch.ones(0, S, 3), torch.ones(3, 4)], torch.ones(0, S, 3)
    )
    assert out.shape == dx.shape == (0, S, 3)
    assert not dweight.any()


def test_the_gates_of_a_scan_are_not_rounded_to_bf16() -> None:
    """A product of two numbers in bf16 fits into fp32."""
    ones, dt = torch.ones(1, S, 4, 6, dtype=torch.bfloat16), torch.full((1, S, 4), 0.1, dtype=torch.bfloat16)
    inputs = ones, dt, -torch.tensor([0.011, 0.023, 0.31, 0.57], dtype=torch.bfloat16), ones[:, :, :2], ones[:, :, :2]
    exact = selective_scan(*(x.double() for x in inputs), PLAN)
    assert torch.equal(selective_scan(*inputs, PLAN), exact.bfloat16())
