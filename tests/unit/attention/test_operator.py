"""The attention operator at its edges: sinks, empty batches, strides, modes of torch, and a strategy chosen later."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.emulated_ops import EMULATED, emulate
from tests.support.kernel_cases import draw
from tests.support.oracle import attention_with_gradients
from torchtitan_cp.attention import OPERATOR, AttentionMask, PlanError, attend, causal_conv, gated_delta_rule, make_plan
from torchtitan_cp.attention.kernels import KERNELS, Kernel
from torchtitan_cp.attention.operator import with_exchange
from torchtitan_cp.attention.strategies import ranks_trading_heads


def test_a_graph_that_is_replayed_leaves_attention_out() -> None:
    for operator in (OPERATOR, torch.ops.torchtitan_cp.attention_backward.default):
        assert torch.Tag.cudagraph_unsafe in operator.tags


def test_a_sink_of_minus_infinity_is_no_sink_and_padding_stays_zero() -> None:
    mask = AttentionMask(document_lengths=((12, 20),), used_lengths=((9, 20),))
    plan = make_plan(32, mask=mask)
    q, k, v, dout = draw(32, 32, (4, 2), (16, 16), "cpu", torch.float64)
    answers = []
    for sinks in (None, torch.full((4,), float("-inf"), dtype=torch.float64).requires_grad_()):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, plan, sinks=sinks)
        out.backward(dout)
        answers.append([out.detach(), *(x.grad for x in leaves)])
    assert sinks is not None
    assert sinks.grad is not None
    assert sinks.grad.abs().max() == 0
    for want, got in zip(*answers, strict=True):
        assert torch.equal(got, want)
    assert answers[1][0][:, 9:12].abs().max() == 0


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_is_not_positive_hides_the_same_keys(kernel: str, scale: float) -> None:
    """A kernel that multiplies the scores of hidden pairs, -inf, by it would give NaN."""
    mask = AttentionMask(window=(9, -1), document_lengths=((12, 20),))
    *inputs, dout = draw(32, 32, (4, 2), (16, 8), "cpu", torch.float64)
    want = attention_with_gradients(*inputs, dout, mask, scale)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves, make_plan(32, mask=mask, kernel=kernel), scale=scale)
    out.backward(dout)
    for got, exact in zip((out, *(x.grad for x in leaves)), want, strict=True):
        torch.testing.assert_close(got, exact)


def test_a_scale_that_would_get_no_gradient_is_refused() -> None:
    x, gates, plan = torch.randn(1, 8, 2, 4), torch.zeros(1, 8, 2), make_plan(8)
    for run in (lambda scale: attend(x, x, x, plan, scale), lambda s: gated_delta_rule(x, x, x, gates, gates, plan, s)):
        with pytest.raises(PlanError, match=r"the scale requires grad, .*; multiply q by it, and give scale = 1\.0"):
            run(torch.tensor(0.5, requires_grad=True))
        assert torch.equal(run(torch.tensor(0.5)), run(0.5))


@pytest.mark.parametrize("softcap", [-2.0, float("nan")])
def test_a_soft_cap_that_is_no_bound_is_refused_by_every_kernel(softcap: float) -> None:
    q = torch.zeros(1, 8, 1, 16)
    for kernel in ("cpu", "reference"):
        with pytest.raises(PlanError, match="is not at least 0; give a positive number, or 0 for none"):
            attend(q, q, q, make_plan(8, kernel=kernel), softcap=softcap)


def test_the_backward_may_have_another_kernel_than_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(name: str, q: Tensor, v: Tensor, *, backward: bool, **options: bool) -> Kernel:
        return KERNELS["flash4" if backward else "cudnn"]

    mask = AttentionMask(window=(9, -1), document_lengths=((20, 44),))
    *inputs, dout = draw(64, 64, (4, 2), (16, 8), "cpu", torch.float64)

    def gradients(kernel: str) -> list[Tensor | None]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        attend(*leaves, make_plan(64, mask=mask, kernel=kernel)).backward(dout)
        return [x.grad for x in leaves]

    want = gradients("reference")
    monkeypatch.setattr("torchtitan_cp.attention.operator.choose_kernel", choose)
    with emulate() as calls:
        for got, exact in zip(gradients("auto"), want, strict=True):
            torch.testing.assert_close(got, exact)
    assert calls["flash4._flash_attn_bwd"] > 0 == calls["flash4._flash_attn_fwd"]
    assert calls["_scaled_dot_product_cudnn_attention"] > 0


@pytest.mark.parametrize("kernel", ["cpu", "reference", *EMULATED])
def test_no_kernel_is_given_an_empty_batch(kernel: str) -> None:
    leaves = [torch.zeros(0, 64, 2, 16, requires_grad=True) for _ in "qkv"]
    with emulate():
        attend(*leaves, make_plan(64, mask=AttentionMask(document_lengths=((20, 44),)), kernel=kernel)).sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in leaves)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_heads_whose_numbers_do_not_lie_side_by_side_are_read_right(kernel: str) -> None:
    plan = make_plan(32, kernel=kernel)
    *inputs, dout = draw(32, 32, (4, 2), (16, 16), "cpu", torch.float64)
    answers = []
    for order in (lambda x: x, lambda x: x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)):
        leaves = [order(x).detach().requires_grad_() for x in inputs]
        out = attend(*leaves, plan)
        out.backward(order(dout))
        answers.append([out.detach(), *(x.grad for x in leaves)])
    assert leaves[0].stride(-1) != 1
    for want, got in zip(*answers, strict=True):
        torch.testing.assert_close(got, want)


def test_a_plan_made_where_the_model_is_initialized_without_data_is_as_any_other() -> None:
    """Its number told the dispatcher to run attention without data, on inputs that have some."""
    with torch.device("meta"):
        plan = make_plan(64, mask=AttentionMask(document_lengths=((24, 40),)))
        assert plan.positions.tolist() == list(range(64))
    q = torch.randn(1, 64, 2, 8)
    same = make_plan(64, mask=AttentionMask(document_lengths=((24, 40),)), kernel="cpu")
    torch.testing.assert_close(attend(q, q, q, plan), attend(q, q, q, same))


def test_a_forward_mode_derivative_is_refused_where_it_would_be_zero() -> None:
    plan, x = make_plan(8), torch.randn(1, 8, 1, 4)
    for function in (
        lambda x: attend(x, x, x, plan),
        lambda x: gated_delta_rule(x, x, x, -x[..., 0].abs(), x[..., 1], plan),
        lambda x: causal_conv(x[:, :, 0], torch.ones(4, 2), plan),
    ):
        with pytest.raises(PlanError, match="has no forward-mode derivative; use reverse mode"):
            torch.func.jvp(function, (x,), (x,))


def test_a_plan_whose_strategy_is_chosen_later_keeps_the_steps_that_still_hold() -> None:
    mask = AttentionMask(document_lengths=((9, 23, 32),))
    plan = make_plan(64, mask=mask, ranks=8, rank=1)
    steps = plan.steps
    ring, traded = (with_exchange(plan, ranks_trading_heads(plan, *heads)) for heads in ((6, 3), (8, 8)))
    assert (ring.strategy, traded.strategy) == ("ring", "all_to_all")
    assert ring.steps is steps
    assert len(traded.steps) == 1  # whose ring is of one member
    assert traded.all_to_all_ranks == 8
    assert ring == make_plan(64, mask=mask, ranks=8, rank=1, strategy="ring")


def test_auto_keeps_keys_in_8_bits_on_the_ring_where_heads_could_be_traded() -> None:
    plan = make_plan(64, ranks=8, kv_transfer="float8")
    ring = with_exchange(plan, ranks_trading_heads(plan, 8, 8))
    assert (ring.strategy, ring.kv_transfer) == ("ring", "float8")


def test_a_plan_of_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        plan = make_plan(64)
        positions, cu_seqlens = plan.positions, plan.cu_seqlens
    x = torch.randn(1, 64, 2, 8, requires_grad=True)
    gates = torch.zeros(1, 64, 2)
    attend(x, x, x, plan).sum().backward()
    gated_delta_rule(x, x, x, gates, gates, plan).sum().backward()
    torch.nn.functional.embedding(positions, torch.randn(64, 8, requires_grad=True)).sum().backward()
    assert not positions.is_inference()
    assert not cu_seqlens.is_inference()


def test_documents_are_hashed_once_and_not_at_each_attention() -> None:
    hashed = list[int]()

    class Lengths(tuple[int, ...]):
        def __hash__(self) -> int:
            hashed.append(len(self))
            return super().__hash__()

    plan = make_plan(64, mask=AttentionMask(document_lengths=(Lengths((24, 40)),)), ranks=4)
    with_exchange(plan, ranks_trading_heads(plan, 4, 2))
    with_exchange(replace(plan, strategy="all_gather"), 1)
    assert hashed == [2]
