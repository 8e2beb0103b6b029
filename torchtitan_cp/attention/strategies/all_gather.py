"""All-gather exchange: every rank sees all keys, some heads at a time, and one kernel call does a stretch of queries.

K and V travel in one collective a group of heads; while one group computes, the next is gathered, and at
most two are held whole. Only the local shard is kept for the backward, which gathers again and
reduce-scatters the gradients in at least fp32. Everything is carried, read or not: what a mask saves is
saved by the ring. Source: Llama 3 (Dubey et al., 2024), section 3.3.2, with DeepSpeed-style head groups.

Among few ranks the shards, each where it arrived, ask for no more kernel calls than the sequence put in order:
then nothing is put in order.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.codec import find_codec
from torchtitan_cp.attention.collectives import Pending
from torchtitan_cp.attention.kernels import Kernel
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax, sink_gradient, wide
from torchtitan_cp.attention.plan import Plan, RingStep, in_global_order
from torchtitan_cp.attention.strategies import ring
from torchtitan_cp.attention.strategies.local import add_gradients, add_outputs, plain_tiles
from torchtitan_cp.attention.strategies.strategy import Call, Residuals, Strategy
from torchtitan_cp.attention.tiles import Tile

HEAD_GROUPS = 4


class Part(NamedTuple):
    """Gathered keys of some heads, and the tiles that read them.

    Attributes:
        tiles: count their keys in these rows.
        k: `[B, rows, h, Dqk]`; v: `[B, rows, h, Dv]`.
        step: the step of a ring whose source sent these rows; None: the full sequence in order.
    """

    tiles: tuple[Tile, ...]
    k: Tensor
    v: Tensor
    step: RingStep | None = None


class HeadGroup(NamedTuple):
    """Query heads, the key heads they read, and the gathered keys of these."""

    queries: slice
    keys: slice
    parts: tuple[Part, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    if call.plan.ranks == 1:
        return ring.forward(q, k, v, sinks, call)
    outputs, sums = [], []
    for queries, _, parts in gathered_groups(k, v, q.shape[2], call):
        q_group = q[:, :, queries]
        softmax = RunningSoftmax((*q_group.shape[:3], v.shape[-1]), q.dtype, q.device)
        for part in parts:
            add_outputs(softmax, part.tiles, q_group, part.k, part.v, kernel_of(part, queries, call), call.scale)
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

    for queries, keys, parts in gathered_groups(k, v, q.shape[2], call):
        rows = (dout[:, :, queries], q[:, :, queries], out[:, :, queries], lse[:, :, queries])
        dq_sum = GradientSum(tuple(rows[1].shape), q.dtype, q.device)
        # The gradients of all ranks' rows, [P, B, S/P, h, Dqk + Dv].
        heads = keys.stop - keys.start
        both = k.new_empty((call.plan.ranks, *k.shape[:2], heads, k.shape[-1] + v.shape[-1]), dtype=wide(k.dtype))
        for part in parts:
            sums = [GradientSum(tuple(x.shape), x.dtype, x.device) for x in (part.k, part.v)]
            kernel = kernel_of(part, queries, call)
            add_gradients((dq_sum, sums[0], sums[1]), part.tiles, part.k, part.v, rows, kernel, call.scale)
            deal(part, sums[0].total(), sums[1].total(), both, call.plan)
        dq[:, :, queries] = dq_sum.result(q.dtype)
        collect()
        scattering = (keys, call.ring.reduce_scatter(both))
    collect()
    return dq, dk, dv, None if sinks is None else sink_gradient(dout, out, lse, sinks)


STRATEGY = Strategy(forward, backward)


def kernel_of(part: Part, heads: slice, call: Call) -> Kernel:
    """The kernel of a group of query heads, which knows where the rows are."""
    plan = call.plan
    if part.step:
        return ring.kernel_of(part.step, call, heads)
    return call.kernel_for(lambda: plan.positions, lambda: torch.arange(plan.sequence_length), heads)


def gathered_groups(k: Tensor, v: Tensor, query_heads: int, call: Call) -> Iterator[HeadGroup]:
    """The heads in groups, the next group already travelling."""
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
        shards = [codec.decode(message, k.shape[1], k[:, :, keys], v[:, :, keys]) for message in messages]
        del messages
        parts = tuple(parts_of(shards, call))
        del shards
        yield HeadGroup(slice(keys.start * per_key, keys.stop * per_key), keys, parts)


def parts_of(shards: list[tuple[Tensor, Tensor]], call: Call) -> Iterator[Part]:
    """The keys of every rank's (k, v), in the parts in which the fewest kernel calls read them."""
    plan = call.plan
    if reads_shards(plan, call.kernel):
        for step in plan.steps:
            k, v = (ring.rows_in(x, step.receive) for x in shards[step.source])
            yield Part(step.tiles, k, v, step)
        return
    k, v = (torch.cat(in_global_order([shard[which] for shard in shards], plan.layout, 1), 1) for which in (0, 1))
    yield Part(plan.gathered_tiles, k, v)


@lru_cache(maxsize=64)
def reads_shards(plan: Plan, kernel: Kernel) -> bool:
    """Whether the shards, each by itself, ask for no more kernel calls than the sequence put in order."""
    if kernel.step_forward:
        return False
    calls = len(plain_tiles(plan.gathered_tiles, kernel))
    return plan.ranks <= calls and sum(len(plain_tiles(step.tiles, kernel)) for step in plan.steps) <= calls


def deal(part: Part, dk: Tensor, dv: Tensor, both: Tensor, plan: Plan) -> None:
    """Write the gradients of a part to the rows of the ranks that hold them, `[P, B, S/P, h, Dqk + Dv]`."""
    qk_dim = dk.shape[-1]
    if part.step is None:
        for rank in range(plan.ranks):
            spans = plan.layout.spans(rank)
            torch.cat([dk[:, start:stop] for start, stop in spans], 1, out=both[rank, ..., :qk_dim])
            torch.cat([dv[:, start:stop] for start, stop in spans], 1, out=both[rank, ..., qk_dim:])
        return
    rows, before = both[part.step.source], 0
    if dk.shape[1] < rows.shape[1]:
        rows.zero_()  # rows that nothing here reads
    for start, stop in part.step.receive:
        here = slice(before, before + stop - start)
        rows[:, start:stop, :, :qk_dim], rows[:, start:stop, :, qk_dim:] = dk[:, here], dv[:, here]
        before = here.stop
