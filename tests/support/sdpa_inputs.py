"""Inputs of one attention call, and torch's own maths on them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SCALE = 0.3


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def qkv(queries: int, keys: int, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (16, 16)) -> list[Tensor]:
    """q, k, v, dout in `[B, S, H, D]`."""
    (hq, hkv), (qk, v) = heads, dims
    return draw((2, queries, hq, qk), (2, keys, hkv, qk), (2, keys, hkv, v), (2, queries, hq, v))


def by_torch(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """out, dq, dk, dv of scaled_dot_product_attention's maths, `[B, S, H, D]`."""
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    with sdpa_kernel(SDPBackend.MATH):
        rows = (x.transpose(1, 2) for x in leaves)
        out = F.scaled_dot_product_attention(*rows, scale=SCALE, enable_gqa=True, **options).transpose(1, 2)
    out.backward(tensors[3])
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]
