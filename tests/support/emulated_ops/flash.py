"""`_flash_attention_forward` and `_backward`: FlashAttention-2's mha_fwd and mha_bwd, dense and varlen."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.emulated_ops.maths import (
    attend,
    check,
    check_rows,
    differentiate,
    misreads,
    packed,
    sum_copies,
    wide_dtype,
)

Gradients = tuple[Tensor, Tensor, Tensor]


class _Options(NamedTuple):
    """What the functions below share.

    Attributes:
        max_q, max_k: of the sequences; the lengths themselves if not packed.
        left, right: sides of the window; negative is unbounded.
    """

    max_q: int
    max_k: int
    left: int
    right: int
    scale: float


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out as the query, lse `[B, Hq, Sq]`, or `[Hq, T]` for packed sequences, two states of dropout, a debug mask."""
    check(dropout_p == 0 and not return_debug_mask, "the emulation has no dropout")
    check(seqused_k is None and alibi_slopes is None and block_table is None, "the emulation has no such option")
    _check_inputs(query, key, value, cum_seq_q, cum_seq_k)
    lengths = _lengths(query, key, cum_seq_q, max_q, max_k)
    options = _options(query, lengths, is_causal, scale, window_size_left, window_size_right)
    wide = wide_dtype(query.dtype)
    if cum_seq_q is None or cum_seq_k is None:
        out, lse = _attend(query, key, value, options)
    else:
        # A block of queries writes its own rows and no other, and there are blocks for max_q rows (flash_fwd_kernel.h).
        out, lse = torch.full_like(query, float("nan")), query.new_full(query.shape[1::-1], float("nan"), dtype=wide)
        if max_q == 1 and query.shape[1] > key.shape[1] and options.left < 0 and options.right < 0:
            # mha_varlen_fwd then turns query heads into rows, q.reshape({batch_size, ..}), and forgets cum_seq_q.
            sequences = len(cum_seq_q) - 1
            check(len(query) == sequences, f"shape '[{sequences}, ..]' is invalid for max_q = 1 and {len(query)} rows")
        for rows, keys in zip(_spans(cum_seq_q, len(query)), _spans(cum_seq_k, len(key)), strict=True):
            part_out, part_lse = _attend(query[None, rows], key[None, keys], value[None, keys], options)
            written = slice(rows.start, min(rows.stop, rows.start + options.max_q))
            count = written.stop - written.start
            out[written], lse[:, written] = part_out[0, :count], part_lse[0, :, :count]
    if misreads("flash: lse is [B, S, H]" if cum_seq_q is None else "flash: lse of varlen is [T, H]"):
        lse = lse.mT.contiguous().view(lse.shape)
    state = torch.empty(2, dtype=torch.uint64)
    return out, lse, state, torch.empty((), dtype=torch.uint64), query.new_empty(0)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Gradients:
    """(dq, dk, dv) in the shapes and dtype of query, key and value."""
    check(dropout_p == 0, "the emulation has no dropout")
    _check_inputs(query, key, value, cum_seq_q, cum_seq_k)
    for name, x in (("out", out), ("dout", grad_out)):
        check(x.dtype == query.dtype, f"query and {name} must have the same dtype")
        check(x.shape == query.shape, f"{name} must have shape {tuple(query.shape)}")
    lengths = _lengths(query, key, cum_seq_q, max_q, max_k)
    options = _options(query, lengths, is_causal, scale, window_size_left, window_size_right)
    wide = wide_dtype(query.dtype)
    check(logsumexp.dtype == wide, f"softmax_lse is read as {wide}")  # softmax_lse.data_ptr(), whatever it holds
    # attention_backward.cu makes dout and out contiguous; the log-sum-exp is read from its pointer alone.
    row_dots = (grad_out.to(wide) * out.to(wide)).sum(-1)
    if cum_seq_q is None or cum_seq_k is None:
        heads, queries = query.shape[2], query.shape[1]
        lse = packed(logsumexp, len(query), heads, queries)
        if misreads("flash: lse is [B, S, H]"):
            lse = packed(logsumexp, len(query), queries, heads).mT
        return _differentiate(grad_out, query, key, value, row_dots, lse, options)
    lse = packed(logsumexp, query.shape[1], len(query))
    if misreads("flash: lse of varlen is [T, H]"):
        lse = packed(logsumexp, len(query), query.shape[1]).T
    dq, dk, dv = gradients = [torch.full_like(x, float("nan")) for x in (query, key, value)]
    for rows, keys in zip(_spans(cum_seq_q, len(query)), _spans(cum_seq_k, len(key)), strict=True):
        # Products of dout and out are made for max_q rows (flash_bwd_preprocess_kernel.h), gradients of max_k keys.
        dots = row_dots[rows].clone()
        dots[options.max_q :] = float("nan")
        kept = slice(keys.start, min(keys.stop, keys.start + options.max_k))
        inputs = (grad_out[None, rows], query[None, rows], key[None, kept], value[None, kept], dots[None])
        whole = _differentiate(*inputs, lse[None, :, rows], options, keys.stop - keys.start)
        for gradient, span, part in zip(gradients, (rows, kept, kept), whole, strict=True):
            gradient[span] = part[0]
    return dq, dk, dv


