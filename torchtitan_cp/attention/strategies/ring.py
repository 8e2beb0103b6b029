"""Ring exchange: in step d a rank computes on the KV of the rank d before it, while the next KV travels.

Each KV goes directly from its owner to the rank that reads it, and its gradient directly back: only rows
that a tile reads travel (three quarters of a relayed ring's volume under zigzag causal, the neighbours' rows
under a window), and an owner sums its gradient in the order of the steps, so that every run gives the same
bits. Memory holds two KV buffers whatever the number of ranks. Source: Ring Attention (Liu et al., 2023).
"""

from collections.abc import Iterator

from torch import Tensor

from torchtitan_cp.attention.codec import CODECS, find_codec
from torchtitan_cp.attention.collectives import Pending
from torchtitan_cp.attention.mask import count_rows
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax, sink_gradient
from torchtitan_cp.attention.plan import RingStep
from torchtitan_cp.attention.strategies.local import add_gradients, add_outputs
from torchtitan_cp.attention.strategies.strategy import Call, Residuals, Strategy, rows_in


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    softmax = RunningSoftmax(q, v.shape[-1])
    for step, (k_here, v_here) in exchange_kv(k, v, call):
        add_outputs(softmax, step.tiles, q, k_here, v_here, call.kernel_for(step), call.scale)
    out, lse = softmax.result(sinks)
    return out, lse, Residuals(q, k, v, out, lse)


def backward(
    dout: Tensor, residuals: Residuals, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, out, lse = residuals
    dq, own = GradientSum(q), [GradientSum(k), GradientSum(v)]
    returning: tuple[RingStep, Pending[Tensor | None]] | None = None
    for index, (step, (k_here, v_here)) in enumerate(exchange_kv(k, v, call)):
        here = [GradientSum(k_here), GradientSum(v_here)] if index else own
        add_gradients((dq, *here), step.tiles, k_here, v_here, (dout, q, out, lse), call.kernel_for(step), call.scale)
        if index:
            _add_returned(own, returning)
            returning = (step, _return_gradients(here, step, call))
    _add_returned(own, returning)
    return dq.result(), own[0].result(), own[1].result(), sink_gradient(dout, out, lse, sinks)


STRATEGY = Strategy(forward, backward)


def exchange_kv(k: Tensor, v: Tensor, call: Call) -> Iterator[tuple[RingStep, tuple[Tensor, Tensor]]]:
    """Yields each step with its (k, v), k `[B, rows received, Hkv, Dqk]`, while the next step's KV travels."""
    codec, steps, here = find_codec(call.plan.kv_transfer), call.plan.steps, (k, v)

    def start(step: RingStep) -> Pending[Tensor | None]:
        send = codec.encode(rows_in(k, step.send), rows_in(v, step.send)) if step.send else None
        receive = codec.new_message(count_rows(step.receive), k, v) if step.receive else None
        return call.ring.send_receive(send, step.target, receive, step.source)

    for step, following in zip(steps, [*steps[1:], None], strict=True):
        arriving = start(following) if following else None
        yield step, here
        if following and arriving:
            message = arriving.wait()
            rows = count_rows(following.receive)
            here = (k[:, :0], v[:, :0]) if message is None else codec.decode(message, rows, k, v)


def _return_gradients(here: list[GradientSum], step: RingStep, call: Call) -> Pending[Tensor | None]:
    """Send the gradients of `step`'s KV to their owner, and receive those of own KV from the rank that read it."""
    codec, (dk, dv) = CODECS["exact"], (gradient.total() for gradient in here)
    send = codec.encode(dk, dv) if step.receive else None
    receive = codec.new_message(count_rows(step.send), dk, dv) if step.send else None
    return call.ring.send_receive(send, step.source, receive, step.target)


def _add_returned(own: list[GradientSum], returning: tuple[RingStep, Pending[Tensor | None]] | None) -> None:
    """Wait for the gradients of own KV that are on their way back, and add them."""
    if returning is None:
        return
    step, pending = returning
    message = pending.wait()
    if message is None:
        return
    dk, dv = (gradient.total() for gradient in own)
    for total, back in zip((dk, dv), CODECS["exact"].decode(message, count_rows(step.send), dk, dv), strict=True):
        before = 0
        for start, stop in step.send:
            total[:, start:stop] += back[:, before : before + stop - start]
            before += stop - start
