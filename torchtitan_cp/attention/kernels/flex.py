"""flex_attention, compiled: all tiles of a step in one call, whatever the mask.

The block mask is made in closed form from the tiles of one step. The host computes whether each block of queries and
keys is empty, full or partial; within a partial block, each query's intervals of keys decide. Nothing of the size of
the full sequence squared exists. A loader's thread can do the host's part ahead (`prepare`), and the masks of the
latest steps are cached, up to MASK_BYTES.

flex_attention's backward uses the log-sum-exp of its own call, not one merged over steps. But the merge is
differentiable, and flex passes gradients through the log-sum-exp: with w = exp(lse_step - lse), a step's output gets
w dout, and its log-sum-exp gets w (dout . (out_step - out)). So the backward runs the step's forward again and
differentiates it with these, which costs one forward more than in other kernels.

Source: Dong et al., Flex Attention, 2024; torch.nn.attention.flex_attention.
"""

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from torchtitan_cp.attention.caching import BoundedCache, to_device
from torchtitan_cp.attention.compiling import compile_whole, with_autograd
from torchtitan_cp.attention.kernels.kernel import HALF, WIDEST, Kernel, ScoreMod
from torchtitan_cp.attention.tiles import ALL_ROWS, Tile, rows_of

BLOCK = 128
MASK_BYTES = 512 << 20  # on the device, and again on the host; 1M tokens on 8 ranks take 129 MiB per plan


def forward(q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], scores: ScoreMod) -> tuple[Tensor, Tensor]:
    with with_autograd(), torch.no_grad():
        return _run(q, k, v, tiles, scores)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: tuple[Tile, ...], scores: ScoreMod
) -> tuple[Tensor, Tensor, Tensor]:
    with with_autograd():
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out_step, lse_step = _run(leaves[0], leaves[1], leaves[2], tiles, scores)
        seen = lse_step.detach() > float("-inf")
        weight = torch.where(seen, torch.exp(lse_step.detach() - lse), 0.0).unsqueeze(-1)
        dout_step = weight * dout.float()
        dlse_step = (dout_step * (out_step.detach().float() - out.float())).sum(-1)
        dq, dk, dv = torch.autograd.grad((out_step, lse_step), leaves, (dout_step.to(out_step.dtype), dlse_step))
    return dq, dk, dv


def _run(q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], scores: ScoreMod) -> tuple[Tensor, Tensor]:
    """(out, lse) of a step; rows that no tile reaches have out 0 and lse -inf."""
    mask, hidden = block_mask(tiles, q, k.shape[1])
    out, extra = _attention(q.is_cuda)(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score_mod=_score_change(scores),
        block_mask=mask,
        scale=scores.scale,
        enable_gqa=q.shape[2] != k.shape[2],
        return_aux=flex.AuxRequest(lse=True),
        kernel_options={"BACKEND": "TRITON"},  # not the decoding kernel, which does not support all short queries
    )
    hidden = hidden[:, :, None]
    out = out.transpose(1, 2).masked_fill(hidden.unsqueeze(-1), 0.0)
    return out, cast(Tensor, extra.lse).transpose(1, 2).float().masked_fill(hidden, float("-inf"))


def _score_change(scores: ScoreMod) -> Callable[..., Tensor] | None:
    """The function that changes a scaled score: (score, batch row, head, query row, key row) -> score."""
    cap = scores.softcap
    return (lambda score, b, h, q_row, k_row: cap * torch.tanh(score / cap)) if cap else None


@cache
def _attention(on_cuda: bool) -> Callable[..., tuple[Tensor, flex.AuxOutput]]:
    """flex_attention; compiled on CUDA, where the fallback would hold every score."""
    attention = cast(Callable[..., tuple[Tensor, flex.AuxOutput]], flex.flex_attention)
    return compile_whole(attention) if on_cuda else attention


_prepared, _masks = BoundedCache(MASK_BYTES), BoundedCache(MASK_BYTES)


