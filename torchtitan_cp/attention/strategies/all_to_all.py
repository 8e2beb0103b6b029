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

from torchtitan_cp.attention.collectives import Group
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
    group = call.all_to_all_group
    heads = share_heads(q.shape[2], k.shape[2], group.ranks)
    parts = [_queries_by_rank(q, heads), _keys_by_rank(k, heads), _keys_by_rank(v, heads)]
    q_rows, k_rows, v_rows = (_join_rows(arrived, call) for arrived in _trade(parts, group))
    out, lse, residuals = ring.forward(q_rows, k_rows, v_rows, *_with_heads_of_rank(sinks, heads, call))
    # The log-sum-exp travels with the output as further columns of its dtype, bit for bit.
    columns = lse.unsqueeze(-1).view(out.dtype)
    outs, sums = _trade([_split_rows(out, call), _split_rows(columns, call)], group)
    lse_local = _join_queries(sums, heads).view(lse.dtype).squeeze(-1)
    return _join_queries(outs, heads), lse_local, residuals


def backward(
    dout: Tensor, residuals: Residuals, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    group = call.all_to_all_group
    heads = share_heads(dout.shape[2], call.key_heads, group.ranks)
    dout_rows = _join_rows(_trade([_queries_by_rank(dout, heads)], group)[0], call)
    *gradients, dsinks = ring.backward(dout_rows, residuals, *_with_heads_of_rank(sinks, heads, call))
    del dout_rows
    # Nothing else refers to the gradients, so that they are freed once they are in the message.
    parts = [_split_rows(gradients.pop(0), call) for _ in range(3)]
    dq, dk, dv = _trade(parts, group)
    if dsinks is not None:
        before, after = (rank * heads.share for rank in (group.rank, group.ranks - 1 - group.rank))
        dsinks = F.pad(dsinks, (before, after))[: heads.query_heads]
    return _join_queries(dq, heads), _sum_keys(dk, heads, call), _sum_keys(dv, heads, call), dsinks


STRATEGY = Strategy(forward, backward, trades_heads=True)

# What one rank receives: stretches of rows, one after the other, each `[B, rows, h, D]`.
Stretches = list[Tensor]


def _trade(tensors: list[list[Stretches]], group: Group) -> list[list[Tensor]]:
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
    if all(keys == tuple(range(keys[0], keys[-1] + 1)) for keys in heads.keys):
        return [[x[:, :, keys[0] : keys[-1] + 1]] for keys in heads.keys]
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
    held: list[Stretches] = [[] for _ in range(call.all_to_all_group.ranks)]
    for (rank, _), chunk in zip(_group_chunks(call), x.split(call.plan.layout.chunk_tokens, 1), strict=True):
        held[rank].append(chunk)
    return held


def _group_chunks(call: Call) -> list[tuple[int, int]]:
    """Chunks of the group's ranks in the order of the sequence: (rank within the group, its local row)."""
    group = call.all_to_all_group
    first = call.plan.rank - group.rank
    return [(rank - first, start) for rank, start in call.plan.layout.owners if first <= rank < first + group.ranks]


def _with_heads_of_rank(sinks: Tensor | None, heads: HeadShare, call: Call) -> tuple[Tensor | None, Call]:
    """The sinks of the query heads that this rank computes, and the call with their slopes."""
    shares = (
        None if x is None else F.pad(x, (0, heads.padding)).split(heads.share)[call.all_to_all_group.rank]
        for x in (sinks, call.slopes)
    )
    rank_sinks, slopes = shares
    return rank_sinks, replace(call, slopes=slopes)
