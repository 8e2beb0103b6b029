"""Ring: in step d a rank computes on the KV of the rank d before it, while the KV of the next step travels.

`exchange_kv` sends and receives KV, `_return_gradients` sends the gradients back. KV goes directly from its owner to
the rank that reads it, and its gradient directly back. So only rows that a tile reads travel: three quarters of a
relayed ring's volume under zigzag causal, the neighbours' rows under a window. An owner sums its gradient in the order
of the steps, so that every run gives the same bits. Memory holds two KV buffers whatever the number of ranks. Source:
Ring Attention (Liu et al., 2023).
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from torchtitan_cp.attention.codec import CODECS
from torchtitan_cp.attention.collectives import Pending
from torchtitan_cp.attention.mask import Span, count_rows
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax, sink_gradient
from torchtitan_cp.attention.plan import RingStep, take_rows
from torchtitan_cp.attention.strategies.strategy import Call, KeyBlock, Residuals, Strategy, add_gradients, add_outputs


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    softmax = RunningSoftmax(q, v.shape[-1])
    for _, block in exchange_kv(k, v, call):
        add_outputs(softmax, q, block, call.kernel)
    out, lse = softmax.result(call.sinks)
    return out, lse, Residuals(q, k, v, out, lse)


def backward(dout: Tensor, residuals: Residuals, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, out, lse = residuals
    dq, dkv_local = GradientSum(q), [GradientSum(k), GradientSum(v)]
    add_returned: Callable[[], None] | None = None
    for step, block in exchange_kv(k, v, call):
        local = step is call.plan.steps[0]
        dkv = dkv_local if local else [GradientSum(block.k), GradientSum(block.v)]
        add_gradients((dq, *dkv), (dout, q, out, lse), block, call.kernel)
        if add_returned:
            add_returned()
            add_returned = None  # frees its messages before the next ones are allocated
        if not local:
            add_returned = _return_gradients(dkv, dkv_local, step, call)
        del block, dkv  # frees them before the next keys are received
    if add_returned:
        add_returned()
    return dq.result(), dkv_local[0].result(), dkv_local[1].result(), sink_gradient(dout, out, lse, call.sinks)


STRATEGY = Strategy(forward, backward)


def exchange_kv(k: Tensor, v: Tensor, call: Call) -> Iterator[tuple[RingStep, KeyBlock]]:
    """Send and receive KV: yields each step with the keys that it computes on, while those of the next step travel."""
    codec, steps, kv = CODECS[call.plan.kv_transfer], call.plan.steps, [k, v]

    def start(step: RingStep) -> Pending[Tensor]:
        send = codec.encode(rows_in(k, step.send), rows_in(v, step.send))
        receive = codec.new_message(count_rows(step.receive), k, v)
        return call.ring_group.send_receive(send, step.target, receive, step.source)

    for step, following in zip(steps, [*steps[1:], None], strict=True):
        arriving = start(following) if following else None
        yield step, KeyBlock(kv[0], kv[1], step.tiles, call.scores)
        if following and arriving:
            kv = codec.decode(arriving.wait(), count_rows(following.receive), k, v)


def rows_in(x: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """The rows of spans, one after the other: `[B, S/P, ..] -> [B, rows, ..]`."""
    return take_rows([x], [(0, *span) for span in spans or ((0, 0),)])


def add_rows(total: Tensor, spans: tuple[Span, ...], x: Tensor) -> None:
    """Add `x` to the rows of the spans, in the order in which `rows_in` takes them."""
    for (start, stop), part in zip(spans, x.split([stop - start for start, stop in spans], 1), strict=True):
        total[:, start:stop] += part


def _return_gradients(
    dkv: list[GradientSum], dkv_local: list[GradientSum], step: RingStep, call: Call
) -> Callable[[], None]:
    """Start to send the gradients of a step's KV to their owner.

    Returns:
        A function that waits for the gradients of the local KV, from the rank that read it in this step, and adds them.
    """
    codec, (dk, dv) = CODECS["exact"], (gradient.total() for gradient in dkv)
    rows = count_rows(step.send)
    receive = codec.new_message(rows, dk, dv)
    pending = call.ring_group.send_receive(codec.encode(dk, dv), step.source, receive, step.target)

    def add_returned() -> None:
        like = (gradient.x for gradient in dkv_local)  # not dk and dv, which this function would keep alive
        for gradient, x in zip(dkv_local, codec.decode(pending.wait(), rows, *like), strict=True):
            add_rows(gradient.total(), step.send, x)

    return add_returned
