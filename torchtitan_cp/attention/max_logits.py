"""The largest attention score of each head: QK clipping acts on it, and it grows before a loss spikes."""

import torch
from torch import Tensor

from torchtitan_cp.attention.collectives import gather
from torchtitan_cp.attention.kernels.reference import hide
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.plan import Plan, in_global_order
from torchtitan_cp.attention.tiles import rows_of

BLOCK_SCORES = 2**24  # held at once, of one head


@torch.no_grad()
def max_logits(q: Tensor, k: Tensor, plan: Plan, scale: float) -> Tensor:
    """The largest scaled score that the mask allows, over all queries of all ranks and the batch.

    Collective. It costs about half of an attention forward, with the keys of one head at a time in memory;
    no kernel returns its largest score. Source: QK-Clip, Kimi K2 technical report (2025), section 2.1.

    Args:
        q: `[B, S/P, Hq, Dqk]`; k: `[B, S/P, Hkv, Dqk]`.

    Returns:
        `[Hq]`, fp32 (fp64 for fp64), the same on every rank; -inf where nothing is attended to.
    """
    ring, all_to_all_group = groups = plan.process_groups
    per_key = q.shape[2] // k.shape[2]
    largest = torch.full((q.shape[2],), float("-inf"), dtype=accumulation_dtype(q.dtype), device=q.device)
    for head in range(k.shape[2]):
        keys = torch.cat(in_global_order(gather(k[:, :, head], groups), plan.layout, 1), 1)
        for place in range(head * per_key, (head + 1) * per_key):
            largest[place] = _of_head(q[:, :, place].to(largest.dtype) * scale, keys, plan)
    return ring.maximum(all_to_all_group.maximum(largest))


def _of_head(q: Tensor, k: Tensor, plan: Plan) -> Tensor:
    """The largest q . k of this rank's tiles; q `[B, S/P, D]`, k `[B, S, D]`."""
    largest = torch.tensor(float("-inf"), dtype=accumulation_dtype(q.dtype), device=q.device)
    for tile in plan.gathered_tiles:
        (batch, queries), (_, keys) = rows_of(tile)
        k_tile = k[batch, keys].to(largest.dtype)
        block = max(1, BLOCK_SCORES // k_tile.shape[1])
        for number, q_block in enumerate(q[batch, queries].split(block, 1)):
            scores = q_block @ k_tile.mT
            rows, columns = scores.shape[1:]
            seen = hide(scores, tile.band.shifted(-number * block, rows, columns))
            largest = torch.maximum(largest, seen.max())
    return largest