def prepare(tiles: tuple[Tile, ...], rows: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """The host's part of a mask; see `key_intervals` and `classify_blocks`.

    Args:
        rows: 1 if every tile is of all batch rows, else B.
        queries, keys: rows of the step's q and k.
    """
    key = tiles, rows, queries, keys
    return _prepared.get(key, None, lambda: classify_blocks(key_intervals(tiles, rows, queries), queries, keys))


def block_mask(tiles: tuple[Tile, ...], q: Tensor, keys: int) -> tuple[flex.BlockMask, Tensor]:
    """The mask of a step's tiles for `[B, Sq, H, D]` queries and `keys` rows of keys, on the device of `q`.

    Returns:
        The mask, which has one batch row if every tile covers all; which query rows see nothing, `[1 or B, Sq]`.
    """
    rows = 1 if all(tile.row == ALL_ROWS for tile in tiles) else q.shape[0]
    key = (tiles, rows, q.shape[1], keys)

    def make() -> tuple[flex.BlockMask, Tensor, Tensor]:
        intervals, partial, full = (to_device(x, q) for x in prepare(*key))
        lower, upper = intervals.unbind(-1)

        def mask_mod(b: Tensor, h: Tensor, q_row: Tensor, k_row: Tensor) -> Tensor:
            row = b if rows > 1 else torch.zeros_like(b)
            seen = (k_row >= lower[row, 0, q_row]) & (k_row < upper[row, 0, q_row])
            for number in range(1, lower.shape[1]):
                seen = seen | ((k_row >= lower[row, number, q_row]) & (k_row < upper[row, number, q_row]))
            return seen

        blocks = (*flex._dense_to_ordered(partial), *flex._dense_to_ordered(full))
        mask = flex.BlockMask.from_kv_blocks(*blocks, BLOCK, mask_mod, seq_lengths=(q.shape[1], keys))
        return mask, (upper <= lower).all(1), intervals  # the mask refers to the intervals, whose bytes count too

    mask, hidden, _ = _masks.get(key, q, make)
    return mask, hidden


def key_intervals(tiles: tuple[Tile, ...], rows: int, queries: int) -> Tensor:
    """Each query's intervals of keys, `[rows, n, Sq, 2]` int32; n is a power of two, empty intervals are (0, 0)."""
    slots: list[Tensor] = [torch.zeros(rows, queries, 2, dtype=torch.int32)]
    for tile in tiles:
        covered, _ = rows_of(tile)
        slot = next((slot for slot in slots if not slot[covered].any()), None)
        if slot is None:
            slot = torch.zeros_like(slots[0])
            slots.append(slot)
        query, keys = torch.arange(tile.q_stop - tile.q_start), tile.k_stop - tile.k_start
        low = -len(query) if tile.band.low is None else tile.band.low
        high = keys if tile.band.high is None else tile.band.high
        ends = torch.stack([query + low, query + high + 1], -1).clamp(0, keys)
        slot[covered] = (tile.k_start + ends).to(torch.int32)
    empty = (1 << (len(slots) - 1).bit_length()) - len(slots)
    return F.pad(torch.stack(slots, 1), (0, 0, 0, 0, 0, empty))


def classify_blocks(intervals: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """(intervals, which blocks are partial, which are full); the latter two `[rows, 1, Sq/128, Sk/128]` bool."""
    padded = F.pad(intervals, (0, 0, 0, -queries % BLOCK)).unflatten(2, (-1, BLOCK)).unsqueeze(4)
    lower, upper = padded.unbind(-1)  # [rows, n, blocks of queries, 128, 1]
    starts = torch.arange(0, keys, BLOCK)
    first = lower.masked_fill(upper <= lower, keys).amin(3)  # an empty interval begins after the last key
    touched = ((first < starts + BLOCK) & (upper.amax(3) > starts)).any(1)
    full = ((lower.amax(3) <= starts) & (upper.amin(3) >= starts + BLOCK)).any(1)
    return intervals, (touched & ~full).unsqueeze(1), full.unsqueeze(1)


DTYPES = (*HALF, torch.float32)
KERNEL = Kernel(
    forward, backward, "cuda", DTYPES, range(16, WIDEST), whole_steps=True, has_softcap=True, prepare=prepare
)
