"""Sums to which tiles add: the running softmax of the output, and gradients."""

import torch
from torch import Tensor

from torchtitan_cp.attention.compiling import compile_on_cuda

Rows = tuple[slice | Tensor, slice | Tensor]  # an index of (batch rows, local rows); `[n]` int64 tensors gather rows
ALL: Rows = (slice(None), slice(None))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of `dtype` are summed: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RunningSoftmax:
    """Output and log-sum-exp of rows whose keys arrive tile by tile, merged in fp32 (fp64 for fp64).

    Rows that no tile reached have output 0 and log-sum-exp -inf. Source: the online softmax of Milakov
    and Gimelshein (2018), as Ring Attention (Liu et al., 2023) merges blocks.

    Args:
        q: `[B, S/P, Hq, Dqk]` queries.
        v_dim: Dv.
    """

    def __init__(self, q: Tensor, v_dim: int) -> None:
        self.q, self.shape = q, (*q.shape[:3], v_dim)
        self.sums: tuple[Tensor, Tensor] | None = None

    def add(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Merge tiles that share no query row: out `[b, n, Hq, Dv]` (`[n, Hq, Dv]` for gathered rows) and lse."""
        if self.sums is None and out.shape == self.shape:
            self.sums = out, lse
            return
        total, total_lse = self.sums = self._totals()
        # Views, because compiled code would be made again for other bounds of a slice.
        spans = tuple(index if isinstance(index, slice) else slice(None) for index in rows)
        gathered = tuple(slice(None) if isinstance(index, slice) else index for index in rows)
        merge = compile_on_cuda(_merge, total.is_cuda)
        merge(total[spans], total_lse[spans], gathered, out, lse)

    def _totals(self) -> tuple[Tensor, Tensor]:
        """The running (out, lse) in their accumulation dtype; a single tile that covers all rows needs none."""
        dtype = accumulation_dtype(self.q.dtype)
        if self.sums:
            return self.sums[0].to(dtype), self.sums[1]
        empty = self.q.new_full(self.shape[:-1], float("-inf"), dtype=dtype)
        return self.q.new_zeros(self.shape, dtype=dtype), empty

    def result(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(out in the inputs' dtype, lse).

        Args:
            sinks: `[Hq]`, per head a logit that each query attends to besides its keys, with a value of zero. It
                adds to the log-sum-exp and so shrinks the output.
        """
        out, lse = self.sums or self._totals()
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype))
            share = torch.exp(lse - with_sink).masked_fill_(with_sink == float("-inf"), 0.0)
            out = out.to(lse.dtype) * share.unsqueeze(-1)
            lse = with_sink
        return out.to(self.q.dtype).contiguous(), lse.contiguous()


def _merge(total: Tensor, total_lse: Tensor, rows: tuple[slice | Tensor, ...], out: Tensor, lse: Tensor) -> None:
    """Merge a tile into these rows of the running (out, lse), in place."""
    merged = torch.logaddexp(total_lse[rows], lse)
    # Where neither side has a key, exp(-inf - -inf) is NaN and the weight must be 0.
    weight = torch.exp(lse - merged).nan_to_num_(0.0)
    total[rows] = total[rows].lerp_(out.to(total.dtype), weight.unsqueeze(-1))  # a slice is not copied
    total_lse[rows] = merged


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """The gradient of `[Hq]` sinks from these rows: the softmax weight of a sink times -(dout . out)."""
    if sinks is None:
        return None
    weight = torch.exp(sinks.to(lse.dtype) - lse).masked_fill_(lse == float("-inf"), 0.0)
    # A row of padding has output zero, and its dout may hold anything, so it must not count.
    row_dots = (dout.to(lse.dtype) * out.to(lse.dtype)).masked_fill_(out == 0, 0.0).sum(-1)
    return -(weight * row_dots).sum((0, 1))


class GradientSum:
    """The gradient of `x` `[B, rows, H, D]`, to which tiles add in fp32 (fp64 for fp64).

    The gradient of a single tile that covers `x` keeps its dtype.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.sum: Tensor | None = None

    def add(self, rows: Rows, gradient: Tensor) -> None:
        if self.sum is None and gradient.shape == self.x.shape:
            self.sum = gradient
        else:
            self.total()[rows] += gradient

    def total(self) -> Tensor:
        """The sum so far, in its accumulation dtype; zeros if nothing was added."""
        dtype = accumulation_dtype(self.x.dtype)
        self.sum = torch.zeros_like(self.x, dtype=dtype) if self.sum is None else self.sum.to(dtype)
        return self.sum

    def result(self) -> Tensor:
        """The sum in the dtype of `x`."""
        return (self.total() if self.sum is None else self.sum).to(self.x.dtype)
