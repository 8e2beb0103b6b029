"""The memory-efficient kernel on CUDA, which also supports fp32, through the aten op behind SDPA."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.kernels.kernel import HALF, WIDEST, Kernel, ScoreMod
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.tiles import FULL

_FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward
LSE_ROWS = 32  # the log-sum-exp is stored in whole blocks of 32 queries


def forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scores: ScoreMod) -> tuple[Tensor, Tensor]:
    copies = q.shape[2] // k.shape[2]
    rows = (q.transpose(1, 2), *(x.repeat_interleave(copies, 2).transpose(1, 2) for x in (k, v)))
    out, lse, *_ = _FORWARD(*rows, None, True, 0.0, band != FULL, scale=scores.scale)
    return out.transpose(1, 2), lse[..., : q.shape[1]].transpose(1, 2)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scores: ScoreMod
) -> tuple[Tensor, Tensor, Tensor]:
    heads = k.shape[2]
    k, v = (x.repeat_interleave(q.shape[2] // heads, 2) for x in (k, v))
    rows = [x.transpose(1, 2) for x in (dout, q, k, v)]
    # Without dropout the kernel never reads the random state, but the schema requires one.
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    lse = F.pad(lse.transpose(1, 2), (0, -q.shape[1] % LSE_ROWS)).contiguous()
    # The operator takes only the B and H strides of out, and assumes that its rows are contiguous.
    saved = (out.contiguous().transpose(1, 2), lse, seed, offset)
    dq, dk, dv, _ = _BACKWARD(*rows, None, *saved, 0.0, [True, True, True, False], band != FULL, scale=scores.scale)
    return dq.transpose(1, 2), _sum_copies(dk.transpose(1, 2), heads), _sum_copies(dv.transpose(1, 2), heads)


def _sum_copies(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of `heads` key heads from those of their copies, `[B, S, Hq, D] -> [B, S, Hkv, D]`, in fp32."""
    copies = gradient.shape[2] // heads
    if copies == 1:
        return gradient
    return gradient.unflatten(2, (heads, copies)).to(accumulation_dtype(gradient.dtype)).sum(3)


KERNEL = Kernel(forward, backward, "cuda", (*HALF, torch.float32), range(8, WIDEST, 8))
