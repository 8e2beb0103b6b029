"""All-to-all: heads are traded for sequence, and a rank computes some heads of all rows.

q, k and v travel in one message (`HeadAllToAll.to_heads`). If P does not divide the heads, query heads are padded with
zeros up to the next multiple, and a key head is sent to every rank whose query heads read it; its gradients are summed
at its owner. What arrived and was computed is kept for the backward, which sends only dout and the gradients. With
several such groups in a ring (hybrid, a 2-D mesh), each group is one rank of the ring. Sources: DeepSpeed-Ulysses
(Jacobs et al., 2023); USP (Fang and Zhao, 2024).
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

# What one rank is sent: blocks of rows, one after the other, each `[B, rows, h, D]`.
RowBlocks = list[Tensor]
Heads = tuple[tuple[tuple[int, ...], ...], int]  # (heads of each rank, number of heads)


class HeadShares(NamedTuple):
    """Which heads each rank of a group computes; all ranks have the same number.

    Attributes:
        queries: per rank, its consecutive query heads; the last ones may run past Hq.
        keys: per rank, the key heads that it receives, each read by the same number of its query heads.
    """

    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def share_heads(query_heads: int, key_heads: int, ranks: int) -> HeadShares:
    """Assign the heads to ranks; logs once if that needs padding or copies."""
    share, per_key = -(-query_heads // ranks), query_heads // key_heads
    step = math.gcd(share, per_key)  # this many consecutive query heads of a share always read one key head
    queries = tuple(tuple(range(first, first + share)) for first in range(0, ranks * share, share))
    keys = tuple(tuple(min(head // per_key, key_heads - 1) for head in heads[::step]) for heads in queries)
    padding, sent = ranks * share - query_heads, ranks * len(keys[0])
    if padding:
        logger.info("all_to_all: %d query heads on %d ranks, padded with %d", query_heads, ranks, padding)
    if sent > key_heads:
        logger.info("all_to_all: %d key heads on %d ranks, sent as %d", key_heads, ranks, sent)
    return HeadShares(queries, keys)


class HeadAllToAll:
    """Trades heads for sequence and back, within a group of ranks.

    Attributes:
        rows: (rank in the group, start, stop) of local rows, in the order of the sequence.
        queries, keys: the heads of tensors that have the query heads or the key heads.
        own: this rank's query heads.
    """

    def __init__(self, plan: Plan, group: Group, query_heads: int, key_heads: int) -> None:
        shares = share_heads(query_heads, key_heads, group.ranks)
        first, members = plan.rank - group.rank, range(group.ranks)
        self.group = group
        self.rows = [(s.rank - first, *s.rows) for s in plan.layout.segments if s.rank - first in members]
        self.queries, self.keys = (shares.queries, query_heads), (shares.keys, key_heads)
        self.own = slice(shares.queries[group.rank][0], shares.queries[group.rank][-1] + 1)

    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> list[Tensor]:
        """`[B, s, H, D] -> [B, P*s, h, D]` in one message, whose dtype is that of the first tensor; bits are kept."""
        dtype = tensors[0].dtype
        viewed = [x if x.dtype == dtype else x.contiguous().view(dtype) for x in tensors]
        parts = [split_heads(x, heads_by_rank) for x, (heads_by_rank, _) in zip(viewed, heads, strict=True)]
        arrived = trade(parts, self.group)
        return [take_rows(x, self.rows).view(y.dtype) for x, y in zip(arrived, tensors, strict=True)]

    def to_rows(self, tensors: list[Tensor], heads: Sequence[Heads]) -> list[Tensor]:
        """The way back; parts of a key head from several ranks are summed.

        Args:
            tensors: emptied, so that they are freed once they are in the message.
        """
        dtypes = [x.dtype for x in tensors]
        parts = [self._split_rows(tensors.pop(0).view(dtypes[0])) for _ in dtypes]
        arrived = zip(trade(parts, self.group), heads, dtypes, strict=True)
        return [join_heads(x, *of_ranks).view(dtype) for x, of_ranks, dtype in arrived]

    def _split_rows(self, x: Tensor) -> list[RowBlocks]:
        """Each rank's rows of `[B, P*s, h, D]`."""
        blocks: list[RowBlocks] = [[] for _ in range(self.group.ranks)]
        pieces = x.split([stop - start for _, start, stop in self.rows], 1)
        for (rank, _, _), piece in zip(self.rows, pieces, strict=True):
            blocks[rank].append(piece)
        return blocks


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    exchange = HeadAllToAll(call.plan, call.all_to_all_group, q.shape[2], k.shape[2])
    q, k, v = exchange.to_heads([q, k, v], [exchange.queries, exchange.keys, exchange.keys])
    out, lse, residuals = ring.forward(q, k, v, call.for_heads(exchange.own))
    out, lse = exchange.to_rows([out, lse.unsqueeze(-1)], [exchange.queries] * 2)
    return out, lse.squeeze(-1), residuals


