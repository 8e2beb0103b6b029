"""The CPU flash kernel of aten. Its backward takes a merged out and log-sum-exp and is exact."""

import torch
from torch import Tensor

from torchtitan_cp.attention.kernels.kernel import Kernel

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _FORWARD(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = [x.transpose(1, 2) for x in (dout, q, k, v, out, lse)]
    dq, dk, dv = _BACKWARD(*rows, 0.0, causal, scale=scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def refusal(device: str, dtype: torch.dtype, qk_dim: int, v_dim: int) -> str | None:
    if device != "cpu":
        return f"it runs on cpu, not {device}"
    if dtype not in _DTYPES:
        return f"it does not take {dtype}"
    return None if qk_dim == v_dim else f"it needs Dqk == Dv, got {qk_dim} and {v_dim}"


KERNEL = Kernel(forward, backward, refusal)
