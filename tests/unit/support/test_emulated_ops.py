"""The stand-ins of the CUDA operators: against torch's own maths, what they refuse, and wrong readings of the sources.

A wrong reading is injected into the stand-ins, and the kernel files' code must then give wrong results: so the
conformance of these files over the stand-ins can fail.
"""

import itertools
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.simulation import simulate
from tests.support.emulated_ops import EMULATED, MISREADINGS, OPERATORS, emulate
from tests.support.oracle import attention_with_gradients
from tests.support.sdpa_inputs import SCALE, by_torch, draw, qkv
from torchtitan_cp.attention import AttentionMask, attend, make_plan
from torchtitan_cp.attention.kernels import KERNELS, ScoreMod, cudnn, efficient, flash
from torchtitan_cp.attention.tiles import FULL

ATEN = torch.ops.aten
STATE = (torch.zeros(2, dtype=torch.uint64), torch.zeros(0))


def flash_call(tensors: list[Tensor], left: int, right: int, causal: bool = False) -> list[Tensor]:
    q, k, v, dout = tensors
    window = {"window_size_left": left, "window_size_right": right, "scale": SCALE}
    out, lse, *_ = ATEN._flash_attention_forward(q, k, v, None, None, 0, 0, 0.0, causal, False, **window)
    gradients = ATEN._flash_attention_backward(dout, q, k, v, out, lse, None, None, 0, 0, 0.0, causal, *STATE, **window)
    return [out, *gradients, lse]


def cudnn_call(tensors: list[Tensor], causal: bool) -> list[Tensor]:
    q, k, v, dout = (x.transpose(1, 2) for x in tensors)
    out, lse, *_ = ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=SCALE)
    lengths = (None, None, q.shape[2], k.shape[2])
    gradients = ATEN._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, *STATE, None, *lengths, 0.0, causal, scale=SCALE
    )
    return [*(x.transpose(1, 2) for x in (out, *gradients)), lse]


def efficient_call(tensors: list[Tensor], causal: bool) -> list[Tensor]:
    q, k, v, dout = (x.transpose(1, 2) for x in tensors)
    out, lse, *_ = ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=SCALE)
    *gradients, _ = ATEN._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, *STATE, 0.0, [True, True, True, False], causal, scale=SCALE
    )
    return [*(x.transpose(1, 2) for x in (out, *gradients)), lse]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for number, (x, y) in enumerate(zip(got, want, strict=True)):
        assert (x - y).norm() < 1e-12 * (1 + y.norm()), number


LENGTHS = [(24, 24), (24, 40), (40, 24), (33, 7)]


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (5, 3), (0, 0), (100, 2), (4, 100)])
def test_flash_aligns_a_window_at_the_last_query_and_the_last_key(
    queries: int, keys: int, left: int, right: int
) -> None:
    tensors = qkv(queries, keys)
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - (keys - queries)
    # Beside a bounded left side, an unbounded right side is as long as the keys.
    right_of = keys if right < 0 or right >= keys else right
    seen = (distance >= -left if 0 <= left < keys else torch.ones_like(distance, dtype=torch.bool)) & (
        (distance <= right_of) | (left < 0 and right < 0)
    )
    rows = seen.any(1)
    dout = tensors[3] * rows[:, None, None]
    want = by_torch([*tensors[:3], dout], attn_mask=seen)
    with emulate():
        got = flash_call([*tensors[:3], dout], left, right)
    assert_equal(got[:4], [x.nan_to_num(0) for x in want])
    scores = torch.einsum("bqhd,bkhd->bhqk", tensors[0], tensors[1].repeat_interleave(2, 2)) * SCALE
    lse = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(got[4], torch.where(rows, lse, float("inf")))


