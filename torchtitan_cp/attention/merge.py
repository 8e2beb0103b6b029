"""Sums that tiles add to: the running softmax of the output, and gradients."""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RunningSoftmax:
    """Output and log-sum-exp of rows whose keys arrive tile by tile, merged in fp32.

    Rows that no tile reached have output 0 and log-sum-exp -inf. Source: the online softmax of Milakov
    and Gimelshein (2018), as Ring Attention (Liu et al., 2023) merges blocks.

    Args:
        shape: of the output, `[B, S/P, Hq, Dv]`.
        dtype: of the inputs; sums are at least fp32.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, rows: tuple[slice, slice], out: Tensor, lse: Tensor) -> None:
        """Merge a tile: out `[b, n, Hq, Dv]` and lse `[b, n, Hq]` of rows [batch, local row]."""
        if self.out is None and out.shape == self.shape:
            self.out, self.lse = out, lse
            return
        total, total_lse = self._wide()
        difference = lse - total_lse[rows]
        total[rows].lerp_(out.to(total.dtype), torch.sigmoid(difference).unsqueeze(-1))
        total_lse[rows] = torch.logaddexp(total_lse[rows], lse)

    def _wide(self) -> tuple[Tensor, Tensor]:
        """The running sums in their wide dtype, made when a second tile needs them."""
        sums = wide(self.dtype)
        if self.out is None or self.lse is None:
            self.out = torch.zeros(self.shape, dtype=sums, device=self.device)
            self.lse = torch.full(self.shape[:-1], float("-inf"), dtype=sums, device=self.device)
        elif self.out.dtype != sums:
            self.out = self.out.to(sums)
        return self.out, self.lse

    def result(self) -> tuple[Tensor, Tensor]:
        """(out in the inputs' dtype, lse)."""
        out, lse = (self.out, self.lse) if self.out is not None and self.lse is not None else self._wide()
        return out.to(self.dtype).contiguous(), lse.contiguous()


class GradientSum:
    """A gradient that tiles add to, in at least fp32.

    Args:
        shape: `[B, rows, H, D]`.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, wide(dtype), device
        self.sum: Tensor | None = None

    def add(self, rows: tuple[slice, slice], gradient: Tensor) -> None:
        if self.sum is None and gradient.shape == self.shape:
            self.sum = gradient.to(self.dtype)
        else:
            self.total()[rows] += gradient

    def total(self) -> Tensor:
        """The sum so far; zeros if nothing was added."""
        if self.sum is None:
            self.sum = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self.sum
