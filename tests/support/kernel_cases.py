"""Inputs of one kernel call, and its error beside the exact result."""

from typing import Any

import torch
from torch import Tensor


def draw(
    queries: int, keys: int, heads: tuple[int, int], dims: tuple[int, int], device: str, dtype: torch.dtype
) -> Any:
    generator = torch.Generator().manual_seed(queries + keys + heads[0])
    shapes = [(queries, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1])]
    shapes.append((queries, heads[0], dims[1]))
    return [torch.randn(2, *shape, generator=generator).to(device, dtype) for shape in shapes]


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double().cpu() - want).norm() / want.norm()).item()
