"""The CPU flash kernel of aten. Its backward takes a merged out and log-sum-exp and is exact."""

import torch
from torch import Tensor

from torchtitan_cp.attention.kernels.heads import same_dims
from torchtitan_cp.attention.kernels.kernel import Case, Kernel
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.tiles import FULL

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v_padded = same_dims(q, k, v)
    rows = [x.transpose(1, 2) for x in (q, k, v_padded)]
    out, lse = _FORWARD(*rows, 0.0, band != FULL, scale=scale)
    return out.transpose(1, 2)[..., : v.shape[-1]], lse.transpose(1, 2)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    qk_dim, v_dim = q.shape[-1], v.shape[-1]
    q, k, v, dout, out = same_dims(q, k, v, dout, out)
    rows = [x.transpose(1, 2) for x in (dout, q, k, v, out, lse)]
    dq, dk, dv = (x.transpose(1, 2) for x in _BACKWARD(*rows, 0.0, band != FULL, scale=scale))
    return dq[..., :qk_dim], dk[..., :qk_dim], dv[..., :v_dim]


def refusal(case: Case) -> str | None:
    if case.device != "cpu":
        return f"it runs on cpu, not {case.device}"
    return None if case.dtype in _DTYPES else f"it does not take {case.dtype}"


def forward_wide(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    """In the accumulation dtype: as fast as bf16, where the backward would be a third slower."""
    dtype = accumulation_dtype(q.dtype)
    return forward(q.to(dtype), k.to(dtype), v.to(dtype), band, scale)


KERNEL = Kernel(forward, backward, refusal, merging=Kernel(forward_wide, backward, refusal))