def backward(dout: Tensor, residuals: Residuals, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    query_heads = dout.shape[2]
    exchange = HeadAllToAll(call.plan, call.all_to_all_group, query_heads, call.key_heads)
    dout_heads = exchange.to_heads([dout], [exchange.queries])
    *gradients, dsinks = ring.backward(dout_heads.pop(), residuals, call.for_heads(exchange.own))
    dq, dk, dv = exchange.to_rows(gradients, [exchange.queries, exchange.keys, exchange.keys])
    if dsinks is not None:
        padded = dsinks.new_zeros(max(query_heads, exchange.own.stop))
        padded[exchange.own] = dsinks
        dsinks = padded[:query_heads]
    return dq, dk, dv, dsinks


STRATEGY = Strategy(forward, backward, uses_all_to_all=True)


def trade(tensors: list[list[RowBlocks]], group: Group) -> list[tuple[Tensor, ...]]:
    """Send part i of each tensor to rank i, all in one message, into which each value is copied once.

    Args:
        tensors: per tensor, its parts; emptied once they are in the message.

    Returns:
        Per tensor, what each rank sent, `[B, s, h, D]`: views of the received messages.
    """
    shapes = [(len(first[0]), sum(x.shape[1] for x in first), *first[0].shape[2:]) for first, *_ in tensors]
    messages = [tensors[0][0][0].new_empty(sum(map(math.prod, shapes))) for _ in range(group.ranks)]
    for message, *parts in zip(messages, *tensors, strict=True):
        for view, blocks in zip(unpack(message, shapes), parts, strict=True):
            torch.cat(blocks, 1, out=view)
    tensors.clear()
    del parts, blocks
    return list(zip(*group.uneven_all_to_all(messages, [shapes] * group.ranks), strict=True))


def split_heads(x: Tensor, heads: tuple[tuple[int, ...], ...]) -> list[RowBlocks]:
    """Each rank's heads of `[B, s, H, D]`; heads past H are zeros."""
    missing = heads[-1][-1] + 1 - x.shape[2]
    padded = F.pad(x, (0, 0, 0, missing)) if missing > 0 else x
    if all(of_rank == tuple(range(of_rank[0], of_rank[-1] + 1)) for of_rank in heads):
        return [[padded[:, :, of_rank[0] : of_rank[-1] + 1]] for of_rank in heads]
    return [[padded[:, :, list(of_rank)]] for of_rank in heads]


def join_heads(parts: tuple[Tensor, ...], heads: tuple[tuple[int, ...], ...], count: int) -> Tensor:
    """`[B, s, count, D]` from each rank's heads: heads past `count` are dropped, and parts of one head are summed."""
    all_heads = sum(heads, ())
    if all_heads == tuple(range(len(all_heads))):
        joined = torch.cat(parts, 2)
        return joined[:, :, :count].contiguous() if len(all_heads) > count else joined
    batch, rows, _, dim = parts[0].shape
    total = parts[0].new_zeros((batch, rows, count, dim), dtype=accumulation_dtype(parts[0].dtype))
    for part, of_rank in zip(parts, heads, strict=True):
        for index, head in enumerate(of_rank):
            total[:, :, head] += part[:, :, index]
    return total.to(parts[0].dtype)
