"""All-to-all: heads are traded for sequence, and a rank computes some heads of all the rows.

q, k and v travel in one message. Where heads do not divide, query heads are padded with zeros up to the
next multiple, and a key head is sent to every rank whose query heads read it; its gradients are summed
at their owner. What arrived and was computed is kept for the backward, which moves only dout and the gradients.
With several such groups in a ring (hybrid, a 2-D mesh), the rows of one group together are a member of the
ring. Sources: DeepSpeed-Ulysses (Jacobs et al., 2023); USP (Fang and Zhao, 2024).
"""

import logging
import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.collectives import Group
from torchtitan_cp.attention.mask import Span
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.strategies import ring
from torchtitan_cp.attention.strategies.strategy import Call, Residuals, Strategy

logger = logging.getLogger(__name__)


class HeadShares(NamedTuple):
    """Which heads each rank of a group computes: the same number for each rank.

    Attributes:
        queries: per rank, its query heads; the last ones may run past Hq.
        keys: per rank, the key heads it receives, each read by the same number of its query heads.
    """

    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def share_heads(query_heads: int, key_heads: int, ranks: int) -> HeadShares:
    """Assign the heads to ranks; logs once where that needs padding or copies."""
    share, per_key = -(-query_heads // ranks), query_heads // key_heads
    together = math.gcd(share, per_key)  # consecutive query heads of a share that always read one key head
    queries = tuple(tuple(range(first, first + share)) for first in range(0, ranks * share, share))
    keys = tuple(tuple(min(head // per_key, key_heads - 1) for head in heads[::together]) for heads in queries)
    padding, sent = ranks * share - query_heads, ranks * len(keys[0])
    if padding:
        logger.info("all_to_all: %d query heads on %d ranks, padded with %d", query_heads, ranks, padding)
    if sent > key_heads:
        logger.info("all_to_all: %d key heads on %d ranks, sent as %d", key_heads, ranks, sent)
    return HeadShares(queries, keys)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    group = call.all_to_all_group
    heads, rows = share_heads(q.shape[2], k.shape[2], group.ranks), group_rows(call.plan, group)
    parts = [split_heads(q, heads.queries), split_heads(k, heads.keys), split_heads(v, heads.keys)]
    q_rows, k_rows, v_rows = (join_rows(arrived, rows) for arrived in trade(parts, group))
    out, lse, residuals = ring.forward(q_rows, k_rows, v_rows, call.for_heads(_slice_of(heads.queries[group.rank])))
    # The log-sum-exp travels with the output as further columns of its dtype, bit for bit.
    columns = lse.unsqueeze(-1).view(out.dtype)
    outs, sums = trade([split_rows(out, rows), split_rows(columns, rows)], group)
    out, columns = (join_heads(x, heads.queries, q.shape[2]) for x in (outs, sums))
    return out, columns.view(lse.dtype).squeeze(-1), residuals


def backward(dout: Tensor, residuals: Residuals, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    group = call.all_to_all_group
    heads, rows = share_heads(dout.shape[2], call.key_heads, group.ranks), group_rows(call.plan, group)
    dout_rows = join_rows(trade([split_heads(dout, heads.queries)], group)[0], rows)
    *gradients, dsinks = ring.backward(dout_rows, residuals, call.for_heads(_slice_of(heads.queries[group.rank])))
    del dout_rows
    # Nothing else refers to the gradients, so that they are freed once they are in the message.
    parts = [split_rows(gradients.pop(0), rows) for _ in range(3)]
    dq_parts, dk_parts, dv_parts = trade(parts, group)
    if dsinks is not None:
        before, after = (rank * len(dsinks) for rank in (group.rank, group.ranks - 1 - group.rank))
        dsinks = F.pad(dsinks, (before, after))[: dout.shape[2]]
    dk, dv = (join_heads(x, heads.keys, call.key_heads) for x in (dk_parts, dv_parts))
    return join_heads(dq_parts, heads.queries, dout.shape[2]), dk, dv, dsinks


STRATEGY = Strategy(forward, backward, trades_heads=True)

# What one rank receives: stretches of rows, one after the other, each `[B, rows, h, D]`.
Stretches = list[Tensor]
GroupRows = list[tuple[int, Span]]  # (rank within the group, its local rows)


def trade(tensors: list[list[Stretches]], group: Group) -> list[list[Tensor]]:
    """Give part i of each tensor to rank i, all in one message; each value is copied once into it.

    Args:
        tensors: per tensor, its parts; emptied once they are in the message.

    Returns:
        per tensor, what each rank gave, `[B, s, h, D]`, views of the message.
    """
    shapes = []
    for parts in tensors:
        stretches = parts[0]
        batch, _, heads, dim = stretches[0].shape
        shapes.append((batch, sum(stretch.shape[1] for stretch in stretches), heads, dim))
    sizes = [math.prod(shape) for shape in shapes]
    message = stretches[0].new_empty((group.ranks, sum(sizes)))

    def views(flat: Tensor) -> list[list[Tensor]]:
        pieces = zip(flat.split(sizes, 1), shapes, strict=True)
        return [[row.view(shape) for row in piece] for piece, shape in pieces]

    for rooms, parts in zip(views(message), tensors, strict=True):
        for room, stretches in zip(rooms, parts, strict=True):
            torch.cat(stretches, 1, out=room)
    tensors.clear()
    del parts, stretches
    return views(group.all_to_all(message))


def split_heads(x: Tensor, heads: tuple[tuple[int, ...], ...]) -> list[Stretches]:
    """`[B, s, H, D]`, each rank's heads; those past H are zeros."""
    missing = heads[-1][-1] + 1 - x.shape[2]
    padded = F.pad(x, (0, 0, 0, missing)) if missing > 0 else x
    if all(held == tuple(range(held[0], held[-1] + 1)) for held in heads):
        return [[padded[:, :, _slice_of(held)]] for held in heads]
    return [[padded[:, :, list(held)]] for held in heads]


def _slice_of(heads: tuple[int, ...]) -> slice:
    return slice(heads[0], heads[-1] + 1)


def join_heads(parts: list[Tensor], heads: tuple[tuple[int, ...], ...], count: int) -> Tensor:
    """`[B, s, count, D]` from each rank's heads: those past `count` are dropped, and those of several ranks summed."""
    held = sum(heads, ())
    if held == tuple(range(len(held))):
        joined = torch.cat(parts, 2)
        return joined[:, :, :count].contiguous() if len(held) > count else joined
    batch, rows, _, dim = parts[0].shape
    total = parts[0].new_zeros((batch, rows, count, dim), dtype=accumulation_dtype(parts[0].dtype))
    for part, of_rank in zip(parts, heads, strict=True):
        for place, head in enumerate(of_rank):
            total[:, :, head] += part[:, :, place]
    return total.to(parts[0].dtype)


def join_rows(parts: list[Tensor], rows: GroupRows) -> Tensor:
    """The rows of the group's ranks in the order of the sequence, `[B, P*s, h, D]`."""
    return torch.cat([parts[rank][:, start:stop] for rank, (start, stop) in rows], 1)


def split_rows(x: Tensor, rows: GroupRows) -> list[Stretches]:
    """`[B, P*s, h, D]`, each rank's own rows."""
    held: list[Stretches] = [[] for _ in range(1 + max(rank for rank, _ in rows))]
    place = 0
    for rank, (start, stop) in rows:
        held[rank].append(x[:, place : place + stop - start])
        place += stop - start
    return held


def group_rows(plan: Plan, group: Group) -> GroupRows:
    """Rows of the group's ranks in the order of the sequence."""
    first = plan.rank - group.rank
    return [(s.rank - first, s.rows) for s in plan.layout.segments if first <= s.rank < first + group.ranks]
