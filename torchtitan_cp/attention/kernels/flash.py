"""FlashAttention-2 on CUDA, through the aten ops that take a window."""

import torch
from torch import Tensor

from torchtitan_cp.attention.kernels.kernel import HALF, Kernel, Scores, same_dims
from torchtitan_cp.attention.mask import Band

_FORWARD = torch.ops.aten._flash_attention_forward
_BACKWARD = torch.ops.aten._flash_attention_backward


def forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores) -> tuple[Tensor, Tensor]:
    q, k, v_padded = same_dims(q, k, v)
    window = _window(q.shape[1], k.shape[1], band)
    lengths = (None, None, q.shape[1], k.shape[1])  # not packed
    out, lse, *_ = _FORWARD(q, k, v_padded, *lengths, 0.0, False, False, scale=scores.scale, **window)
    return out[..., : v.shape[-1]], lse.transpose(1, 2)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    qk_dim, v_dim = q.shape[-1], v.shape[-1]
    q, k, v, dout, out = same_dims(q, k, v, dout, out)
    # Without dropout the kernel never reads the random state, but the schema requires one.
    seed, offset = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    lengths = (None, None, q.shape[1], k.shape[1])  # not packed
    window = _window(q.shape[1], k.shape[1], band)
    rows = (dout.contiguous(), q, k, v, out.contiguous(), lse.transpose(1, 2).contiguous())
    dq, dk, dv = _BACKWARD(*rows, *lengths, 0.0, False, seed, offset, scale=scores.scale, **window)
    return dq[..., :qk_dim], dk[..., :qk_dim], dv[..., :v_dim]


def _window(queries: int, keys: int, band: Band) -> dict[str, int]:
    """A band as the kernel's window, which is aligned at the last query and the last key."""
    corner = keys - queries
    return {
        "window_size_left": -1 if band.low is None else corner - band.low,
        "window_size_right": -1 if band.high is None else band.high - corner,
    }


def takes_band(queries: int, keys: int, band: Band) -> bool:
    """Whether the kernel computes this band correctly.

    It treats a side that is negative or at least as long as the keys as unbounded. Beside a bounded left side,
    it treats an unbounded right side as long as the keys, which is too short if there are more queries than keys.
    """
    window = _window(queries, keys, band)
    left, right = window["window_size_left"], window["window_size_right"]
    if band.high is None:
        return band.low is None or left >= keys or queries <= keys + 1
    return 0 <= right < keys and (band.low is None or left >= 0)


KERNEL = Kernel(forward, backward, "cuda", HALF, range(8, 257, 8), pads_dims=True, takes_band=takes_band)
