"""`_scaled_dot_product_cudnn_attention` and its backward: run_cudnn_SDP_fprop and run_cudnn_SDP_bprop of MHA.cpp."""

from typing import Any

import torch
from torch import Tensor

from tests.support.emulated_ops.maths import (
    at_strides,
    attend,
    causal_pairs,
    check,
    check_rows,
    differentiate,
    misreads,
    packed,
    sum_copies,
    wide_dtype,
)

# The plans of backwards that were built. Until pull request 191576 of PyTorch the key (MHAParams) has the sizes and
# strides of q, k and v, not the strides of out and dout, which the plan was built with and reads by ever after.
PLANS: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(out in the layout of query, lse `[B, H, Sq, 1]`, ..) of `[B, H, S, D]`; grouped heads are taken as they are."""
    check(attn_bias is None and dropout_p == 0 and not return_debug_mask, "the emulation has no such option")
    _check_inputs(query, key, value)
    seen = causal_pairs(query.shape[2], key.shape[2]) if is_causal else None  # CausalMask::TOP_LEFT
    result, lse = attend(query, key, value, seen, _scale(query, scale))
    out = _like(query, value.shape[-1]).copy_(result)
    lse = lse.unsqueeze(-1).contiguous()
    if misreads("cudnn: lse is [B, S, H, 1]"):
        lse = lse.transpose(1, 2).contiguous().view(lse.shape)
    state = torch.zeros((), dtype=torch.int64)
    return out, lse if compute_log_sumexp else None, None, None, query.shape[2], key.shape[2], state, state, None


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each in the layout of its input."""
    check(attn_bias is None and dropout_p == 0 and cum_seq_q is None is cum_seq_k, "the emulation has no such option")
    _check_inputs(query, key, value)
    batch, heads, queries, _ = query.shape
    check((max_q, max_k) == (queries, key.shape[2]), "s_q and s_kv are the sizes of dense inputs")
    wide, shape = wide_dtype(query.dtype), (batch, heads, queries, value.shape[-1])
    for name, x in (("O", out), ("dO", grad_out)):
        check(x.shape == shape and x.dtype == query.dtype, f"{name} must have shape {shape} and the dtype of Q")
    check(logsumexp.shape == (*shape[:3], 1) and logsumexp.dtype == wide, f"Stats must be [B, H, S, 1] in {wide}")
    if grad_out.stride(-1) != 1:
        grad_out = _like(out, shape[-1]).copy_(grad_out)  # permute_to_matching_layout
    key_of_plan = (query.dtype, *((x.shape, x.stride()) for x in (query, key, value)), is_causal)
    out_strides, dout_strides = PLANS.setdefault(key_of_plan, (out.stride(), grad_out.stride()))
    out, grad_out = at_strides(out, shape, out_strides), at_strides(grad_out, shape, dout_strides)
    # cuDNN before 9.26 reads Stats as packed [B, H, S, 1] on some devices, whatever its strides (cudnn-frontend 304).
    lse = packed(logsumexp, *shape[:3])
    if misreads("cudnn: lse is [B, S, H, 1]"):
        lse = packed(logsumexp, batch, queries, heads).mT
    row_dots = (grad_out.to(wide) * out.to(wide)).sum(-1)
    seen = causal_pairs(queries, max_k) if is_causal else None
    dq, dk, dv = differentiate(grad_out, query, key, value, row_dots, lse, seen, _scale(query, scale))
    dk, dv = (sum_copies(x, key.shape[1]) for x in (dk, dv))
    pairs = ((query, dq), (key, dk), (value, dv))
    return tuple(_like(x, x.shape[-1]).copy_(gradient) for x, gradient in pairs)  # type: ignore[return-value]


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """sdp_utils.cpp, check_cudnn_tensor_shapes, which a direct call of the operator meets as errors of cuDNN."""
    check(q.dim() == k.dim() == v.dim() == 4, "Q tensor has unexpected number of dims")
    check(q.is_floating_point() and k.dtype == v.dtype == q.dtype, "Q, K and V must have the same dtype")
    check(len(q) == len(k) == len(v) and k.shape[1:3] == v.shape[1:3] and q.shape[-1] == k.shape[-1], "shapes differ")
    check(q.shape[1] % k.shape[1] == 0, "the number of heads of K must divide that of Q")
    check(max(q.shape[-1], v.shape[-1]) <= 128, "head_dim should be no more than 128")  # of sm80; 256 on sm90
    check(q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0, "head_dim should be a multiple of 8")
    check_rows(8, query=q, key=k, value=v)  # cuDNN faults on a base that is not aligned to 16 bytes
    check(k.shape[2] > 1, "cudnn SDPA does not support key/value sequence length 1.")
    # A backward of one query fails (issue 138529 of PyTorch), and newer revisions refuse its forward on some devices.
    check(q.shape[2] > 1, "cuDNN Frontend error: no valid execution plans built for query sequence length 1")


def _like(x: Tensor, dim: int) -> Tensor:
    """Empty memory with the dims of `x` in the same order, and rows of `dim` (alloc_with_matching_layout)."""
    if dim == x.shape[-1]:
        return torch.empty_like(x)
    order = sorted(range(x.dim()), key=lambda axis: x.stride(axis), reverse=True)
    return torch.empty_permuted((*x.shape[:-1], dim), order, dtype=x.dtype)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale
