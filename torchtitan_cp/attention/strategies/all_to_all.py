"""All-to-all: heads are traded for sequence, and a rank computes some heads of all the rows.

q, k and v travel in one message. Where heads do not divide, query heads are padded with zeros up to the
next multiple, and a key head is sent to every rank whose query heads read it; its gradients are summed
at their owner. What arrived and was computed is kept for the backward, which moves only dout and the gradients.
With several such groups in a ring (hybrid, a 2-D mesh), the rows of one group together are a member of the
ring. Sources: DeepSpeed-Ulysses (Jacobs et al., 2023); USP (Fang and Zhao, 2024).
"""

import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.collectives import Group, unpack
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.plan import Plan, take_rows
from torchtitan_cp.attention.strategies import ring
from torchtitan_cp.attention.strategies.strategy import Call, Residuals, Strategy

logger = logging.getLogger(__name__)

# What one rank receives: blocks of rows, one after the other, each `[B, rows, h, D]`.
RowBlocks = list[Tensor]
Heads = tuple[tuple[tuple[int, ...], ...], int]  # (the heads of each rank, how many there are)


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


class HeadAllToAll:
    """Heads for sequence and back, within a group of ranks.

    Attributes:
        queries, keys: for tensors that go with the query heads or the key heads: each rank's heads, how many there are.
        own: this rank's query heads.
    """

    def __init__(self, plan: Plan, group: Group, query_heads: int, key_heads: int) -> None:
        shares = share_heads(query_heads, key_heads, group.ranks)
        first, members = plan.rank - group.rank, range(group.ranks)
        self.group = group
        # Of the group's ranks, in the order of the sequence.
        self.rows = [(s.rank - first, *s.rows) for s in plan.layout.segments if s.rank - first in members]
        self.queries, self.keys = (shares.queries, query_heads), (shares.keys, key_heads)
        self.own = _slice_of(shares.queries[group.rank])

    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> list[Tensor]:
        """`[B, s, H, D] -> [B, P*s, h, D]` in one message, all as columns of the first tensor's dtype, bit for bit."""
        dtype = tensors[0].dtype
        columns = [x if x.dtype == dtype else x.contiguous().view(dtype) for x in tensors]
        parts = [split_heads(x, held) for x, (held, _) in zip(columns, heads, strict=True)]
        arrived = trade(parts, self.group)
        return [take_rows(x, self.rows).view(y.dtype) for x, y in zip(arrived, tensors, strict=True)]

    def to_rows(self, tensors: list[Tensor], heads: Sequence[Heads]) -> list[Tensor]:
        """The way back; what several ranks have of a key head is summed. Empties the list."""
        dtypes = [x.dtype for x in tensors]
        # Where nothing else refers to the tensors, they are freed once they are in the message.
        parts = [self._split_rows(tensors.pop(0).view(dtypes[0])) for _ in dtypes]
        arrived = zip(trade(parts, self.group), heads, dtypes, strict=True)
        return [join_heads(x, *of_ranks).view(dtype) for x, of_ranks, dtype in arrived]

    def _split_rows(self, x: Tensor) -> list[RowBlocks]:
        """`[B, P*s, h, D]`, each rank's own rows."""
        held: list[RowBlocks] = [[] for _ in range(self.group.ranks)]
        pieces = x.split([stop - start for _, start, stop in self.rows], 1)
        for (rank, _, _), piece in zip(self.rows, pieces, strict=True):
            held[rank].append(piece)
        return held


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    trade = HeadAllToAll(call.plan, call.all_to_all_group, q.shape[2], k.shape[2])
    q, k, v = trade.to_heads([q, k, v], [trade.queries, trade.keys, trade.keys])
    out, lse, residuals = ring.forward(q, k, v, call.for_heads(trade.own))
    out, lse = trade.to_rows([out, lse.unsqueeze(-1)], [trade.queries] * 2)
    return out, lse.squeeze(-1), residuals


def backward(dout: Tensor, residuals: Residuals, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    trade = HeadAllToAll(call.plan, call.all_to_all_group, dout.shape[2], call.key_heads)
    traded = trade.to_heads([dout], [trade.queries])
    *gradients, dsinks = ring.backward(traded.pop(), residuals, call.for_heads(trade.own))
    dq, dk, dv = trade.to_rows(gradients, [trade.queries, trade.keys, trade.keys])
    if dsinks is not None:
        before, after = (rank * len(dsinks) for rank in (trade.group.rank, trade.group.ranks - 1 - trade.group.rank))
        dsinks = F.pad(dsinks, (before, after))[: dout.shape[2]]
    return dq, dk, dv, dsinks


STRATEGY = Strategy(forward, backward, uses_all_to_all=True)


def trade(tensors: list[list[RowBlocks]], group: Group) -> list[tuple[Tensor, ...]]:
    """Give part i of each tensor to rank i, all in one message; each value is copied once into it.

    Args:
        tensors: per tensor, its parts; emptied once they are in the message.

    Returns:
        per tensor, what each rank gave, `[B, s, h, D]`, views of the message.
    """
    shapes = [(len(first[0]), sum(x.shape[1] for x in first), *first[0].shape[2:]) for first, *_ in tensors]
    messages = [tensors[0][0][0].new_empty(sum(map(math.prod, shapes))) for _ in range(group.ranks)]
    for message, *parts in zip(messages, *tensors, strict=True):
        for room, blocks in zip(unpack(message, shapes), parts, strict=True):
            torch.cat(blocks, 1, out=room)
    tensors.clear()
    del parts, blocks
    return list(zip(*group.uneven_all_to_all(messages, [shapes] * group.ranks), strict=True))


def split_heads(x: Tensor, heads: tuple[tuple[int, ...], ...]) -> list[RowBlocks]:
    """`[B, s, H, D]`, each rank's heads; those past H are zeros."""
    missing = heads[-1][-1] + 1 - x.shape[2]
    padded = F.pad(x, (0, 0, 0, missing)) if missing > 0 else x
    if all(held == tuple(range(held[0], held[-1] + 1)) for held in heads):
        return [[padded[:, :, _slice_of(held)]] for held in heads]
    return [[padded[:, :, list(held)]] for held in heads]


def _slice_of(heads: tuple[int, ...]) -> slice:
    return slice(heads[0], heads[-1] + 1)


def join_heads(parts: tuple[Tensor, ...], heads: tuple[tuple[int, ...], ...], count: int) -> Tensor:
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
