"""All-to-all exchange: heads are traded for sequence, and a rank computes some heads of all the rows.

q, k and v travel in one exchange. Where heads do not divide, query heads are padded with zeros up to the
next multiple, and a key head is sent to every rank whose query heads read it; its gradients are summed
at their owner. What the exchange made is kept for the backward, which moves only dout and the gradients.
With several such groups in a ring (hybrid, a 2-D mesh), the rows of one group together are a member of the
ring. Sources: DeepSpeed-Ulysses (Jacobs et al., 2023); USP (Fang and Zhao, 2024).
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.strategies import ring
from torchtitan_cp.attention.strategies.strategy import Call, Residuals, Strategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadShare:
    """Which heads each rank of a group computes.

    Attributes:
        query_heads: Hq; the last ranks' share may run past them.
        share: query heads of one rank.
        keys: per rank, the key heads it receives: the same number for each rank, and each read by the same
            number of its query heads.
    """

    query_heads: int
    share: int
    keys: tuple[tuple[int, ...], ...]

    @property
    def padding(self) -> int:
        """Query heads of zeros that fill the last shares."""
        return self.share * len(self.keys) - self.query_heads


@lru_cache(maxsize=64)
def share_heads(query_heads: int, key_heads: int, ranks: int) -> HeadShare:
    """Assign the heads to ranks; logs once where that needs padding or copies."""
    share, per_key = -(-query_heads // ranks), query_heads // key_heads
    together = math.gcd(share, per_key)  # consecutive query heads of a share that always read one key head
    keys = tuple(
        tuple(min((rank * share + head) // per_key, key_heads - 1) for head in range(0, share, together))
        for rank in range(ranks)
    )
    heads, sent = HeadShare(query_heads, share, keys), ranks * len(keys[0])
    if heads.padding:
        logger.info("all_to_all: %d query heads on %d ranks, padded with %d", query_heads, ranks, heads.padding)
    if sent > key_heads:
        logger.info("all_to_all: %d key heads on %d ranks, sent as %d", key_heads, ranks, sent)
    return heads


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    if call.all_to_all_group.ranks == 1:
        return ring.forward(q, k, v, sinks, call)
    heads = share_heads(q.shape[2], k.shape[2], call.all_to_all_group.ranks)
    parts = [_queries_by_rank(q, heads), _keys_by_rank(k, heads), _keys_by_rank(v, heads)]
    q_rows, k_rows, v_rows = (_join_rows(arrived, call) for arrived in _trade(parts, call))
    out, lse, residuals = ring.forward(q_rows, k_rows, v_rows, *_own_heads(sinks, heads, call))
    # The log-sum-exp travels with the output as further columns of its dtype, bit for bit.
    columns = lse.unsqueeze(-1).view(out.dtype)
    outs, sums = _trade([_split_rows(out, call), _split_rows(columns, call)], call)
    lse_local = _join_queries(sums, heads).view(lse.dtype).squeeze(-1)
    return _join_queries(outs, heads), lse_local, residuals


def backward(
    dout: Tensor, residuals: Residuals, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if call.all_to_all_group.ranks == 1:
        return ring.backward(dout, residuals, sinks, call)
    heads = share_heads(dout.shape[2], call.key_heads, call.all_to_all_group.ranks)
    dout_rows = _join_rows(_trade([_queries_by_rank(dout, heads)], call)[0], call)
    *gradients, dsinks = ring.backward(dout_rows, residuals, *_own_heads(sinks, heads, call))
    del dout_rows
    # Nothing else refers to the gradients, so that they are freed once they are in the message.
    parts = [_split_rows(gradients.pop(0), call) for _ in range(3)]
    dq, dk, dv = _trade(parts, call)
    if dsinks is not None:
        before, after = (
            rank * heads.share
            for rank in (call.all_to_all_group.rank, call.all_to_all_group.ranks - 1 - call.all_to_all_group.rank)
        )
        dsinks = F.pad(dsinks, (before, after))[: heads.query_heads]
    return _join_queries(dq, heads), _sum_keys(dk, heads, call), _sum_keys(dv, heads, call), dsinks


STRATEGY = Strategy(forward, backward)

# What one rank receives: stretches of rows, one after the other, each `[B, rows, h, D]`.
Stretches = list[Tensor]


def _trade(tensors: list[list[Stretches]], call: Call) -> list[list[Tensor]]:
    """Give part i of each tensor to rank i, all in one message; each value is copied once into it.

    Args:
        tensors: per tensor, its parts; emptied once they are in the message.

    Returns:
        per tensor, what each rank gave, `[B, s, h, D]`, views of the message.
    """
    shapes = []
    for parts in tensors:
        batch, _, heads, dim = parts[0][0].shape
        shapes.append((batch, sum(stretch.shape[1] for stretch in parts[0]), heads, dim))
    sizes = [math.prod(shape) for shape in shapes]
    message = tensors[0][0][0].new_empty((call.all_to_all_group.ranks, sum(sizes)))

    def views(rank: int, flat: Tensor) -> list[Tensor]:
        return [piece.view(shape) for piece, shape in zip(flat[rank].split(sizes), shapes, strict=True)]

    for rank in range(call.all_to_all_group.ranks):
        for parts, room in zip(tensors, views(rank, message), strict=True):
            torch.cat(parts[rank], 1, out=room)
    tensors.clear()
    del parts
    received = call.all_to_all_group.all_to_all(message)
    return [
        list(parts)
        for parts in zip(*(views(rank, received) for rank in range(call.all_to_all_group.ranks)), strict=True)
    ]


def _queries_by_rank(x: Tensor, heads: HeadShare) -> list[Stretches]:
    """`[B, s, Hq, D]`, each rank's share of the heads."""
    padded = F.pad(x, (0, 0, 0, heads.padding)) if heads.padding else x
    return [[share] for share in padded.split(heads.share, 2)]