def visible(queries: int, keys: int, options: _Options) -> Tensor | None:
    """`[Sq, Sk]`, from the last query and the last key (mask.h: row_idx + max_seqlen_k - max_seqlen_q)."""
    left, right = options.left, options.right
    if left < 0 and right < 0:
        return None
    # set_params_fprop: an unbounded side beside a bounded one becomes as long as the (longest) keys, and no longer.
    left, right = options.max_k if left < 0 else left, options.max_k if right < 0 else right
    right += misreads("flash: right side of the window one too wide")
    left -= misreads("flash: left side of the window one too narrow")
    corner = 0 if misreads("flash: window from the top left") else keys - queries
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - corner
    return (distance >= -left) & (distance <= right)


def _attend(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """out `[B, Sq, Hq, D]` and lse `[B, Hq, Sq]`; without a key 0 and inf (softmax.h, normalize_softmax_lse)."""
    seen = visible(q.shape[1], k.shape[1], options)
    if k.shape[1] == 0:
        return torch.zeros_like(q), q.new_full(
            (len(q), q.shape[2], q.shape[1]), float("inf"), dtype=wide_dtype(q.dtype)
        )
    out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), seen, options.scale)
    return out.transpose(1, 2).to(q.dtype).contiguous(), torch.where(lse == float("-inf"), float("inf"), lse)


def _differentiate(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, row_dots: Tensor, lse: Tensor, options: _Options, keys: int = -1
) -> Gradients:
    """Gradients of `[B, S, H, D]`, from row_dots `[B, Sq, Hq]` and lse `[B, Hq, Sq]`.

    Args:
        keys: how many there are, if not as many as given.
    """
    seen = visible(q.shape[1], k.shape[1] if keys < 0 else keys, options)
    seen = None if seen is None else seen[:, : k.shape[1]]
    rows = [x.transpose(1, 2) for x in (dout, q, k, v, row_dots)]
    dq, dk, dv = differentiate(*rows, lse, seen, options.scale)
    # dk_expanded and dv_expanded, one for each query head, are in the inputs' dtype before they are summed.
    dk, dv = (sum_copies(x.to(k.dtype), k.shape[2]) for x in (dk, dv))
    return tuple(x.transpose(1, 2).to(q.dtype).contiguous() for x in (dq, dk, dv))  # type: ignore[return-value]


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None) -> None:
    """The checks at the head of the four functions of flash_api.cpp."""
    check((cum_seq_q is None) == (cum_seq_k is None), "cum_seq_q and cum_seq_k must be both set or both not set")
    check(q.is_floating_point() and k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype")
    check(q.dim() == k.dim() == v.dim() == (4 if cum_seq_q is None else 3), "dense inputs are 4-D, packed ones 3-D")
    dim, heads, key_heads = q.shape[-1], q.shape[-2], k.shape[-2]
    check(dim % 8 == 0, "head_size must be a multiple of 8, this is ensured by padding!")
    check(dim <= 256, "FlashAttention only supports head dimension at most 256")
    check(heads % key_heads == 0, "Number of heads in key/value must divide number of heads in query")
    check_rows(8, query=q, key=k, value=v)
    check(k.shape[-1] == dim and v.shape == k.shape, f"k and v must have shape (.., {key_heads}, {dim})")
    if cum_seq_q is None or cum_seq_k is None:
        check(len(q) == len(k) > 0, "batch size must be positive, and the same")
        return
    check(cum_seq_q.shape == cum_seq_k.shape, "cu_seqlens_k must have shape (batch_size + 1)")
    for name, cumulative in (("cu_seqlens_q", cum_seq_q), ("cu_seqlens_k", cum_seq_k)):
        check(cumulative.dtype == torch.int32, f"{name} must have dtype int32")
        check(cumulative.device == q.device, f"{name} must be on CUDA")
        check(cumulative.is_contiguous(), f"{name} must be contiguous")
        check(len(cumulative) > 1, "batch size must be positive")


def _lengths(q: Tensor, k: Tensor, cum_seq_q: Tensor | None, max_q: int, max_k: int) -> tuple[int, int]:
    """(seqlen_q, seqlen_k): of dense inputs their own, whatever max_q and max_k say."""
    if cum_seq_q is None:
        return q.shape[1], k.shape[1]
    return max_q - misreads("flash: max_q one too small"), max_k


def _options(
    q: Tensor, lengths: tuple[int, int], causal: bool, scale: float | None, left: int | None, right: int | None
) -> _Options:
    """mha_fwd: a side as long as the keys or longer is unbounded; causal means right = 0, but of one query nothing."""
    left, right = (-1 if side is None or side >= lengths[1] else side for side in (left, right))
    if causal and lengths[0] > 1:
        right = 0
    return _Options(*lengths, left, right, q.shape[-1] ** -0.5 if scale is None else scale)


def _spans(cumulative: Tensor, total: int) -> list[slice]:
    """The sequences' rows. The kernels read cu_seqlens unchecked; what leaves the tensor would be an illegal access."""
    edges = cumulative.tolist()
    if misreads("flash: cu_seqlens one too far"):
        edges = [edges[0], *(min(edge + 1, total) for edge in edges[1:])]
    check(edges[0] >= 0 and edges[-1] <= total, f"an illegal memory access was encountered: {edges} in {total} rows")
    return [slice(*edge) for edge in pairwise(edges)]
