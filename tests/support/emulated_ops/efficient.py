"""`_scaled_dot_product_efficient_attention` and its backward: xFormers' CUTLASS kernels, as attention.cu calls them."""

import torch
import torch.nn.functional as F
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
    wide_dtype,
)

ALIGN_LSE = 32  # kAlignLSE of kernel_forward.h


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out `[B, H, Sq, Dv]` stored as `[B, Sq, H, Dv]`, lse `[B, H, Sq rounded up to 32]`, two states of dropout)."""
    check(attn_bias is None and dropout_p == 0, "the emulation has no such option")
    _check_inputs(query, key, value)
    seen = causal_pairs(query.shape[2], key.shape[2]) if is_causal else None  # CausalFromTopLeft
    out, lse = attend(query, key, value, seen, _scale(query, scale))
    # Of a row that sees nothing the maximum and the logarithm are both taken as 0; the padding holds inf.
    lse = torch.where(lse == float("-inf"), 0.0, lse)
    if not misreads("efficient: lse is not padded"):
        lse = F.pad(lse, (0, -lse.shape[-1] % ALIGN_LSE), value=float("inf"))
    if misreads("efficient: lse is [B, S, H]"):
        lse = lse.mT.contiguous().view(lse.shape)
    lse = lse if compute_log_sumexp else lse[..., :0]
    out = out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse, *(torch.zeros((), dtype=torch.int64) for _ in range(2))


def backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """(dq, dk, dv, None), stored as `[B, S, H, D]`."""
    check(attn_bias is None and dropout_p == 0 and not grad_input_mask[3], "the emulation has no such option")
    _check_inputs(query, key, value)
    batch, heads, queries, _ = query.shape
    v_dim, wide = value.shape[-1], wide_dtype(query.dtype)
    shape = (batch, heads, queries, v_dim)
    check(grad_out_.shape == shape == out.shape, f"grad_out and out must have shape {shape}")
    check(logsumexp.dtype == wide, f"logsumexp is read as {wide}")
    for dim, name in enumerate("BH"):
        check(logsumexp.shape[dim] <= 1 or logsumexp.stride(dim) % 8 == 0, f"LSE is misaligned (stride{name})")
    # Of out, o_strideB and o_strideH are the tensor's; o_strideM() is head_dim_value * num_heads.
    row = v_dim if misreads("efficient: rows of out are apart") else v_dim * heads
    out = at_strides(out, shape, (out.stride(0), out.stride(1), row, 1))
    row_dots = (grad_out_.to(wide) * out.to(wide)).sum(-1)
    # Queries come in blocks of 32: past the end q, dout and delta are 0, and the log-sum-exp is what lies there.
    padding = -queries % ALIGN_LSE
    if misreads("efficient: lse is not padded"):
        lse = packed(logsumexp, batch, heads, queries)
    elif misreads("efficient: lse is [B, S, H]"):
        lse = packed(logsumexp, batch, queries + padding, heads).mT[..., :queries]
    else:
        strides = (logsumexp.stride(0), logsumexp.stride(1), 1)
        lse = at_strides(logsumexp, (batch, heads, queries + padding), strides)
    lse = F.pad(lse, (0, queries + padding - lse.shape[-1]), value=float("inf"))
    q, dout = (F.pad(x, (0, 0, 0, padding)) for x in (query, grad_out_))
    seen = F.pad(causal_pairs(queries, key.shape[2]), (0, 0, 0, padding), value=True) if is_causal else None
    dq, dk, dv = differentiate(dout, q, key, value, F.pad(row_dots, (0, padding)), lse, seen, _scale(query, scale))
    gradients = (dq[:, :, :queries], dk, dv)
    dq, dk, dv = (x.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in gradients)
    return dq, dk, dv, None


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """attention.cu and attention_backward.cu, with check_supported of the kernels."""
    check(q.dim() == k.dim() == v.dim() == 4, "query.dim() == 4")
    check(q.is_floating_point() and k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype")
    check(len(q) == len(k) == len(v) and k.shape[2] == v.shape[2] and q.shape[-1] == k.shape[-1], "shapes differ")
    check(q.shape[1] == k.shape[1] == v.shape[1], "query.size(2) == key.size(2): grouped heads are not taken")
    check(q.shape[2] > 0 and k.shape[2] > 0, "Invalid value for `num_queries` or `num_keys`")
    # sdp_utils.cpp, check_head_dim_size_mem_efficient: 16 bytes.
    elements = 8 if q.element_size() == 2 else 4
    check(q.shape[-1] % elements == 0 and v.shape[-1] % elements == 0, f"head dims must be multiples of {elements}")
    check_rows(elements, query=q, key=k, value=v)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale
