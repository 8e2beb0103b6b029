"""Ring exchange: in step d a rank computes on the KV of the rank d before it, while the next KV travels.

Each KV goes straight from its owner to the rank that reads it, and its gradient straight back: only rows
a tile reads travel (three quarters of a relayed ring's volume under zigzag causal, the neighbours' rows
under a window), and a gradient is summed at its owner in the order of the steps, so a result is the same
bit for bit run after run. Memory holds two KV buffers whatever the number of ranks. Source: Ring
Attention (Liu et al., 2023).
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from torchtitan_cp.attention.codec import CODECS, find_codec
from torchtitan_cp.attention.collectives import Pending
from torchtitan_cp.attention.kernels import Kernel
from torchtitan_cp.attention.mask import Span
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax, sink_gradient
from torchtitan_cp.attention.plan import RingStep
from torchtitan_cp.attention.strategies.local import add_gradients, add_outputs
from torchtitan_cp.attention.strategies.strategy import ALL_HEADS, Call, Residuals, Strategy


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    softmax = RunningSoftmax((*q.shape[:3], v.shape[-1]), q.dtype, q.device)
    for step, (k_here, v_here) in KVExchange(k, v, call).steps():
        add_outputs(softmax, step.tiles, q, k_here, v_here, kernel_of(step, call), call.scale)
    out, lse = softmax.result(sinks)
    return out, lse, Residuals(q, k, v, out, lse)


def backward(
    dout: Tensor, residuals: Residuals, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, out, lse = residuals
    returns = GradientReturn(k, v, call)
    dq = GradientSum(tuple(q.shape), q.dtype, q.device)
    for step, (k_here, v_here) in KVExchange(k, v, call).steps():
        dk = GradientSum(tuple(k_here.shape), k.dtype, k.device)
        dv = GradientSum(tuple(v_here.shape), v.dtype, v.device)
        kernel = kernel_of(step, call)
        add_gradients((dq, dk, dv), step.tiles, k_here, v_here, (dout, q, out, lse), kernel, call.scale)
        returns.post(step, dk, dv)
    dk_own, dv_own = returns.finish()
    dsinks = None if sinks is None else sink_gradient(dout, out, lse, sinks)
    return dq.result(q.dtype), dk_own.result(k.dtype), dv_own.result(v.dtype), dsinks


STRATEGY = Strategy(forward, backward)


def kernel_of(step: RingStep, call: Call, heads: slice = ALL_HEADS) -> Kernel:
    """The kernel of a step, which knows where the step's rows are.

    Args:
        heads: the query heads at hand.
    """
    layout = call.plan.ring_layout
    held = partial(layout.positions, call.plan.rank // call.plan.all_to_all_ranks)
    return call.kernel_for(held, lambda: rows_in(layout.positions(step.source).unsqueeze(0), step.receive)[0], heads)


class KVExchange:
    """Hands out the KV of each step, the next one already travelling."""

    def __init__(self, k: Tensor, v: Tensor, call: Call) -> None:
        self.k, self.v, self.plan, self.group = k, v, call.plan, call.ring
        self.codec = find_codec(call.plan.kv_transfer)

    def steps(self) -> Iterator[tuple[RingStep, tuple[Tensor, Tensor]]]:
        """Yields (step, (k, v)), k `[B, rows received, Hkv, Dqk]`."""
        steps, here = self.plan.steps, (self.k, self.v)
        for index, step in enumerate(steps):
            following = steps[index + 1] if index + 1 < len(steps) else None
            arriving = self._post(following) if following else None
            yield step, here
            if following and arriving:
                here = self._unpack(arriving.wait(), following)

    def _post(self, step: RingStep) -> Pending:
        send = self.codec.encode(rows_in(self.k, step.send), rows_in(self.v, step.send)) if step.send else None
        receive = self.codec.room(count(step.receive), self.k, self.v) if step.receive else None
        return self.group.exchange(send, step.target, receive, step.source)

    def _unpack(self, message: Tensor | None, step: RingStep) -> tuple[Tensor, Tensor]:
        if message is None:
            return self.k[:, :0], self.v[:, :0]
        return self.codec.decode(message, count(step.receive), self.k, self.v)


class GradientReturn:
    """Sends the gradient of each step's KV to its owner, and sums what comes back for one's own."""

    codec = CODECS["exact"]

    def __init__(self, k: Tensor, v: Tensor, call: Call) -> None:
        self.k, self.v, self.group = k, v, call.ring
        self.own: tuple[GradientSum, GradientSum] | None = None
        self.pending: tuple[RingStep, Pending] | None = None

    def post(self, step: RingStep, dk: GradientSum, dv: GradientSum) -> None:
        """Take the gradients of `step`'s KV, `[B, rows received, Hkv, D]`."""
        if self.own is None:
            self.own = (dk, dv)
            return
        self._collect()
        send = self.codec.encode(dk.total(), dv.total()) if step.receive else None
        rows = count(step.send)
        receive = dk.total().new_empty(self.codec.size(rows, self.k, self.v)) if rows else None
        self.pending = (step, self.group.exchange(send, step.source, receive, step.target))

    def _collect(self) -> None:
        """Add the gradient that came back last."""
        if self.pending is None:
            return
        step, transfer = self.pending
        self.pending = None
        message = transfer.wait()
        if message is None:
            return
        assert self.own is not None
        for own, back in zip(self.own, self.codec.decode(message, count(step.send), self.k, self.v), strict=True):
            total, before = own.total(), 0
            for start, stop in step.send:
                total[:, start:stop] += back[:, before : before + stop - start]
                before += stop - start

    def finish(self) -> tuple[GradientSum, GradientSum]:
        """(dk, dv) of this rank's own KV."""
        self._collect()
        assert self.own is not None
        return self.own


def count(spans: tuple[Span, ...]) -> int:
    """Rows in spans."""
    return sum(stop - start for start, stop in spans)


def rows_in(x: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """The rows of spans, one after the other."""
    parts = [x[:, start:stop] for start, stop in spans] or [x[:, :0]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
