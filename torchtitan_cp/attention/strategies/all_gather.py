"""All-gather exchange: every rank sees all keys, some heads at a time, and one kernel call does a stretch of queries.

K and V travel in one collective a group of heads; while one group computes, the next is gathered, and at
most two are held whole. Only the local shard is kept for the backward, which gathers again and
reduce-scatters the gradients in at least fp32. Everything is carried, read or not: what a mask saves is
saved by the ring. Source: Llama 3 (Dubey et al., 2024), section 3.3.2, with DeepSpeed-style head groups.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan_cp.attention.codec import find_codec
from torchtitan_cp.attention.kernels import Kernel
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax, sink_gradient
from torchtitan_cp.attention.plan import in_global_order
from torchtitan_cp.attention.strategies import ring
from torchtitan_cp.attention.strategies.local import add_gradients, add_outputs
from torchtitan_cp.attention.strategies.strategy import Call, Residuals, Strategy
from torchtitan_cp.attention.transfer import Pending

HEAD_GROUPS = 4


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    if call.plan.ranks == 1:
        return ring.forward(q, k, v, sinks, call)
    outputs, sums = [], []
    for queries, _, (k_full, v_full) in gathered_groups(k, v, q.shape[2], call):
        q_group = q[:, :, queries]
        softmax = RunningSoftmax((*q_group.shape[:3], v.shape[-1]), q.dtype, q.device)
        kernel = kernel_of(queries, call)
        add_outputs(softmax, call.plan.gathered_tiles, q_group, k_full, v_full, kernel, call.scale)
        out, lse = softmax.result(None if sinks is None else sinks[queries])
        outputs.append(out)
        sums.append(lse)
    out, lse = torch.cat(outputs, 2), torch.cat(sums, 2)
    return out, lse, Residuals(q, k, v, out, lse)


def backward(
    dout: Tensor, residuals: Residuals, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if call.plan.ranks == 1:
        return ring.backward(dout, residuals, sinks, call)
    q, k, v, out, lse = residuals
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scattering: tuple[slice, Pending] | None = None

    def collect() -> None:
        if scattering:
            keys, pending = scattering
            both = pending.wait()
            assert both is not None
            dk[:, :, keys], dv[:, :, keys] = both[..., : k.shape[-1]], both[..., k.shape[-1] :]

    for queries, keys, (k_full, v_full) in gathered_groups(k, v, q.shape[2], call):
        local = [x[:, :, queries] for x in (dout, q, out, lse)]
        sums = [GradientSum(tuple(x.shape), x.dtype, x.device) for x in (local[1], k_full, v_full)]
        rows = (local[0], local[1], local[2], local[3])
        tiles = call.plan.gathered_tiles
        kernel = kernel_of(queries, call)
        add_gradients((sums[0], sums[1], sums[2]), tiles, k_full, v_full, rows, kernel, call.scale)
        dq[:, :, queries] = sums[0].total().to(q.dtype)
        both = by_rank(sums[1].total(), sums[2].total(), call)
        collect()
        scattering = (keys, call.ring.reduce_scatter(both))
    collect()
    return dq, dk, dv, None if sinks is None else sink_gradient(dout, out, lse, sinks)


STRATEGY = Strategy(forward, backward)


def kernel_of(heads: slice, call: Call) -> Kernel:
    """The kernel of a group of query heads, which knows where their rows are."""
    return call.kernel_for(lambda: call.plan.positions, lambda: torch.arange(call.plan.sequence_length), heads)


def gathered_groups(
    k: Tensor, v: Tensor, query_heads: int, call: Call
) -> Iterator[tuple[slice, slice, tuple[Tensor, Tensor]]]:
    """Yields (query heads, key heads, (k, v) of the full sequence), the next group already travelling."""
    codec, group = find_codec(call.plan.kv_transfer), call.ring
    heads, per_key = k.shape[2], query_heads // k.shape[2]
    groups = min(HEAD_GROUPS, heads)
    edges = [heads * number // groups for number in range(groups + 1)]

    def start(number: int) -> Pending:
        keys = slice(edges[number], edges[number + 1])
        return group.all_gather(codec.encode(k[:, :, keys], v[:, :, keys]))

    arriving = start(0)
    for number in range(groups):
        messages = arriving.wait()
        assert messages is not None
        if number + 1 < groups:
            arriving = start(number + 1)
        keys = slice(edges[number], edges[number + 1])
        both = whole(messages, k[:, :, keys], v[:, :, keys], call)
        del messages
        yield slice(keys.start * per_key, keys.stop * per_key), keys, both


def whole(messages: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """K and V of the full sequence from every rank's message, for the heads of this rank's k and v."""
    codec, layout = find_codec(call.plan.kv_transfer), call.plan.layout
    shards = [codec.decode(message, k.shape[1], k, v) for message in messages]
    k_full, v_full = (torch.cat(in_global_order([shard[which] for shard in shards], layout, 1), 1) for which in (0, 1))
    return k_full, v_full


def by_rank(dk: Tensor, dv: Tensor, call: Call) -> Tensor:
    """Gradients of the full sequence as `[P, B, S/P, H, Dqk + Dv]`, each rank's own rows."""
    plan, qk_dim = call.plan, dk.shape[-1]
    batch, _, heads, v_dim = dv.shape
    both = dk.new_empty((plan.ranks, batch, plan.local_tokens, heads, qk_dim + v_dim))
    for rank in range(plan.ranks):
        spans = plan.layout.spans(rank)
        torch.cat([dk[:, start:stop] for start, stop in spans], 1, out=both[rank, ..., :qk_dim])
        torch.cat([dv[:, start:stop] for start, stop in spans], 1, out=both[rank, ..., qk_dim:])
    return both
