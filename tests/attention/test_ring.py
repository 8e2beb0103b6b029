"""Ring attention on real ranks against the whole sequence in one process and fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.attention.oracle import attention_with_gradients
from tests.ranks import RankPool
from torchtitan_cp.attention import AttentionMask, ContextParallel, PlanError

# Error of one fp32 kernel call against fp64 is 1.5e-7 to 9e-7 (TORCH_FACTS); merging P partial sums adds
# roundings of the same size. fp64 leaves room for sums over 10^3 terms.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
Case = dict[str, Any]

MASKS = {
    "causal": AttentionMask(),
    "bidirectional": AttentionMask(causal=False),
    "documents": AttentionMask(document_lengths=((7, 1, 52, 36),)),
    "documents of two rows": AttentionMask(document_lengths=((96,), (1, 94, 1))),
    "bidirectional documents": AttentionMask(causal=False, document_lengths=((5, 91), (48, 48))),
}


def inputs(heads: tuple[int, int], dtype: torch.dtype, seq_len: int = 96) -> tuple[Tensor, ...]:
    """Fresh q, k, v and dout, the same on every rank."""
    generator = torch.Generator().manual_seed(seq_len + heads[0] + heads[1])
    shapes = [(2, seq_len, count, 16) for count in (heads[0], heads[1], heads[1], heads[0])]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def run_ring(mask: AttentionMask, layout: str, kernel: str, heads: tuple[int, int], dtype: torch.dtype) -> Case:
    """On a rank: attention of its shard, and the gathered result and gradients."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    cp = ContextParallel(mesh, strategy="ring", kernel=kernel, layout=layout)
    q, k, v, dout = inputs(heads, dtype)
    plan = cp.plan(q.shape[1], mask)
    local = [plan.shard(x).detach().requires_grad_() for x in (q, k, v)]
    out = cp.attention(*local, plan, scale=0.3)
    assert out.dtype == dtype
    out.backward(plan.shard(dout))
    return {
        "results": [plan.unshard(x) for x in (out.detach(), *(x.grad for x in local))],  # type: ignore[arg-type]
        "bytes": out.detach().view(torch.uint8).sum().item(),
    }


