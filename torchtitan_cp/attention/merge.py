"""Sums that tiles add to: the running softmax of the output, and gradients."""

import torch
from torch import Tensor

Rows = tuple[slice, slice]


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

    def add(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Merge a tile: out `[b, n, Hq, Dv]` and lse `[b, n, Hq]` of rows [batch, local row]."""
        if self.out is None and out.shape == self.shape:
            self.out, self.lse = out, lse
            return
        total, total_lse = self._wide()
        merged = torch.logaddexp(total_lse[rows], lse)
        # The weight of a row that has nothing on either side is exp(-inf - -inf): nothing, not NaN.
        weight = torch.exp(lse - merged).nan_to_num_(0.0)
        total[rows].lerp_(out.to(total.dtype), weight.unsqueeze(-1))
        total_lse[rows] = merged

    def _wide(self) -> tuple[Tensor, Tensor]:
        """The running sums in their wide dtype, made when a second tile needs them."""
        sums = wide(self.dtype)
        if self.out is None or self.lse is None:
            self.out = torch.zeros(self.shape, dtype=sums, device=self.device)
            self.lse = torch.full(self.shape[:-1], float("-inf"), dtype=sums, device=self.device)
        elif self.out.dtype != sums:
            self.out = self.out.to(sums)
        return self.out, self.lse

    def result(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(out in the inputs' dtype, lse).

        Args:
            sinks: `[Hq]` a logit that each query of a head attends to besides its keys, with a value of
                zero. It enters the log-sum-exp and so shrinks the output.
        """
        out, lse = (self.out, self.lse) if self.out is not None and self.lse is not None else self._wide()
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype))
            out = out.to(lse.dtype) * torch.exp(lse - with_sink).unsqueeze(-1)
            lse = with_sink
        return out.to(self.dtype).contiguous(), lse.contiguous()


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of `[Hq]` sinks from these rows: a sink's share of the softmax times the loss of its zero value."""
    share = torch.exp(sinks.to(lse.dtype) - lse)
    # A row of padding has no output, and whatever its dout holds does not count.
    row_dots = (dout.to(lse.dtype) * out.to(lse.dtype)).masked_fill_(out == 0, 0.0).sum(-1)
    return -(share * row_dots).sum((0, 1))


class GradientSum:
    """A gradient that tiles add to, in at least fp32. That of one tile is kept as it came.

    Args:
        shape: `[B, rows, H, D]`.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, wide(dtype), device
        self.sum: Tensor | None = None

    def add(self, rows: Rows, gradient: Tensor) -> None:
        if self.sum is None and gradient.shape == self.shape:
            self.sum = gradient
        else:
            self.total()[rows] += gradient

    def total(self) -> Tensor:
        """The sum so far, in its wide dtype; zeros if nothing was added."""
        if self.sum is None:
            self.sum = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        self.sum = self.sum.to(self.dtype)
        return self.sum

    def result(self, dtype: torch.dtype) -> Tensor:
        """The sum in this dtype; that of one tile was never in another."""
        return (self.total() if self.sum is None else self.sum).to(dtype)
