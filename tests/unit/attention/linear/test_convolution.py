"""The causal convolution on one process: how it rounds, and how many kernels it takes."""

import torch
from torch.profiler import profile

from tests.support.linear_cases import relative_error, with_gradients
from torchtitan_cp.attention import AttentionMask, causal_conv, make_plan
from torchtitan_cp.attention.linear.convolution import _convolve

S = 130
PLAN = make_plan(S, mask=AttentionMask(document_lengths=((50, 80),)))


def test_the_gradients_of_a_convolution_in_bf16_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, dout = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((2, S, 64), (64, 4), (2, S, 64))
    )
    want = with_gradients(lambda *y: causal_conv(*y, PLAN), [x.double(), weight.double()], dout.double())
    for got, exact in zip(with_gradients(lambda *y: causal_conv(*y, PLAN), [x, weight], dout), want, strict=True):
        assert relative_error(got, exact) < 1.02 * relative_error(exact.bfloat16(), exact)


def test_a_convolution_takes_no_kernel_for_each_document_that_lies_apart() -> None:
    """The gradient of each one's slice was as large as all rows: steps of 262,144 tokens took 90 s instead of 15."""
    calls = []
    for documents in (8, 64):
        lengths = (1024 // documents,) * documents
        plan = make_plan(1024, mask=AttentionMask(document_lengths=(lengths,)), ranks=2, layout="documents")
        assert len(plan.layout.spans[0]) >= documents // 4
        held = torch.ones(1, 515, 2, requires_grad=True)
        for _ in range(2):  # the first makes what is kept
            with profile() as profiled:
                _convolve(plan, False, held, torch.ones(2, 4)).sum().backward()
        calls.append(len(profiled.events()))
    assert calls[0] == calls[1] > 0
