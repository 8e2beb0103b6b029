"""`_flash_attn_fwd` and `_flash_attn_bwd` of flash-attn-4 (4.0.0b36) on Hopper: flash_attn/cute/interface.py.

Read beside it: mask.py, block_info.py and seqlen_info.py (windows and lengths), softmax.py (rows that see no key),
flash_bwd_preprocess.py (the log-sum-exp of the backward) and flash_bwd_sm90.py (grouped heads), all of flash_attn/cute.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.emulated_ops.maths import (
    attend,
    check,
    differentiate,
    misreads,
    packed,
    sum_copies,
    wide_dtype,
)

HOPPER = 90


class _Sequence(NamedTuple):
    """Rows of one sequence: (batch row or 0, slice) of queries and of keys."""

    row: int
    queries: slice
    keys: slice


class _Options(NamedTuple):
    """Sides of the window, of which None is unbounded, and how a product becomes a score."""

    left: int | None
    right: int | None
    scale: float
    softcap: float


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None, None, None, None]:
    """(out, lse `[B, Hq, Sq]`, or `[Hq, T]` of packed sequences, and three that other models have)."""
    _check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k)
    options = _options(q, softmax_scale, causal, softcap, window_size_left, window_size_right)
    out = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=q.dtype)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), float("nan"), dtype=wide_dtype(q.dtype))
    if not q.numel() or not k.numel():
        return out.zero_(), lse.fill_(float("-inf")) if return_lse else None, None, None, None
    for row, queries, keys in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        # A row that sees no key has out 0 and lse -inf (softmax.py, finalize).
        part, part_lse = _attend(_rows(q, row, queries), _rows(k, row, keys), _rows(v, row, keys), options)
        _rows(out, row, queries).copy_(part)
        (lse if lse.ndim == 2 else lse[row])[:, queries] = part_lse
    if misreads("flash4: lse is [B, S, H]" if cu_seqlens_q is None else "flash4: lse of varlen is [T, H]"):
        lse = lse.mT.contiguous().view(lse.shape)
    return out, lse if return_lse else None, None, None, None


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the shapes and dtype of q, k and v."""
    _check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k)
    grouped = q.shape[-2] != k.shape[-2]
    check(not grouped or q.shape[-1] == v.shape[-1], "GQA backward requires head_dim == head_dim_v")
    wide, shape = wide_dtype(q.dtype), (*q.shape[:-1], v.shape[-1])
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    check(out.shape == shape == dout.shape and out.dtype == q.dtype == dout.dtype, "out.shape == dout.shape")
    check(lse.shape == lse_shape and lse.dtype == wide, "lse must have shape (batch_size, num_head, seqlen_q)")
    dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    if misreads("flash4: backward takes dout before out"):
        out, dout = dout, out
    if misreads("flash4: lse is [B, S, H]" if cu_seqlens_q is None else "flash4: lse of varlen is [T, H]"):
        lse = packed(lse, *lse_shape[:-2], lse_shape[-1], lse_shape[-2]).mT
    options = _options(q, softmax_scale, causal, softcap, window_size_left, window_size_right)
    for row, queries, keys in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        inputs = [_rows(dout, row, queries), _rows(q, row, queries), _rows(k, row, keys), _rows(v, row, keys)]
        own = _attend(*inputs[1:], options)[0] if misreads("flash4: backward uses the out of its own call") else None
        dots = (inputs[0].to(wide) * (_rows(out, row, queries) if own is None else own).to(wide)).sum(-1)
        seen = visible(len(inputs[1]), len(inputs[2]), options)
        tensors = [x.transpose(0, 1)[None] for x in (*inputs, dots)]
        part_lse = (lse if lse.ndim == 2 else lse[row])[None, :, queries]
        gradients = differentiate(*tensors, part_lse, seen, options.scale, options.softcap)
        # Gradients of grouped heads are summed in fp32 (dk_accum, dv_accum).
        parts = (gradients[0], *(sum_copies(x, k.shape[-2]) for x in gradients[1:]))
        for whole, rows, part in zip((dq, dk, dv), (queries, keys, keys), parts, strict=True):
            _rows(whole, row, rows).copy_(part[0].transpose(0, 1))
    if misreads("flash4: backward gives dv before dk"):
        dk, dv = dv, dk
    return dq, dk, dv


