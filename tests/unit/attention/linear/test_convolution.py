"""The causal convolution on one process: how it rounds, and how many kernels it takes."""

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._logging import set_logs
from torch.profiler import profile

from tests.support.linear_cases import relative_error, with_gradients
from torchtitan_cp.attention import AttentionMask, causal_conv, make_plan
from torchtitan_cp.attention.compiling import compile_on_cuda
from torchtitan_cp.attention.linear import convolution

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
        held, weight, dout = torch.ones(1, 515, 2), torch.ones(2, 4), torch.ones(1, 512, 2)
        for _ in range(2):  # the first makes what is kept
            with profile() as profiled:
                rows = convolution._indices(plan, 4, held)
                convolution._forward(held, weight, None, rows, False)
                convolution._gradients(dout, held, weight, None, rows, False)
        calls.append(len(profiled.events()))
    assert calls[0] == calls[1] > 0


@pytest.mark.deep
def test_compiled_for_cuda_a_convolution_moves_few_bytes_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator at a time would move 152 bytes an element forward and 412 backward."""
    channels = 64
    generator = torch.Generator().manual_seed(2)
    x, weight, bias, dout = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((2, S, channels), (channels, 4), (channels,), (2, S, channels))
    )
    want = [
        convolution.convolve([x, weight, bias], PLAN.handle, True),
        *convolution.convolve_backward(dout, [x, weight, bias], PLAN.handle, True),
    ]
    monkeypatch.setattr(convolution, "compile_on_cuda", lambda function, on_cuda: compile_on_cuda(function, True))
    monkeypatch.setattr(metrics, "num_bytes_accessed", 0)
    set_logs(inductor_metrics=True)
    try:
        with inductor_config.patch(force_disable_caches=True):
            got = [convolution.convolve([x, weight, bias], PLAN.handle, True)]
            moved = [metrics.num_bytes_accessed / x.numel()]
            got += convolution.convolve_backward(dout, [x, weight, bias], PLAN.handle, True)
            moved.append(metrics.num_bytes_accessed / x.numel() - moved[0])
    finally:
        set_logs(inductor_metrics=False)
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other.double()) < 2**-8
    assert 0 < moved[0] < 12
    assert 0 < moved[1] < 60
