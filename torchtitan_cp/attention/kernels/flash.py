"""FlashAttention-2 on CUDA, through the aten op behind scaled_dot_product_attention."""

import torch
from torch import Tensor

from torchtitan_cp.attention.kernels.kernel import Kernel

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse, *_ = _FORWARD(*rows, 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    # Without dropout the kernel never reads the random state, but the schema wants one.
    seed, offset = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    packed = (None, None, q.shape[1], k.shape[1])
    lse = lse.transpose(1, 2).contiguous()
    dq, dk, dv = _BACKWARD(*rows, lse, *packed, 0.0, causal, seed, offset, scale=scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def refusal(device: str, dtype: torch.dtype, qk_dim: int, v_dim: int) -> str | None:
    if device != "cuda":
        return f"it runs on cuda, not {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {dtype}"
    if qk_dim != v_dim:
        return f"it needs Dqk == Dv, got {qk_dim} and {v_dim}"
    return None if qk_dim <= 256 and qk_dim % 8 == 0 else f"it takes head dims up to 256 in eights, not {qk_dim}"


KERNEL = Kernel(forward, backward, refusal)