INTERFACE = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward, _get_device_arch=lambda: HOPPER)


def visible(queries: int, keys: int, options: _Options) -> Tensor:
    """`[Sq, Sk]`, from the last query and the last key (mask.py, causal_row_offset); a side of None is unbounded."""
    corner = 0 if misreads("flash4: window from the top left") else keys - queries
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - corner
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if options.left is not None:
        seen &= distance >= -options.left - misreads("flash4: left side of the window one too wide")
    if options.right is not None:
        seen &= distance <= options.right + misreads("flash4: right side of the window one too wide")
    return seen


def _attend(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """out `[Sq, Hq, Dv]` and lse `[Hq, Sq]` of one sequence."""
    if not len(k):
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full((q.shape[1], len(q)), float("-inf"))
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = attend(*rows, visible(len(q), len(k), options), options.scale, options.softcap)
    return out[0].transpose(0, 1), lse[0]


def _options(
    q: Tensor, scale: float | None, causal: bool, softcap: float | None, left: int | None, right: int | None
) -> _Options:
    """_resolve_causal_local_window: causal is a right side of 0; two negative sides are unbounded, one is a bound."""
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    if misreads("flash4: the sides of the window change places"):
        left, right = right, left
    return _Options(left, 0 if causal else right, q.shape[-1] ** -0.5 if scale is None else scale, softcap or 0.0)


def _sequences(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
) -> list[_Sequence]:
    """Each sequence's rows; of a sequence whose first rows are used, only these, which the window is aligned at."""
    if misreads("flash4: cu_seqlens of queries and keys change places"):
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_k, cu_seqlens_q
    sides = [_spans(*side) for side in ((q, cu_seqlens_q, seqused_q), (k, cu_seqlens_k, seqused_k))]
    rows = range(len(q)) if cu_seqlens_q is None else [0] * len(sides[0])
    return [_Sequence(row, *spans) for row, *spans in zip(rows, *sides, strict=True)]


def _spans(x: Tensor, cumulative: Tensor | None, used: Tensor | None) -> list[slice]:
    if cumulative is None:
        spans = [(0, x.shape[1])] * len(x)
    else:
        # What leaves the tensor would be an illegal access; a wrong reading is to give wrong numbers instead.
        edges = cumulative.tolist()
        if misreads("flash4: cu_seqlens of queries and keys change places"):
            edges = [min(edge, len(x)) for edge in edges]
        check(edges[-1] <= len(x), f"an illegal memory access was encountered: {edges} in {len(x)} rows")
        spans = list(pairwise(edges))
    lengths = [stop - start for start, stop in spans] if used is None else used.tolist()
    return [slice(start, start + length) for (start, _), length in zip(spans, lengths, strict=True)]


def _rows(x: Tensor, row: int, span: slice) -> Tensor:
    """`[n, H, D]` rows of one sequence, as a view."""
    return x[span] if x.ndim == 3 else x[row, span]


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    """The assertions at the heads of the two functions. Strides are no matter: what does not fit is copied."""
    check(q.is_floating_point() and k.dtype == v.dtype == q.dtype, "inputs must have the same dtype")
    for x, cumulative in ((q, cu_seqlens_q), (k, cu_seqlens_k)):
        check(x.ndim == (4 if cumulative is None else 3), "dense inputs are 4-D, packed ones 3-D")
        if cumulative is not None:
            check(cumulative.dtype == torch.int32, "cu_seqlens_q, cu_seqlens_k must be int32")
            check(cumulative.stride(0) == 1, "cu_seqlens_q, cu_seqlens_k must be contiguous")
    check(cu_seqlens_q is None or cu_seqlens_k is None or len(cu_seqlens_q) == len(cu_seqlens_k), "(batch_size + 1,)")
    check(k.shape[:-1] == v.shape[:-1] and k.shape[-1] == q.shape[-1], "k.shape == (.., num_head_kv, head_dim)")
    check(q.shape[-2] % k.shape[-2] == 0, "num_head must be divisible by num_head_kv")
    dims = (q.shape[-1], v.shape[-1])
    check(all(dim in range(8, 257, 8) for dim in dims), "must be between 8 and 256 and divisible by 8")
