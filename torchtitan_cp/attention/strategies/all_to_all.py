"""All-to-all exchange: heads are traded for sequence, and a rank computes some heads of all the rows.

q, k and v travel in one exchange. Where heads do not divide, query heads are padded with zeros up to the
next multiple, and a key head is sent to every rank whose query heads read it; its gradients are summed
where it came from. What the exchange made is kept for the backward, which moves only dout and the
gradients. With a ring of several such groups outside (hybrid, a 2-D mesh), the rows of one group together
are a member of the ring. Sources: DeepSpeed-Ulysses (Jacobs et al., 2023); USP (Fang and Zhao, 2024).
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.merge import wide
from torchtitan_cp.attention.strategies import ring
from torchtitan_cp.attention.strategies.strategy import Call, Residuals, Strategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadShare:
    """Which heads each rank of a group computes.

    Attributes:
        query_heads: heads of q that there are; the last ranks' share may run past them.
        share: query heads a rank.
        keys: per rank, the key heads it is sent: as many for each rank, each read by as many of its
            query heads.
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
    """Deal the heads out; says so, once, where that costs padding or copies."""
    share, per_key = -(-query_heads // ranks), query_heads // key_heads
    together = gcd(share, per_key)  # neighbouring query heads of a share that are sure to read one key head
    keys = tuple(
        tuple(min((rank * share + head) // per_key, key_heads - 1) for head in range(0, share, together))
        for rank in range(ranks)
    )
    dealt, sent = HeadShare(query_heads, share, keys), ranks * len(keys[0])
    if dealt.padding:
        logger.info("all_to_all: %d query heads on %d ranks, padded with %d", query_heads, ranks, dealt.padding)
    if sent > key_heads:
        logger.info("all_to_all: %d key heads on %d ranks, sent as %d", key_heads, ranks, sent)
    return dealt


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor, Residuals]:
    heads = share_heads(q.shape[2], k.shape[2], call.trade.ranks)
    parts = [_queries_by_rank(q, heads), _keys_by_rank(k, heads), _keys_by_rank(v, heads)]
    q_rows, k_rows, v_rows = [_join_rows(part, call) for part in _exchange(parts, call)]
    out, lse, residuals = ring.forward(q_rows, k_rows, v_rows, _own_sinks(sinks, heads, call), call)
    # The log-sum-exp rides along as more columns of the output, bit for bit.
    columns = lse.unsqueeze(-1).view(out.dtype)
    (back,) = _exchange([_split_rows(torch.cat([out, columns], -1), call)], call)
    joined = _join_queries(back, heads)
    lse_local = joined[..., v.shape[-1] :].contiguous().view(lse.dtype).squeeze(-1)
    return joined[..., : v.shape[-1]].contiguous(), lse_local, residuals


def backward(
    dout: Tensor, residuals: Residuals, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    heads = share_heads(dout.shape[2], call.key_heads, call.trade.ranks)
    (dout_parts,) = _exchange([_queries_by_rank(dout, heads)], call)
    own_sinks = _own_sinks(sinks, heads, call)
    *gradients, dsinks = ring.backward(_join_rows(dout_parts, call), residuals, own_sinks, call)
    dq, dk, dv = _exchange([_split_rows(x, call) for x in gradients if x is not None], call)
    if dsinks is not None:
        first = call.trade.rank * heads.share
        everyone = dsinks.new_zeros(heads.query_heads + heads.padding)
        everyone[first : first + heads.share] = dsinks
        dsinks = everyone[: heads.query_heads]
    return _join_queries(dq, heads), _sum_keys(dk, heads, call), _sum_keys(dv, heads, call), dsinks


STRATEGY = Strategy(forward, backward)


def _exchange(parts: list[Tensor], call: Call) -> list[Tensor]:
    """Give part i of each `[P, ..]` tensor to rank i, all tensors in one message."""
    received = call.trade.all_to_all(torch.cat([x.flatten(1) for x in parts], 1))
    columns = received.split([x[0].numel() for x in parts], 1)
    return [flat.reshape(x.shape) for flat, x in zip(columns, parts, strict=True)]


def _queries_by_rank(x: Tensor, heads: HeadShare) -> Tensor:
    """`[B, s, Hq, D] -> [P, B, s, share, D]`."""
    padded = F.pad(x, (0, 0, 0, heads.padding)) if heads.padding else x
    return torch.stack(padded.split(heads.share, 2))


def _join_queries(parts: Tensor, heads: HeadShare) -> Tensor:
    """`[P, B, s, share, D] -> [B, s, Hq, D]`."""
    return torch.cat(parts.unbind(), 2)[:, :, : heads.query_heads].contiguous()


def _keys_by_rank(x: Tensor, heads: HeadShare) -> Tensor:
    """`[B, s, Hkv, D] -> [P, B, s, keys, D]`."""
    return torch.stack([x[:, :, list(keys)] for keys in heads.keys])


def _sum_keys(parts: Tensor, heads: HeadShare, call: Call) -> Tensor:
    """`[P, B, s, keys, D] -> [B, s, Hkv, D]`: gradients of a key head that several ranks read are summed."""
    _, batch, rows, _, dim = parts.shape
    total = parts.new_zeros((batch, rows, call.key_heads, dim), dtype=wide(parts.dtype))
    for part, keys in zip(parts, heads.keys, strict=True):
        for place, key in enumerate(keys):
            total[:, :, key] += part[:, :, place]
    return total.to(parts.dtype)


def _join_rows(parts: Tensor, call: Call) -> Tensor:
    """`[P, B, s, h, D] -> [B, P*s, h, D]`: the rows of the group's ranks in the order of the sequence."""
    tokens = call.plan.layout.chunk_tokens
    return torch.cat([parts[rank][:, start : start + tokens] for rank, start in _group_chunks(call)], 1)


def _split_rows(x: Tensor, call: Call) -> Tensor:
    """`[B, P*s, h, D] -> [P, B, s, h, D]`: each rank's own rows."""
    tokens = call.plan.layout.chunk_tokens
    held: list[list[Tensor]] = [[] for _ in range(call.trade.ranks)]
    for place, (rank, _) in enumerate(_group_chunks(call)):
        held[rank].append(x[:, place * tokens : (place + 1) * tokens])
    return torch.stack([torch.cat(chunks, 1) for chunks in held])


def _group_chunks(call: Call) -> list[tuple[int, int]]:
    """Chunks of the group's ranks in the order of the sequence: (rank within the group, its local row)."""
    size = call.trade.ranks
    first = call.plan.rank // size * size
    return [(rank - first, start) for rank, start in call.plan.layout.owners if first <= rank < first + size]


def _own_sinks(sinks: Tensor | None, heads: HeadShare, call: Call) -> Tensor | None:
    """The sinks of the query heads that this rank computes."""
    return None if sinks is None else F.pad(sinks, (0, heads.padding)).split(heads.share)[call.trade.rank]
