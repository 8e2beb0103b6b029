"""FlashAttention-2 on CUDA, through the aten ops that take a window, and many tiles in one call.

Packed rows are `[T, H, D]`, with int32 lengths; the log-sum-exp is `[H, T]`. A window is aligned at the last query and
key of each tile, but its sides are compared with the keys of the longest tile. Source: mha_varlen_fwd and
mha_varlen_bwd of ATen's flash_api.cpp.
"""

from typing import cast

import torch
from torch import Tensor

from torchtitan_cp.attention.kernels.kernel import HALF, Kernel, ScoreMod, same_dims
from torchtitan_cp.attention.kernels.packed import Packed
from torchtitan_cp.attention.mask import Band

_FORWARD = torch.ops.aten._flash_attention_forward
_BACKWARD = torch.ops.aten._flash_attention_backward


def forward(q: Tensor, k: Tensor, v: Tensor, shape: Band | Packed, scores: ScoreMod) -> tuple[Tensor, Tensor]:
    q, k, v_padded = same_dims(q, k, v)
    lengths, window = _arguments(q, k, shape)
    out, lse, *_ = _FORWARD(q, k, v_padded, *lengths, 0.0, False, False, scale=scores.scale, **window)
    return out[..., : v.shape[-1]], lse.mT


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: Band | Packed, scores: ScoreMod
) -> tuple[Tensor, Tensor, Tensor]:
    qk_dim, v_dim = q.shape[-1], v.shape[-1]
    q, k, v, dout, out = same_dims(q, k, v, dout, out)
    # Without dropout the kernel never reads the random state, but the schema requires one.
    seed, offset = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    lengths, window = _arguments(q, k, shape)
    rows = (dout.contiguous(), q, k, v, out.contiguous(), lse.mT.contiguous())
    dq, dk, dv = _BACKWARD(*rows, *lengths, 0.0, False, seed, offset, scale=scores.scale, **window)
    return dq[..., :qk_dim], dk[..., :qk_dim], dv[..., :v_dim]


def _arguments(q: Tensor, k: Tensor, shape: Band | Packed) -> tuple[tuple[Tensor | int | None, ...], dict[str, int]]:
    """The (lengths, window) of a single tile, whose rows have a batch dim, or of packed tiles."""
    lengths: tuple[Tensor | int | None, ...] = (None, None, q.shape[1], k.shape[1])
    if isinstance(shape, Packed):
        lengths, (left, right) = shape[1:], cast(tuple[int, int], shape.kind)
    else:
        left, right = _window(q.shape[1], k.shape[1], shape)
    return lengths, {"window_size_left": left, "window_size_right": right}


def _window(queries: int, keys: int, band: Band) -> tuple[int, int]:
    """A band as the kernel's (left, right) window, which is aligned at the last query and the last key."""
    corner = keys - queries
    return -1 if band.low is None else corner - band.low, -1 if band.high is None else band.high - corner


def takes_band(queries: int, keys: int, band: Band) -> bool:
    """Whether the kernel computes this band correctly.

    It takes a side that is negative, or at least as long as the keys, for unbounded. If only the right side is
    unbounded, it makes that side as long as the keys, which is too short if there are more queries than keys.
    """
    left, right = _window(queries, keys, band)
    if band.high is None:
        return band.low is None or left >= keys or queries <= keys + 1
    return 0 <= right < keys and (band.low is None or left >= 0)


def kind(queries: int, keys: int, band: Band) -> tuple[int, int]:
    """The window of a tile. A left side that hides nothing in this tile is dropped: it might in longer ones."""
    low = Band(band.low).shifted(0, queries, keys).low
    return _window(queries, keys, band._replace(low=low))


KERNEL = Kernel(forward, backward, "cuda", HALF, range(8, 257, 8), pads_dims=True, takes_band=takes_band, kind=kind)
