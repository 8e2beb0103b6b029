"""Ring exchange: in step d a rank computes on the KV of the rank d before it, while the next KV travels.

Each KV goes straight from its owner to the rank that reads it, and its gradient straight back: only rows
a tile reads travel (three quarters of a relayed ring's volume under zigzag causal), and a gradient is
summed at its owner in the order of the steps, so a result is the same bit for bit run after run. Memory
holds two KV buffers whatever the number of ranks. Source: Ring Attention (Liu et al., 2023).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan_cp.attention.kernels import Kernel
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax
from torchtitan_cp.attention.plan import ALL_ROWS, Plan, RingStep, Span, Tile
from torchtitan_cp.attention.strategies.strategy import Strategy
from torchtitan_cp.attention.transfer import Transfer, find_group

Rows = tuple[slice, slice]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, kernel: Kernel, scale: float) -> tuple[Tensor, Tensor]:
    exchange = KVExchange(k, v, plan)
    softmax = RunningSoftmax((*q.shape[:3], v.shape[-1]), q.dtype, q.device)
    for step, (k_here, v_here) in exchange.steps():
        for tile in step.tiles:
            queries, keys = rows_of(tile)
            out, lse = kernel.forward(q[queries], k_here[keys], v_here[keys], tile.causal, scale)
            softmax.add(queries, out, lse)
    return softmax.result()


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, kernel: Kernel, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    exchange = KVExchange(k, v, plan)
    returns = GradientReturn(k, v, plan)
    dq = GradientSum(tuple(q.shape), q.dtype, q.device)
    for step, (k_here, v_here) in exchange.steps():
        dk = GradientSum(tuple(k_here.shape), k.dtype, k.device)
        dv = GradientSum(tuple(v_here.shape), v.dtype, v.device)
        for tile in step.tiles:
            queries, keys = rows_of(tile)
            rows = (dout[queries], q[queries], k_here[keys], v_here[keys], out[queries], lse[queries])
            dq_tile, dk_tile, dv_tile = kernel.backward(*rows, tile.causal, scale)
            dq.add(queries, dq_tile)
            dk.add(keys, dk_tile)
            dv.add(keys, dv_tile)
        returns.post(step, dk.total(), dv.total())
    dk_own, dv_own = returns.finish()
    return dq.total().to(q.dtype), dk_own.to(k.dtype), dv_own.to(v.dtype)


STRATEGY = Strategy(forward, backward)


def rows_of(tile: Tile) -> tuple[Rows, Rows]:
    """Indices of a tile's queries and keys: (batch rows, local rows) each."""
    batch = slice(None) if tile.row == ALL_ROWS else slice(tile.row, tile.row + 1)
    return (batch, slice(tile.q_start, tile.q_stop)), (batch, slice(tile.k_start, tile.k_stop))


class KVExchange:
    """Hands out the KV of each step, the next one already travelling."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan) -> None:
        self.k, self.v, self.plan = k, v, plan
        self.group = find_group(plan.group_name) if plan.ranks > 1 else None

    def steps(self) -> Iterator[tuple[RingStep, tuple[Tensor, Tensor]]]:
        """Yields (step, (k, v)), k `[B, rows received, Hkv, D]`."""
        steps, here = self.plan.steps, (self.k, self.v)
        for index, step in enumerate(steps):
            following = steps[index + 1] if index + 1 < len(steps) else None
            arriving = self._post(following) if following else None
            yield step, here
            if following and arriving:
                here = self._unpack(arriving.wait(), following)

    def _post(self, step: RingStep) -> Transfer:
        assert self.group is not None
        send = pack(self.k, self.v, step.send)
        receive = buffer_for(step.receive, self.k, self.v, self.k.dtype)
        return Transfer(self.group, send=send, to=step.target, receive=receive, source=step.source)

    def _unpack(self, flat: Tensor | None, step: RingStep) -> tuple[Tensor, Tensor]:
        return unpack(flat, count(step.receive), self.k, self.v)


class GradientReturn:
    """Sends the gradient of each step's KV to its owner, and sums what comes back for one's own."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan) -> None:
        self.k, self.v, self.plan = k, v, plan
        self.group = find_group(plan.group_name) if plan.ranks > 1 else None
        self.own: tuple[Tensor, Tensor] | None = None
        self.pending: tuple[RingStep, Transfer] | None = None

    def post(self, step: RingStep, dk: Tensor, dv: Tensor) -> None:
        """Take the gradients of `step`'s KV, `[B, rows received, Hkv, D]`."""
        if step.source == self.plan.rank:
            self.own = (dk, dv)
            return
        self._collect()
        assert self.group is not None
        send = torch.cat([dk.flatten(), dv.flatten()]) if step.receive else None
        receive = buffer_for(step.send, self.k, self.v, dk.dtype)
        self.pending = (step, Transfer(self.group, send=send, to=step.source, receive=receive, source=step.target))

    def _collect(self) -> None:
        """Add the gradient that came back last."""
        if self.pending is None:
            return
        step, transfer = self.pending
        dk, dv = unpack(transfer.wait(), count(step.send), self.k, self.v)
        assert self.own is not None
        before = 0
        for start, stop in step.send:
            taken = slice(before, before + stop - start)
            self.own[0][:, start:stop] += dk[:, taken]
            self.own[1][:, start:stop] += dv[:, taken]
            before = taken.stop
        self.pending = None

    def finish(self) -> tuple[Tensor, Tensor]:
        """(dk, dv) of this rank's own KV, in at least fp32."""
        self._collect()
        assert self.own is not None
        return self.own


def count(spans: tuple[Span, ...]) -> int:
    """Rows in spans."""
    return sum(stop - start for start, stop in spans)


def pack(k: Tensor, v: Tensor, spans: tuple[Span, ...]) -> Tensor | None:
    """Rows of k and v as one flat message; None if there are none."""
    if not spans:
        return None
    rows = [torch.cat([x[:, start:stop] for start, stop in spans], 1).flatten() for x in (k, v)]
    return torch.cat(rows)


def buffer_for(spans: tuple[Span, ...], k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Room for a message of these rows; None if there are none."""
    per_row = k[:, :1].numel() + v[:, :1].numel()
    return k.new_empty(count(spans) * per_row, dtype=dtype) if spans else None


def unpack(flat: Tensor | None, rows: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A flat message as k `[B, rows, Hkv, D]` and v `[B, rows, Hkv, Dv]`, without a copy."""
    if flat is None:
        return k[:, :0], v[:, :0]
    shape_k, shape_v = (k.shape[0], rows, *k.shape[2:]), (v.shape[0], rows, *v.shape[2:])
    boundary = rows * k[:, :1].numel()
    return flat[:boundary].view(shape_k), flat[boundary:].view(shape_v)
