"""All-gather: every rank gathers all keys, some heads at a time, and one kernel call does many queries.

K and V travel in one collective per group of heads (`gather_heads`). While a group computes, the next is gathered, and
at most two are held whole. Only the local shard is kept for the backward, which gathers again and reduce-scatters the
gradients in fp32. All keys travel, whether a rank reads them or not; the ring skips what a mask hides. Source: Llama 3
(Dubey et al., 2024), section 3.3.2, with DeepSpeed-style head groups.

With few ranks, computing on each shard as it arrived needs no more kernel calls than computing on the sequence in
order; then the shards are not put in order.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from torchtitan_cp.attention.caching import keep_newest
from torchtitan_cp.attention.codec import CODECS
from torchtitan_cp.attention.collectives import Pending
from torchtitan_cp.attention.kernels import Kernel
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax, accumulation_dtype, sink_gradient
from torchtitan_cp.attention.plan import KeyRows, Plan, take_rows
from torchtitan_cp.attention.strategies.strategy import Call, KeyBlock, Residuals, Strategy, add_gradients, add_outputs
from torchtitan_cp.attention.tiles import Tile

HEAD_GROUPS = 4
KeyBlocks = list[tuple[KeyRows, KeyBlock]]
Gathered = tuple[tuple[Tile, ...], KeyRows]  # tiles, and the rows that their keys index, one after the other


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    results = []
    for queries, _, gathered in gather_heads(k, v, q.shape[2], call):
        q_group = q[:, :, queries]
        softmax = RunningSoftmax(q_group, v.shape[-1])
        while gathered:  # keys that are done with are freed
            add_outputs(softmax, q_group, gathered.pop(0)[1], call.kernel)
        results.append(softmax.result(call.for_heads(queries).sinks))
    out, lse = (torch.cat(parts, 2) for parts in zip(*results, strict=True))
    return out, lse, Residuals(q, k, v, out, lse)


def backward(dout: Tensor, residuals: Residuals, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, out, lse = residuals
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dims = [k.shape[-1], v.shape[-1]]
    scattering: list[tuple[slice, Pending[Tensor]]] = []

    def collect() -> None:
        for keys, pending in scattering:
            dk[:, :, keys], dv[:, :, keys] = pending.wait().split(dims, -1)
        scattering.clear()

    for queries, keys, gathered in gather_heads(k, v, q.shape[2], call):
        residuals_group = (dout[:, :, queries], q[:, :, queries], out[:, :, queries], lse[:, :, queries])
        # The gradients of all ranks' rows, which stay zero where no tile of this rank reads them.
        shape = (call.plan.ranks, *k.shape[:2], keys.stop - keys.start, sum(dims))
        gradients = k.new_zeros(shape, dtype=accumulation_dtype(k.dtype))
        dq[:, :, queries] = _add_group(residuals_group, gathered, gradients, call.kernel)
        collect()
        scattering.append((keys, call.ring_group.reduce_scatter(gradients)))
    collect()
    return dq, dk, dv, sink_gradient(dout, out, lse, call.sinks)


STRATEGY = Strategy(forward, backward, gathers_keys=True)


def _add_group(residuals: tuple[Tensor, ...], gathered: KeyBlocks, gradients: Tensor, kernel: Kernel) -> Tensor:
    """dQ `[B, S/P, h, D]` of a group of heads, summed in fp32.

    Args:
        residuals: dout, q, out and lse of these heads.
        gathered: the keys of these heads; emptied, so that they are freed.
        gradients: `[P, B, S/P, h, Dqk + Dv]` fp32 (fp64 for fp64), filled with dK and dV side by side, by rank.
    """
    dq = GradientSum(residuals[1])
    while gathered:
        rows, block = gathered.pop(0)
        dkv = [GradientSum(block.k), GradientSum(block.v)]
        add_gradients((dq, *dkv), residuals, block, kernel)
        sizes = [stop - start for _, start, stop in rows]
        for (rank, start, stop), *parts in zip(rows, *(x.total().split(sizes, 1) for x in dkv), strict=True):
            torch.cat(parts, -1, out=gradients[rank, :, start:stop])
    return dq.result()


def gather_heads(k: Tensor, v: Tensor, query_heads: int, call: Call) -> Iterator[tuple[slice, slice, KeyBlocks]]:
    """Yields (query heads, key heads that they read, gathered keys of those) per group, while the next one travels."""
    codec, heads = CODECS[call.plan.kv_transfer], k.shape[2]
    groups, per_key = min(HEAD_GROUPS, heads), query_heads // heads
    slices = [slice(*edges) for edges in pairwise(heads * number // groups for number in range(groups + 1))]

    def start(keys: slice) -> Pending[Tensor]:
        return call.ring_group.all_gather(codec.encode(k[:, :, keys], v[:, :, keys]))

    arriving = start(slices[0])
    for keys, following in zip(slices, [*slices[1:], None], strict=True):
        messages = arriving.wait()
        if following:
            arriving = start(following)
        shards = (codec.decode(message, k.shape[1], k[:, :, keys], v[:, :, keys]) for message in messages)
        k_shards, v_shards = zip(*shards, strict=True)
        queries = slice(keys.start * per_key, keys.stop * per_key)
        gathered = [
            (rows, KeyBlock(take_rows(k_shards, rows), take_rows(v_shards, rows), tiles, call.scores))
            for tiles, rows in arrange_rows(call.plan, call.kernel)
        ]
        del messages, k_shards, v_shards
        yield queries, keys, gathered


@keep_newest
def arrange_rows(plan: Plan, kernel: Kernel) -> list[Gathered]:
    """All ranks' rows in the order of the sequence; or each shard by itself, if that needs no more kernel calls."""
    rows = tuple((segment.rank, *segment.rows) for segment in plan.layout.segments)
    in_order: list[Gathered] = [(plan.gathered_tiles, rows)]
    if kernel.whole_steps or plan.ranks > (calls := len(kernel.calls(plan.gathered_tiles))):
        return in_order
    by_shard = [(step.tiles, step.key_rows) for step in plan.steps if step.receive]
    return by_shard if sum(len(kernel.calls(tiles)) for tiles, _ in by_shard) <= calls else in_order
