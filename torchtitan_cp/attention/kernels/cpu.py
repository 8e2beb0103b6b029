"""ATen's flash kernel for CPUs. Its backward takes a merged out and log-sum-exp, and is exact."""

import torch
from torch import Tensor

from torchtitan_cp.attention.kernels.kernel import Kernel, ScoreMod, same_dims
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.tiles import FULL

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scores: ScoreMod) -> tuple[Tensor, Tensor]:
    """Compute in the accumulation dtype: as fast as bf16, and not rounded before the merge.

    The backward keeps the inputs' dtype, as it would be slower.
    """
    dtype = accumulation_dtype(q.dtype)
    q, k, v_padded = same_dims(q.to(dtype), k.to(dtype), v.to(dtype))
    rows = [x.transpose(1, 2) for x in (q, k, v_padded)]
    out, lse = _FORWARD(*rows, 0.0, band != FULL, scale=scores.scale)
    return out.transpose(1, 2)[..., : v.shape[-1]], lse.transpose(1, 2)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scores: ScoreMod
) -> tuple[Tensor, Tensor, Tensor]:
    qk_dim, v_dim = q.shape[-1], v.shape[-1]
    q, k, v, dout, out = same_dims(q, k, v, dout, out)
    rows = [x.transpose(1, 2) for x in (dout, q, k, v, out, lse)]
    dq, dk, dv = (x.transpose(1, 2) for x in _BACKWARD(*rows, 0.0, band != FULL, scale=scores.scale))
    return dq[..., :qk_dim], dk[..., :qk_dim], dv[..., :v_dim]


KERNEL = Kernel(forward, backward, "cpu")