def relative_l2(value: Tensor, reference: Tensor) -> float:
    return ((value.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mask", MASKS)
def test_ring_equals_the_full_sequence_forward_and_backward(
    ranks: Callable[[int], RankPool], size: int, layout: str, mask: str
) -> None:
    for heads in ((4, 4), (4, 1)):
        for dtype, tolerance in TOLERANCE.items():
            answers = ranks(size)(run_ring, MASKS[mask], layout, "cpu", heads, dtype)
            q, k, v, dout = inputs(heads, dtype)
            expected = attention_with_gradients(q, k, v, dout, MASKS[mask], scale=0.3)
            for answer in answers:
                for name, got, want in zip(("out", "dq", "dk", "dv"), answer["results"], expected, strict=True):
                    # Chunk by chunk: a wrong short stretch would drown in the norm of the whole.
                    for piece, (part, reference) in enumerate(zip(got.chunk(12, 1), want.chunk(12, 1), strict=True)):
                        assert relative_l2(part, reference) < tolerance, (name, piece, heads, dtype)


def test_reference_kernel_equals_the_full_sequence_on_ranks(ranks: Callable[[int], RankPool]) -> None:
    answers = ranks(2)(run_ring, MASKS["documents"], "zigzag", "reference", (4, 2), torch.float64)
    expected = attention_with_gradients(*inputs((4, 2), torch.float64), MASKS["documents"], scale=0.3)
    for got, want in zip(answers[0]["results"], expected, strict=True):
        assert relative_l2(got, want) < 1e-10


@pytest.mark.parametrize("size", [2, 4])
def test_bf16_error_is_no_worse_than_one_process_and_does_not_grow_with_ranks(
    ranks: Callable[[int], RankPool], size: int
) -> None:
    heads = (4, 2)
    alone = ranks(1)(run_ring, MASKS["causal"], "zigzag", "cpu", heads, torch.bfloat16)[0]["results"]
    split = ranks(size)(run_ring, MASKS["causal"], "zigzag", "cpu", heads, torch.bfloat16)[0]["results"]
    expected = attention_with_gradients(*inputs(heads, torch.bfloat16), MASKS["causal"], scale=0.3)
    for name, got, single, want in zip(("out", "dq", "dk", "dv"), split, alone, expected, strict=True):
        assert relative_l2(got, want) < 1.5 * relative_l2(single, want), name


def test_ten_runs_are_bitwise_equal(ranks: Callable[[int], RankPool]) -> None:
    runs = [ranks(4)(run_ring, MASKS["causal"], "zigzag", "cpu", (4, 2), torch.float32) for _ in range(10)]
    for run in runs[1:]:
        for rank in range(4):
            for one, other in zip(runs[0][rank]["results"], run[rank]["results"], strict=True):
                assert torch.equal(one, other)


def run_idle_rank() -> list[float]:
    """Documents that never leave a rank: no key travels; every rank still answers."""
    cp = ContextParallel(init_device_mesh("cpu", (4,)), layout="contiguous")
    plan = cp.plan(64, AttentionMask(document_lengths=((16, 16, 16, 16),)))
    assert not any(step.receive or step.send for step in plan.steps[1:])
    q = torch.randn(1, 16, 2, 8, requires_grad=True)
    out = cp.attention(q, q, q, plan)
    out.sum().backward()
    assert q.grad is not None
    return [out.isfinite().all().item(), q.grad.isfinite().all().item()]


def test_ranks_with_nothing_to_exchange_finish(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(4)(run_idle_rank) == [[True, True]] * 4


def run_refusals() -> list[str]:
    cp = ContextParallel(init_device_mesh("cpu", (2,)))
    plan, q = cp.plan(64), torch.zeros(1, 32, 2, 8)
    calls = [
        lambda: cp.attention(torch.zeros(1, 64, 2, 8), q, q, plan),
        lambda: cp.attention(q, q[:, :, :, :4], q, plan),
        lambda: cp.attention(q, q.double(), q, plan),
        lambda: cp.attention(q, q, q, plan, sinks=torch.zeros(2)),
        lambda: cp.attention(q, q, q[..., :4], cp.plan(64)) if cp.kernel == "auto" else None,
        lambda: ContextParallel(init_device_mesh("cpu", (2,)), kernel="flash").attention(
            q, q, q, ContextParallel(init_device_mesh("cpu", (2,)), kernel="flash").plan(64)
        ),
        lambda: ContextParallel(init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))),
    ]
    messages = []
    for call in calls:
        try:
            call()
            messages.append("")
        except PlanError as error:
            messages.append(str(error))
    return messages


def test_calls_that_do_not_fit_are_refused_with_what_would(ranks: Callable[[int], RankPool]) -> None:
    messages = ranks(2)(run_refusals)[0]
    assert "the plan holds 32 tokens a rank" in messages[0]
    assert "batch, heads or dims do not match" in messages[1]
    assert "dtypes differ" in messages[2]
    assert "attention sinks are not available" in messages[3]
    assert messages[4] == "", "auto takes a kernel that can: Dqk != Dv runs on the reference"
    assert "kernel 'flash' cannot run this: it runs on cuda, not cpu; use cpu or reference" in messages[5]
    assert "the mesh has 2 axes" in messages[6]


def run_unshard_gradient() -> Tensor:
    """A loss of the full tensor, the same on every rank."""
    plan = ContextParallel(init_device_mesh("cpu", (2,))).plan(8)
    full = torch.arange(8.0)[None]
    local = plan.shard(full).requires_grad_()
    assert torch.equal(plan.unshard(local), full)
    (plan.unshard(local) * full).sum().backward()
    assert local.grad is not None
    return plan.unshard(local.grad)


def test_unshard_inverts_shard_and_its_gradient_is_the_rows_own(ranks: Callable[[int], RankPool]) -> None:
    for gradient in ranks(2)(run_unshard_gradient):
        assert torch.equal(gradient, torch.arange(8.0)[None])
