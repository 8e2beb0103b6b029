"""The gated delta rule on its device: in torch against the recurrence, and fused kernels rank by rank against torch."""

import pytest
import torch
from torch import Tensor

from tests.support.linear_cases import (
    LONG,
    LONG_MASK,
    SCALE,
    check,
    draw,
    long_answers,
    long_inputs,
    stand_in,
    with_gradients,
)
from torchtitan_cp.attention import AttentionMask, gated_delta_rule, make_plan
from torchtitan_cp.attention.linear import flash_linear
from torchtitan_cp.attention.linear.kernel import TorchKernel
from torchtitan_cp.attention.linear.states import Inputs, local_segments
from torchtitan_cp.attention.merge import accumulation_dtype

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-6, torch.bfloat16: 1e-2}
MASK = AttentionMask(document_lengths=((40, 1, 190, 25),))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rule", ["GDN", "KDA"])
def test_the_rule_in_torch_equals_the_recurrence(
    rule: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_linear, "is_available", lambda inputs, plan: False)
    *tensors, dout = (x.to(device) for x in long_inputs(1, dtype, rule))
    plan = make_plan(LONG, mask=LONG_MASK)
    answers = with_gradients(lambda *x: gated_delta_rule(*x, plan, SCALE), tensors, dout)
    check([x.cpu() for x in answers], long_answers(dtype, rule, True), TOLERANCE[dtype], (rule, dtype, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("rule", ["KDA", "GDN"])
def test_fused_kernels_give_what_chunks_in_torch_give_on_each_of_four_ranks(
    rule: str, layout: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    if device == "cpu":
        monkeypatch.setattr(flash_linear, "find_rules", lambda: (stand_in, stand_in))
    elif not flash_linear.find_rules() or (rule == "GDN" and not flash_linear.has_right_backward()):
        pytest.skip("no flash-linear-attention whose backward is right on this GPU")
    generator = torch.Generator().manual_seed(4)
    length = sum(MASK.document_lengths[0])
    *whole, dout = (x.to(device) for x in draw(generator, (4, 4), rule, "soft", "between", length))
    q, k, v, g, beta = whole
    wide = [torch.cat([x] * 4, -1) for x in (q, k, v, dout)]  # as few dims as a fused kernel takes
    g, beta = (torch.cat([g] * 4, -1) if rule == "KDA" else g.unsqueeze(-1)), beta.unsqueeze(-1)

    def close(got: Tensor, want: Tensor) -> None:
        check([got.double()], [want], 10 * TOLERANCE[dtype], (rule, layout, device))

    for rank in range(4):
        plan = make_plan(length, mask=MASK, ranks=4, rank=rank, layout=layout)
        q, k, v, upstream = (x[:, plan.positions].to(dtype) for x in wide)
        inputs = Inputs(q, k, v, *(x[:, plan.positions].to(accumulation_dtype(dtype)) for x in (g, beta)))
        exact = Inputs(*(x.double() for x in inputs))
        fused = flash_linear.FlashKernel(inputs, plan, SCALE, "normalized_delta", upstream)
        plain = TorchKernel(exact, plan, SCALE, "normalized_delta", upstream.double())
        segments = local_segments(plan)
        runs, states = len(plan.layout.spans[rank]), (len(q), 4, q.shape[-1], v.shape[-1])
        entering, leaving = (
            0.1 * torch.randn(runs, *states, generator=generator, dtype=torch.float64).to(device) for _ in range(2)
        )
        for run in set(range(runs)) - {one.run for one in segments if one.continues}:
            leaving[run] = 0.0
        for one in segments:
            if one.continues:
                close(fused.summarize(one), plain.summarize(one))
            if one.offset:
                close(fused.gradient_inside(one), plain.gradient_inside(one))
        close(fused.outputs(entering.to(fused.zeros.dtype)), plain.outputs(entering))
        ends = (entering, leaving)
        for got, want in zip(
            fused.gradients(*(x.to(fused.zeros.dtype) for x in ends)), plain.gradients(*ends), strict=True
        ):
            close(got, want)
