"""Linear attention on one process: dtypes, and sizes at the edge. tests/ranks/attention has it on several."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from tests.support.linear_cases import draw, with_gradients
from torchtitan_cp.attention import AttentionMask, attend, causal_conv, gated_delta_rule, make_plan, selective_scan
from torchtitan_cp.attention.linear.convolution import _convolve
from torchtitan_cp.attention.linear.kernel import CHUNK, GROUPED_FROM, Factors, scan
from torchtitan_cp.attention.recording import ModelRun, record

S = 130
PLAN = make_plan(S, mask=AttentionMask(document_lengths=((50, 80),)))
REFERENCE = make_plan(S, kernel="reference")


def rule_inputs(batch: int = 2) -> list[Tensor]:
    """q, k, v, g, beta and dout in fp32."""
    generator = torch.Generator().manual_seed(1)
    return [x.float() for x in draw(generator, (2, 4), "GDN", "soft", "between", S, batch)]


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


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


@pytest.mark.parametrize("lengths", [(1,), (10, 3, 7), (40, 24)])
def test_what_is_kept_for_states_goes_by_the_documents_that_are_cut_and_not_by_all(lengths: tuple[int, ...]) -> None:
    """16 times as many documents took 16 times as much: a gigabyte a layer for 1,000 documents in 1M tokens."""
    kept = []
    for tokens in (1 << 10, 1 << 14):
        count = tokens // sum(lengths)
        row = (*lengths * count, *[1] * (tokens - count * sum(lengths)))
        plan = make_plan(tokens, mask=AttentionMask(document_lengths=(row,)), ranks=4, layout="documents")
        kept.append(plan.most_runs)
    assert kept[1] <= kept[0] <= 4


def test_an_empty_batch_gives_empty_tensors() -> None:
    *inputs, dout = rule_inputs(batch=0)
    answers = with_gradients(lambda *x: gated_delta_rule(*x, PLAN), inputs, dout)
    assert [x.shape for x in answers] == [dout.shape, *(x.shape for x in inputs)]
    out, dx, dweight = with_gradients(
        lambda *x: causal_conv(*x, PLAN), [torch.ones(0, S, 3), torch.ones(3, 4)], torch.ones(0, S, 3)
    )
    assert out.shape == dx.shape == (0, S, 3)
    assert not dweight.any()


def test_the_gradients_of_a_convolution_in_bf16_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, dout = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((2, S, 64), (64, 4), (2, S, 64))
    )
    want = with_gradients(lambda *y: causal_conv(*y, PLAN), [x.double(), weight.double()], dout.double())
    for got, exact in zip(with_gradients(lambda *y: causal_conv(*y, PLAN), [x, weight], dout), want, strict=True):
        assert relative(got, exact) < 1.02 * relative(exact.bfloat16(), exact)


def test_the_gates_of_a_scan_are_not_rounded_to_bf16() -> None:
    """A product of two numbers in bf16 fits into fp32."""
    ones, dt = torch.ones(1, S, 4, 6, dtype=torch.bfloat16), torch.full((1, S, 4), 0.1, dtype=torch.bfloat16)
    inputs = ones, dt, -torch.tensor([0.011, 0.023, 0.31, 0.57], dtype=torch.bfloat16), ones[:, :, :2], ones[:, :, :2]
    exact = selective_scan(*(x.double() for x in inputs), PLAN)
    assert torch.equal(selective_scan(*inputs, PLAN), exact.bfloat16())


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


class Convolution(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return causal_conv(x, torch.ones(3, 4), PLAN)


def test_a_recording_of_own_values_takes_a_convolution_for_its_input() -> None:
    model, x = Convolution(), torch.arange(3.0 * S).view(1, S, 3)
    run = ModelRun(model, lambda _: model(x).sum(), dict, lambda: lambda: 0)
    with torch.no_grad():
        trace = record(run, 1, S, own_values=True)
    assert (trace.error, trace.loss) == ("", x.sum().item())


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
                    assert relative(got, exact) < 1e-13