def test_flash_takes_causal_as_a_right_side_of_zero_but_for_one_query() -> None:
    for queries in (24, 1):
        tensors = qkv(queries, 24)
        with emulate():
            assert_equal(flash_call(tensors, -1, -1, True), flash_call(tensors, -1, 0 if queries > 1 else -1))


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_and_efficient_align_causal_order_at_the_first_query_and_the_first_key(
    queries: int, keys: int, causal: bool
) -> None:
    grouped, single = qkv(queries, keys, dims=(16, 8)), qkv(queries, keys, (4, 4), (16, 8))
    with emulate():
        for tensors, call in ((grouped, cudnn_call), (single, efficient_call)):
            got = call(tensors, causal)
            assert_equal(got[:4], by_torch(tensors, is_causal=causal))
    assert got[4].shape == (2, 4, -(-queries // 32) * 32)
    assert got[4][..., queries:].isposinf().all()


def test_the_log_sum_exp_has_the_shape_of_the_real_operators() -> None:
    with emulate():
        assert flash_call(qkv(24, 40), -1, -1)[4].shape == (2, 4, 24)
        assert cudnn_call(qkv(24, 40), False)[4].shape == (2, 4, 24, 1)
        assert efficient_call(qkv(24, 40, (4, 4)), False)[4].shape == (2, 4, 32)


def test_operators_answer_with_the_shapes_strides_and_dtypes_that_torch_promises() -> None:
    """As torch/_meta_registrations.py has them, which compiled code and dry runs rely on."""
    tensors = [x.bfloat16() for x in qkv(24, 40, (4, 4), (16, 16))]
    for call, options in ((flash_call, (5, 3)), (cudnn_call, (True,)), (efficient_call, (True,))):
        with emulate():
            real = call(tensors, *options)  # type: ignore[operator]
        promised = call([x.to("meta") for x in tensors], *options)  # type: ignore[operator]
        for got, want in zip(real, promised, strict=True):
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


PACKED = {
    "as many keys as queries": ((7, 1, 20, 4), (7, 1, 20, 4)),
    "more keys": ((3, 9), (12, 9)),
    "no queries, and no keys": ((5, 0, 4), (6, 3, 0)),
    "one query each": ((1, 1, 1), (4, 1, 6)),
}


def packed_call(tensors: list[Tensor], lengths: tuple[tuple[int, ...], tuple[int, ...]], window: Any) -> list[Tensor]:
    """out, dq, dk, dv, lse of sequences that lie one after the other, in one call each way."""
    q, k, v, dout = (x[0] for x in tensors)
    edges = [torch.tensor([0, *accumulate(side)], dtype=torch.int32) for side in lengths]
    longest = [max(side) for side in lengths]
    options = {"window_size_left": window[0], "window_size_right": window[1], "scale": SCALE}
    out, lse, *_ = ATEN._flash_attention_forward(q, k, v, *edges, *longest, 0.0, False, False, **options)
    gradients = ATEN._flash_attention_backward(dout, q, k, v, out, lse, *edges, *longest, 0.0, False, *STATE, **options)
    return [out, *gradients, lse.T]


def apart_call(tensors: list[Tensor], lengths: tuple[tuple[int, ...], tuple[int, ...]], window: Any) -> list[Tensor]:
    """The same, one sequence after the other."""
    spans = [[slice(*edges) for edges in pairwise([0, *accumulate(side)])] for side in lengths]
    parts = []
    for rows, keys in zip(*spans, strict=True):
        q, k, v, dout = (x[:1, span] for x, span in zip(tensors, (rows, keys, keys, rows), strict=True))
        if q.shape[1] and k.shape[1]:
            out, dq, dk, dv, lse = flash_call([q, k, v, dout], *window)
        else:
            out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
            lse = torch.full((1, q.shape[2], q.shape[1]), float("inf"), dtype=torch.float64)
        parts.append((out[0], dq[0], dk[0], dv[0], lse[0].T))
    return [torch.cat(x) for x in zip(*parts, strict=True)]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)])
