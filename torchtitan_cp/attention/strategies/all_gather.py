"""All-gather exchange: every rank sees all keys, some heads at a time, and one kernel call does many queries.

K and V travel in one collective per group of heads; while one group computes, the next is gathered, and at
most two are held whole. Only the local shard is kept for the backward, which gathers again and
reduce-scatters the gradients in fp32. Everything is carried, whether a rank reads it or not; the ring skips
what a mask hides. Source: Llama 3 (Dubey et al., 2024), section 3.3.2, with DeepSpeed-style head groups.

Among few ranks, reading each shard where it arrived needs no more kernel calls than the sequence in order
does; then nothing is put in order.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.codec import find_codec
from torchtitan_cp.attention.collectives import Pending
from torchtitan_cp.attention.kernels import Kernel
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax, accumulation_dtype, sink_gradient
from torchtitan_cp.attention.plan import Plan, RingStep, in_global_order
from torchtitan_cp.attention.strategies import ring
from torchtitan_cp.attention.strategies.local import add_gradients, add_outputs, plain_tiles
from torchtitan_cp.attention.strategies.strategy import Call, Residuals, Strategy, rows_in
from torchtitan_cp.attention.tiles import Tile

HEAD_GROUPS = 4


class GatheredKeys(NamedTuple):
    """Gathered keys of some heads, and the tiles that read them.

    Attributes:
        tiles: with their keys as rows of k and v.
        k: `[B, rows, h, Dqk]`; v: `[B, rows, h, Dv]`.
        step: the ring step whose source sent these rows; None: the full sequence in order.
    """

    tiles: tuple[Tile, ...]
    k: Tensor
    v: Tensor
    step: RingStep | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    if call.plan.ranks == 1:
        return ring.forward(q, k, v, sinks, call)
    results = []
    for queries, _, gathered in gather_heads(k, v, q.shape[2], call):
        q_group = q[:, :, queries]
        softmax = RunningSoftmax(q_group, v.shape[-1])
        for tiles, k_rows, v_rows, step in gathered:
            add_outputs(softmax, tiles, q_group, k_rows, v_rows, call.kernel_for(step, queries), call.scale)
        results.append(softmax.result(None if sinks is None else sinks[queries]))
    out, lse = (torch.cat(parts, 2) for parts in zip(*results, strict=True))
    return out, lse, Residuals(q, k, v, out, lse)


def backward(
    dout: Tensor, residuals: Residuals, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if call.plan.ranks == 1:
        return ring.backward(dout, residuals, sinks, call)
    q, k, v, out, lse = residuals
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scattering: tuple[slice, Pending[Tensor]] | None = None

    def collect() -> None:
        if scattering:
            keys, pending = scattering
            both = pending.wait()
            dk[:, :, keys], dv[:, :, keys] = both[..., : k.shape[-1]], both[..., k.shape[-1] :]

    for queries, keys, gathered in gather_heads(k, v, q.shape[2], call):
        rows = (dout[:, :, queries], q[:, :, queries], out[:, :, queries], lse[:, :, queries])
        dq_sum = GradientSum(rows[1])
        # The gradients of all ranks' rows, [P, B, S/P, h, Dqk + Dv].
        shape = (call.plan.ranks, *k.shape[:2], keys.stop - keys.start, k.shape[-1] + v.shape[-1])
        both = k.new_empty(shape, dtype=accumulation_dtype(k.dtype))
        for part in gathered:
            sums = [GradientSum(part.k), GradientSum(part.v)]
            kernel = call.kernel_for(part.step, queries)
            add_gradients((dq_sum, *sums), part.tiles, part.k, part.v, rows, kernel, call.scale)
            write_gradients(part, sums[0].total(), sums[1].total(), both, call.plan)
        dq[:, :, queries] = dq_sum.result()
        collect()
        scattering = (keys, call.ring.reduce_scatter(both))
    collect()
    return dq, dk, dv, sink_gradient(dout, out, lse, sinks)


STRATEGY = Strategy(forward, backward)


def gather_heads(
    k: Tensor, v: Tensor, query_heads: int, call: Call
) -> Iterator[tuple[slice, slice, list[GatheredKeys]]]:
    """Yields (query heads, the key heads they read, the gathered keys of these), while the next group travels."""
    codec, heads = find_codec(call.plan.kv_transfer), k.shape[2]
    groups, per_key = min(HEAD_GROUPS, heads), query_heads // heads
    edges = [heads * number // groups for number in range(groups + 1)]

    def start(number: int) -> Pending[Tensor]:
        keys = slice(edges[number], edges[number + 1])
        return call.ring.all_gather(codec.encode(k[:, :, keys], v[:, :, keys]))

    arriving = start(0)
    for number in range(groups):
        messages = arriving.wait()
        if number + 1 < groups:
            arriving = start(number + 1)
        keys = slice(edges[number], edges[number + 1])
        shards = [codec.decode(message, k.shape[1], k[:, :, keys], v[:, :, keys]) for message in messages]
        del messages
        gathered = list(arrange_keys(shards, call))
        del shards
        yield slice(keys.start * per_key, keys.stop * per_key), keys, gathered


def arrange_keys(shards: list[tuple[Tensor, Tensor]], call: Call) -> Iterator[GatheredKeys]:
    """Every rank's (k, v), arranged so that the fewest kernel calls read them."""
    plan = call.plan
    if reads_shards(plan, call.kernel):
        for step in plan.steps:
            k, v = (rows_in(x, step.receive) for x in shards[step.source])
            yield GatheredKeys(step.tiles, k, v, step)
        return
    k, v = (torch.cat(in_global_order(shard, plan.layout, 1), 1) for shard in zip(*shards, strict=True))
    yield GatheredKeys(plan.gathered_tiles, k, v)


@lru_cache(maxsize=64)
def reads_shards(plan: Plan, kernel: Kernel) -> bool:
    """Whether reading each shard by itself needs no more kernel calls than the sequence in order."""
    if kernel.step_forward:
        return False
    calls = len(plain_tiles(plan.gathered_tiles, kernel))
    return plan.ranks <= calls and sum(len(plain_tiles(step.tiles, kernel)) for step in plan.steps) <= calls


def write_gradients(part: GatheredKeys, dk: Tensor, dv: Tensor, both: Tensor, plan: Plan) -> None:
    """Write the gradients of gathered keys to the rows of the ranks that hold them, `[P, B, S/P, h, Dqk + Dv]`."""
    if part.step is None:
        targets = in_global_order(both, plan.layout, 1)
    else:
        rows = both[part.step.source]
        if dk.shape[1] < rows.shape[1]:
            rows.zero_()  # rows that no tile here reads
        targets = [rows[:, start:stop] for start, stop in part.step.receive]
    sizes, qk_dim = [target.shape[1] for target in targets], dk.shape[-1]
    for target, dk_rows, dv_rows in zip(targets, dk.split(sizes, 1), dv.split(sizes, 1), strict=True):
        target[..., :qk_dim], target[..., qk_dim:] = dk_rows, dv_rows
