"""The stand-in of flash-attn-4: windows, lengths, rows without keys and soft caps against torch's own maths."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.emulated_ops.flash4 import backward, forward
from tests.support.sdpa_inputs import SCALE, by_torch, draw, qkv

LENGTHS = [(24, 24), (24, 40), (40, 24), (33, 7)]
WINDOWS = [(None, None), (None, 0), (5, 3), (0, 0), (5, None), (None, 3), (100, 2), (-1, -1), (None, -2), (-2, None)]


def call(tensors: list[Tensor], window: tuple[int | None, int | None] = (None, None), **options: Any) -> list[Tensor]:
    """out, dq, dk, dv, lse of one call each way."""
    q, k, v, dout = tensors
    options |= {"window_size_left": window[0], "window_size_right": window[1], "softmax_scale": SCALE}
    out, lse, *_ = forward(q, k, v, return_lse=True, **options)
    assert lse is not None
    return [out, *backward(q, k, v, out, dout, lse, **options), lse]


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_is_aligned_at_the_last_query_and_key_and_only_none_or_two_negative_sides_are_unbounded(
    queries: int, keys: int, window: tuple[int | None, int | None]
) -> None:
    q, k, v, dout = qkv(queries, keys)
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - (keys - queries)
    seen, (left, right) = torch.ones_like(distance, dtype=torch.bool), window
    if window != (-1, -1):
        seen &= distance >= (-keys - queries if left is None else -left)
        seen &= distance <= (keys + queries if right is None else right)
    rows = seen.any(1)
    *got, lse = call([q, k, v, dout * rows[:, None, None]], window)
    assert_close(got, [x.nan_to_num(0) for x in by_torch([q, k, v, dout * rows[:, None, None]], attn_mask=seen)])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * SCALE
    torch.testing.assert_close(lse, scores.masked_fill(~seen, float("-inf")).logsumexp(-1))


def test_causal_is_a_right_side_of_zero_and_lse_is_the_natural_logarithm_by_head() -> None:
    tensors = qkv(24, 40)
    assert_close(call(tensors, causal=True), call(tensors, (None, 0)))
    assert call(tensors)[4].shape == (2, 4, 24)
    zero = [torch.zeros_like(x) for x in tensors]
    assert call(zero)[4].unique().item() == pytest.approx(torch.tensor(40.0).log().item())


PACKED = {
    "as many keys as queries": ((7, 1, 20, 4), (7, 1, 20, 4)),
    "more keys": ((3, 9), (12, 9)),
    "no queries, and no keys": ((5, 0, 4), (6, 3, 0)),
    "one query each": ((1, 1, 1), (4, 1, 6)),
}


def edges(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("window", [(None, None), (None, 0), (2, 1), (2, None)])
@pytest.mark.parametrize("lengths", PACKED)
def test_packed_sequences_equal_calls_of_their_own(lengths: str, window: tuple[int | None, int | None]) -> None:
    sides = PACKED[lengths]
    tensors = [x[0] for x in qkv(*map(sum, sides))]
    got = call(tensors, window, cu_seqlens_q=edges(sides[0]), cu_seqlens_k=edges(sides[1]))
    parts = []
    for rows, keys in zip(*(pairwise(edges(side).tolist()) for side in sides), strict=True):
        own = [x[None, slice(*span)] for x, span in zip(tensors, (rows, keys, keys, rows), strict=True)]
        out, dq, dk, dv, lse = (x[0] for x in call(own, window))
        parts.append((out, dq, dk, dv, lse.T))
    assert got[4].shape == (4, sum(sides[0]))
    assert_close([*got[:4], got[4].T], [torch.cat(x) for x in zip(*parts, strict=True)])


def test_of_a_sequence_the_rows_in_use_are_computed_and_the_window_is_aligned_at_their_last() -> None:
    tensors, used = [x[0] for x in qkv(20, 20)], torch.tensor([6, 9], dtype=torch.int32)
    lengths = {"cu_seqlens_q": edges((10, 10)), "cu_seqlens_k": edges((10, 10))}
    got = call(tensors, (3, 0), seqused_q=used, seqused_k=used, **lengths)
    for start, count in ((0, 6), (10, 9)):
        rows = slice(start, start + count)
        want = [x[0] for x in call([x[None, rows] for x in tensors], (3, 0))]
        assert_close([*(x[rows] for x in got[:4]), got[4][:, rows]], want)
    for x in got[:4]:
        assert x[6:10].isnan().all(), "what the package leaves as it was"


def test_a_soft_cap_is_applied_to_the_scaled_score_before_the_mask() -> None:
    q, k, v, dout = qkv(12, 12, (2, 2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = 1.5 * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", leaves[0], leaves[1]) * SCALE / 1.5)
    masked = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), float("-inf"))
    out = torch.einsum("bhqk,bkhd->bqhd", masked.softmax(-1), leaves[2])
    out.backward(dout)
    got = call([q, k, v, dout], (None, 0), softcap=1.5)
    assert_close(got, [out.detach(), *(leaf.grad for leaf in leaves), masked.detach().logsumexp(-1)])  # type: ignore[list-item]


def calls_that_are_refused() -> dict[str, tuple[Callable[[], Any], str]]:
    q, k, v, dout = tensors = qkv(24, 24)
    ends = edges((10, 14))
    narrow = [*tensors[:2], v[..., :8], dout[..., :8]]
    return {
        "head dim": (lambda: call([x[..., :12] for x in tensors]), "divisible by 8"),
        "wide head dim": (lambda: call(draw(*4 * [(1, 8, 2, 264)])), "between 8 and 256"),
        "heads": (lambda: call([q[:, :, :3], k, v, dout[:, :, :3]]), "num_head must be divisible by num_head_kv"),
        "dtypes": (lambda: call([q, k.float(), v, dout]), "same dtype"),
        "grouped heads of other values": (lambda: call(narrow), "GQA backward requires head_dim == head_dim_v"),
        "int64 lengths": (lambda: call([x[0] for x in tensors], cu_seqlens_q=ends.long()), "must be int32"),
        "lengths past the end": (
            lambda: call([x[0] for x in tensors], cu_seqlens_q=ends, cu_seqlens_k=ends + 1),
            "illegal memory access",
        ),
        "layout of the log-sum-exp": (
            lambda: backward(q, k, v, dout, dout, q[..., 0].contiguous(), SCALE),
            "lse must have shape",
        ),
    }


@pytest.mark.parametrize("name", calls_that_are_refused())
def test_what_the_package_refuses_is_refused(name: str) -> None:
    refused, message = calls_that_are_refused()[name]
    with pytest.raises(RuntimeError, match=message):
        refused()


def test_dims_of_values_may_be_others_where_heads_are_not_grouped() -> None:
    tensors = qkv(24, 24, (4, 4), (16, 8))
    assert_close(call(tensors)[:4], by_torch(tensors))