@pytest.mark.parametrize("lengths", PACKED)
def test_packed_sequences_equal_calls_of_their_own(lengths: str, window: tuple[int, int]) -> None:
    tensors = qkv(sum(PACKED[lengths][0]), sum(PACKED[lengths][1]))
    with emulate() as calls:
        got = packed_call(tensors, PACKED[lengths], window)
        assert calls == {"_flash_attention_forward": 1, "_flash_attention_backward": 1}
        want = apart_call(tensors, PACKED[lengths], window)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_rows_that_no_packed_sequence_holds_are_left_as_they_were() -> None:
    tensors = qkv(12, 12)
    with emulate():
        for x in packed_call(tensors, ((4, 4), (4, 4)), (-1, -1)):
            assert x[:8].isfinite().all()
            assert x[8:].isnan().all()


@pytest.mark.parametrize(
    "misread", ["flash: lse of varlen is [T, H]", "flash: cu_seqlens one too far", "flash: max_q one too small"]
)
def test_a_wrong_reading_of_packed_sequences_is_seen(misread: str) -> None:
    tensors, lengths = qkv(32, 32), PACKED["as many keys as queries"]
    with emulate():
        want = apart_call(tensors, lengths, (-1, 0))
    with emulate(misread):
        got = packed_call(tensors, lengths, (-1, 0))
    assert max(((x - y).norm() / y.norm()).nan_to_num(1.0).item() for x, y in zip(got, want, strict=True)) > 1e-3


def calls_that_are_refused() -> dict[str, tuple[Callable[[], Any], str]]:
    tensors = qkv(24, 24)
    odd = [F.pad(x, (0, 4)) for x in tensors]
    wide = [F.pad(x, (0, 256)) for x in tensors]
    q, k, v, dout = tensors
    edges = torch.tensor([0, 10, 24], dtype=torch.int32)
    columns = [x.mT.contiguous().mT for x in tensors]
    shifted = [F.pad(x, (1, 7))[..., 1:17] for x in tensors]

    def varlen(edges_q: Tensor, edges_k: Tensor, q: Tensor = q[0], longest: int = 14) -> Any:
        lengths = (edges_q, edges_k, longest, longest)
        return ATEN._flash_attention_forward(q, k[0], v[0], *lengths, 0.0, False, False)

    return {
        "flash: head dim": (lambda: flash_call(odd, -1, -1), "must be a multiple of 8"),
        "flash: large head dim": (lambda: flash_call(wide, -1, -1), "at most 256"),
        "flash: other v dim": (lambda: flash_call([q, k, v[..., :8], dout], -1, -1), "k and v must have shape"),
        "flash: heads": (lambda: flash_call([q[:, :, :3], k, v, dout], -1, -1), "must divide number of heads"),
        "flash: dtypes": (lambda: flash_call([q, k.float(), v, dout], -1, -1), "same dtype"),
        "flash: columns": (lambda: flash_call(columns, -1, -1), "contiguous last dimension"),
        "flash: alignment": (lambda: flash_call(shifted, -1, -1), "misaligned"),
        "flash: int64 edges": (lambda: varlen(edges.long(), edges.long()), "cu_seqlens_q must have dtype int32"),
        "flash: one side of edges": (lambda: varlen(edges, None), "both set or both not set"),  # type: ignore[arg-type]
        "flash: strided edges": (
            lambda: varlen(edges.repeat_interleave(2)[::2], edges),
            "cu_seqlens_q must be contiguous",
        ),
        "flash: edges past the end": (lambda: varlen(edges, edges + 1), "illegal memory access"),
        "flash: packed rows with a batch": (lambda: varlen(edges, edges, q), "packed ones 3-D"),
        "flash: one query each of more rows": (lambda: varlen(edges, edges, longest=1), "invalid for max_q = 1"),
        "cudnn: head dim": (lambda: cudnn_call(odd, False), "head_dim should be a multiple of 8"),
        "cudnn: large head dim": (lambda: cudnn_call(wide, False), "no more than 128"),
        "cudnn: one key": (lambda: cudnn_call(qkv(24, 1), False), "key/value sequence length 1"),
        "cudnn: one query": (lambda: cudnn_call(qkv(1, 24), False), "query sequence length 1"),
        "cudnn: alignment": (lambda: cudnn_call(shifted, False), "misaligned"),
        "cudnn: the log-sum-exp without its last dim": (
            lambda: cudnn.backward(dout, q, k, v, dout, q[..., 0].float(), FULL, ScoreMod(SCALE)),
            r"Stats must be \[B, H, S, 1\]",
        ),
        "efficient: grouped heads": (lambda: efficient_call(tensors, False), "grouped heads are not taken"),
        "efficient: head dim": (lambda: efficient_call([x[:, :, :2, :6] for x in tensors], False), "multiples of 4"),
        "efficient: rows of the log-sum-exp": (
            lambda: ATEN._scaled_dot_product_efficient_attention_backward(
                *(x[:, :, :2].transpose(1, 2) for x in (dout, q, k, v)),
                None,
                q[:, :, :2].transpose(1, 2),
                torch.zeros(2, 2, 27, dtype=torch.float64),
                *STATE,
                0.0,
                [True, True, True, False],
            ),
            "LSE is misaligned",
        ),
    }