def _join_queries(parts: list[Tensor], heads: HeadShare) -> Tensor:
    """The shares of all ranks as `[B, s, Hq, D]`."""
    joined = torch.cat(parts, 2)
    return joined[:, :, : heads.query_heads].contiguous() if heads.padding else joined


def _keys_by_rank(x: Tensor, heads: HeadShare) -> list[Stretches]:
    """`[B, s, Hkv, D]`, the heads each rank reads."""
    unbroken = all(keys == tuple(range(keys[0], keys[0] + len(keys))) for keys in heads.keys)
    if unbroken:
        return [[x[:, :, keys[0] : keys[0] + len(keys)]] for keys in heads.keys]
    return [[x[:, :, list(keys)]] for keys in heads.keys]


def _sum_keys(parts: list[Tensor], heads: HeadShare, call: Call) -> Tensor:
    """`[B, s, Hkv, D]`: gradients of a key head that several ranks read are summed."""
    if sum(heads.keys, ()) == tuple(range(call.key_heads)):
        return torch.cat(parts, 2)
    batch, rows, _, dim = parts[0].shape
    total = parts[0].new_zeros((batch, rows, call.key_heads, dim), dtype=accumulation_dtype(parts[0].dtype))
    for part, keys in zip(parts, heads.keys, strict=True):
        for place, key in enumerate(keys):
            total[:, :, key] += part[:, :, place]
    return total.to(parts[0].dtype)


def _join_rows(parts: list[Tensor], call: Call) -> Tensor:
    """The rows of the group's ranks in the order of the sequence, `[B, P*s, h, D]`."""
    tokens = call.plan.layout.chunk_tokens
    return torch.cat([parts[rank][:, start : start + tokens] for rank, start in _group_chunks(call)], 1)


def _split_rows(x: Tensor, call: Call) -> list[Stretches]:
    """`[B, P*s, h, D]`, each rank's own rows."""
    tokens = call.plan.layout.chunk_tokens
    held: list[Stretches] = [[] for _ in range(call.all_to_all_group.ranks)]
    for place, (rank, _) in enumerate(_group_chunks(call)):
        held[rank].append(x[:, place * tokens : (place + 1) * tokens])
    return held


def _group_chunks(call: Call) -> list[tuple[int, int]]:
    """Chunks of the group's ranks in the order of the sequence: (rank within the group, its local row)."""
    size = call.all_to_all_group.ranks
    first = call.plan.rank // size * size
    return [(rank - first, start) for rank, start in call.plan.layout.owners if first <= rank < first + size]


def _own_heads(sinks: Tensor | None, heads: HeadShare, call: Call) -> tuple[Tensor | None, Call]:
    """The sinks of the query heads that this rank computes, and the call with their slopes."""
    own, slopes = (
        None if x is None else F.pad(x, (0, heads.padding)).split(heads.share)[call.all_to_all_group.rank]
        for x in (sinks, call.slopes)
    )
    return own, replace(call, slopes=slopes)
