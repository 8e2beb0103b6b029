"""cuDNN's fused attention on CUDA, through the aten op behind scaled_dot_product_attention.

It does not support a single key nor, in its backward, a single query (pytorch issue 138529): such tiles go to flash.
"""

import os

import torch
from torch import Tensor

from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.kernels import flash
from torchtitan_cp.attention.kernels.kernel import HALF, Kernel, ScoreMod
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.tiles import FULL

_FORWARD = torch.ops.aten._scaled_dot_product_cudnn_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
OTHER_LSE_LAYOUT = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"


def forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scores: ScoreMod) -> tuple[Tensor, Tensor]:
    if 1 in (q.shape[1], k.shape[1]):
        return flash.forward(q, k, v, band, scores)
    if os.environ.get(OTHER_LSE_LAYOUT) == "1":
        raise PlanError(
            f"{OTHER_LSE_LAYOUT} = 1 changes the layout of cuDNN's log-sum-exp: gradients would be wrong",
            fix="unset it, or use kernel = 'flash'",
        )
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse, *_ = _FORWARD(*rows, None, True, 0.0, band != FULL, False, scale=scores.scale)
    # The log-sum-exp comes as [B, H, Sq, 1].
    return out.transpose(1, 2), lse.reshape(out.shape[:3]).transpose(1, 2)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scores: ScoreMod
) -> tuple[Tensor, Tensor, Tensor]:
    if 1 in (q.shape[1], k.shape[1]):
        return flash.backward(dout, q, k, v, out, lse, band, scores)
    # Older versions of torch ignore the strides of dout and out when they look up a plan.
    rows = [x.transpose(1, 2) for x in (dout.contiguous(), q, k, v, out.contiguous())]
    # Without dropout the kernel never reads the random state, but the schema requires one.
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    packed = (None, None, q.shape[1], k.shape[1])
    lse = lse.transpose(1, 2).unsqueeze(-1).contiguous()
    dq, dk, dv = _BACKWARD(*rows, lse, seed, offset, None, *packed, 0.0, band != FULL, scale=scores.scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


# torch does not choose cuDNN in deterministic runs, but a direct call raises no error (sdp_utils.cpp,
# attention_backward.cu).
KERNEL = Kernel(forward, backward, "cuda", HALF, range(8, 129, 8), deterministic=False)