@pytest.mark.parametrize("name", calls_that_are_refused())
def test_the_operators_refuse_what_the_real_ones_refuse(name: str) -> None:
    call, message = calls_that_are_refused()[name]
    with emulate(), pytest.raises(RuntimeError, match=message):
        call()


def other_strides(x: Tensor) -> Tensor:
    """The same values, heads before rows in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_a_plan_of_cudnn_keeps_the_strides_of_out_and_dout_that_it_was_built_with() -> None:
    """Silently wrong gradients by the operator; the kernel gives it one layout only."""
    q, k, v, dout = qkv(24, 24)
    want = by_torch([q, k, v, dout])
    with emulate():
        cudnn_call([q, k, v, dout], False)
        assert (cudnn_call([q, k, v, other_strides(dout)], False)[1] - want[1]).norm() > 0.1 * want[1].norm()
    with emulate() as calls:
        out, lse = cudnn.forward(q, k, v, FULL, ScoreMod(SCALE))
        for dout_layout, out_layout in itertools.product((dout, other_strides(dout)), (out, other_strides(out))):
            gradients = cudnn.backward(dout_layout, q, k, v, out_layout, lse, FULL, ScoreMod(SCALE))
            assert_equal(list(gradients), want[1:])
    assert calls["_scaled_dot_product_cudnn_attention_backward"] == 4


def test_the_efficient_operator_assumes_that_rows_of_out_lie_side_by_side() -> None:
    tensors = qkv(24, 24, (4, 4))
    want = by_torch(tensors)
    with emulate():
        q, k, v, dout = tensors
        out, lse = efficient.forward(q, k, v, FULL, ScoreMod(SCALE))
        wide = torch.cat([out, out], 2)[:, :, :4]
        assert_equal(list(efficient.backward(dout, q, k, v, wide, lse, FULL, ScoreMod(SCALE))), want[1:])
        rows = [x.transpose(1, 2) for x in (dout, q, k, v)]
        padded = F.pad(lse.transpose(1, 2), (0, 8)).contiguous()
        mask = [True, True, True, False]
        backward = ATEN._scaled_dot_product_efficient_attention_backward
        dq, *_ = backward(*rows, None, wide.transpose(1, 2), padded, *STATE, 0.0, mask, scale=SCALE)
        assert (dq.transpose(1, 2) - want[1]).norm() > 0.1 * want[1].norm()
        # The padding of the log-sum-exp is read: any weight of its rows meets zeros, but for one that is infinite.
        for padding, finite in ((0.0, True), (float("inf"), True), (-1e9, False)):
            padded[..., 24:] = padding
            _, dk, dv, _ = backward(*rows, None, out.transpose(1, 2), padded, *STATE, 0.0, mask, scale=SCALE)
            assert (dk.isfinite().all() and dv.isfinite().all()) == finite


# On three ranks these have windows whose corner is not at the first rows, tiles of one row, and rows that are merged.
MASKS = [
    AttentionMask(),
    AttentionMask(causal=False, window=(30, 20)),
    AttentionMask(document_lengths=((7, 1, 53, 35), (30, 20, 10, 36))),
]


def worst_error(kernel: str, misread: str = "", dtype: torch.dtype = torch.float64) -> float:
    """The largest relative error of out, dq, dk and dv by a kernel's own code on three simulated ranks."""
    worst = 0.0
    for mask in MASKS:
        shapes = [(2, 96, 4, 16), (2, 96, 2, 16), (2, 96, 2, 8), (2, 96, 4, 8)]
        q, k, v, dout = (x.to(dtype) for x in draw(*shapes))
        with emulate(misread) as calls:
            run = {"ranks": 3, "strategy": "ring", "mask": mask, "kernel": kernel, "dout": dout, "scale": SCALE}
            result = simulate(q, k, v, **run)  # type: ignore[arg-type]
        assert sum(count for name, count in calls.items() if kernel in name) > 0
        want = attention_with_gradients(q, k, v, dout, mask, SCALE)
        for got, reference in zip((result.out, result.dq, result.dk, result.dv), want, strict=True):
            assert got is not None
            worst = max(worst, ((got - reference).norm() / reference.norm()).nan_to_num(float("inf")).item())
        if worst > 0.1:
            break
    return max(worst, capped_error(kernel, misread)) if KERNELS[kernel].has_softcap else worst


def capped_error(kernel: str, misread: str) -> float:
    """As `worst_error`, with a soft cap that bites, on one rank."""
    *inputs, dout = draw((2, 48, 4, 16), (2, 48, 2, 16), (2, 48, 2, 8), (2, 48, 4, 8))
    answers = []
    for name in (kernel, "reference"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with emulate(misread):
            attend(*leaves, make_plan(48, kernel=name), SCALE, softcap=1.5).backward(dout)
        answers.append([leaf.grad for leaf in leaves])
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(*answers, strict=True))  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("kernel", EMULATED)
def test_half_precision_costs_its_roundings_and_no_more(kernel: str) -> None:
    assert 1e-4 < worst_error(kernel, dtype=torch.bfloat16) < 1.5e-2


@pytest.mark.parametrize("kernel", EMULATED)
def test_a_kernel_is_right_over_the_operators_as_they_are(kernel: str) -> None:
    assert worst_error(kernel) < 1e-12


# Where the causal order starts is no matter to a kernel that is given squares only, nor how heads are grouped to one
# that is given no groups.
OF_NO_MATTER = {
    ("cudnn", "causal from the bottom right"),
    ("efficient", "causal from the bottom right"),
    ("efficient", "heads are grouped interleaved"),
}
WRONG = [
    (kernel, misread)
    for kernel, misread in itertools.product(EMULATED, MISREADINGS)
    if misread.split(":")[0] in (kernel, misread)
    and (kernel, misread) not in OF_NO_MATTER
    and (kernel not in ("flash", "flash4") or not misread.startswith("causal"))  # whose causal order is a window
]


@pytest.mark.parametrize(("kernel", "misread"), WRONG)
def test_a_wrong_reading_of_the_sources_is_seen(kernel: str, misread: str) -> None:
    assert worst_error(kernel, misread) > 1e-3


@pytest.mark.parametrize(("kernel", "misread"), sorted(OF_NO_MATTER))
def test_what_the_sources_leave_open_is_of_no_matter_to_a_kernel(kernel: str, misread: str) -> None:
    assert worst_error(kernel, misread) < 1e-12


def test_there_are_more_than_ten_wrong_readings_of_each_kernel_or_of_all() -> None:
    assert {misread for _, misread in WRONG} == set(MISREADINGS) - {"causal from the bottom right"}
    assert len(MISREADINGS) > 10


def test_nothing_is_left_behind() -> None:
    before = dict(KERNELS)
    with emulate():
        assert all(KERNELS[name].device == "cpu" for name in EMULATED)
    assert before == KERNELS
    q, k, v, _ = qkv(8, 8)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        flash.forward(q, k, v, FULL, ScoreMod(SCALE))
    assert not any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU") for name in OPERATORS)
