"""Many tiles in one kernel call: their rows one tile after another, with cumulative lengths ("varlen").

Packed documents give a rank a short tile for each document that it holds. Tiles that are alike to the kernel, and share
no row of queries or keys, are gathered once, computed in one call and merged once.
"""

from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.caching import BoundedCache, to_device
from torchtitan_cp.attention.mask import Span, count_rows, merge_spans
from torchtitan_cp.attention.merge import Rows
from torchtitan_cp.attention.tiles import ALL_ROWS, Tile

INDEX_BYTES = 256 << 20  # of rows that are gathered, for the newest steps


class Packed(NamedTuple):
    """Tiles of one call of a kernel that takes rows `[T, H, D]`.

    Attributes:
        kind: what the kernel's `kind` says of each of them.
        cu_seqlens_q, cu_seqlens_k: `[tiles + 1]` int32 on the device, rows of the tiles before each.
        max_q, max_k: rows of the longest.
    """

    kind: Any
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int


_calls = BoundedCache(INDEX_BYTES)


def pack(tiles: tuple[Tile, ...], kind: Any, like: Tensor) -> tuple[Rows, Rows, Packed]:
    """(queries, keys, Packed) of tiles that ascend and share no row; a tile of all batch rows counts as one of each.

    Args:
        kind: see Packed.
        like: `[B, Sq, Hq, D]` queries, on the device.
    """

    def make() -> tuple[Rows, Rows, Packed]:
        sides = [[(t.row, t.q_start, t.q_stop) for t in tiles], [(t.row, t.k_start, t.k_stop) for t in tiles]]
        copies = like.shape[0] if tiles[0].row == ALL_ROWS else 1
        lengths = [[stop - start for _, start, stop in spans] * copies for spans in sides]
        cu_seqlens = [torch.tensor([0, *accumulate(of_side)], dtype=torch.int32) for of_side in lengths]
        queries, keys = _indices(sides, like)
        cu_q, cu_k = (to_device(x, like) for x in cu_seqlens)
        return queries, keys, Packed(kind, cu_q, cu_k, *map(max, lengths))

    return _calls.get((tiles, kind, like.shape[0]), like, make)


def _indices(sides: list[list[tuple[int, int, int]]], like: Tensor) -> list[Rows]:
    """Indices of queries and keys that ascend, given as (batch row, first, last).

    Where batch rows have the same tiles, they give `[B, n]` rows, and slices if these lie side by side; else `[n]`.
    """
    held = [
        {row: merge_spans(span[1:] for span in group) for row, group in groupby(spans, itemgetter(0))}
        for spans in sides
    ]
    rows = list(held[0])
    if rows[-1] - rows[0] == len(rows) - 1 and all(len(set(spans.values())) == 1 for spans in held):
        batch = slice(None) if rows == [ALL_ROWS] else slice(rows[0], rows[-1] + 1)
        return [(batch, _local(spans[rows[0]], like)) for spans in held]
    indices: list[Rows] = []
    for spans in held:
        counts = torch.tensor([count_rows(spans[row]) for row in rows])
        batch_rows = to_device(torch.tensor(rows).repeat_interleave(counts), like)
        indices.append((batch_rows, _local(sum(spans.values(), ()), like)))
    return indices


def _local(spans: tuple[Span, ...], like: Tensor) -> slice | Tensor:
    """The rows of spans, one span after the other."""
    return slice(*spans[0]) if len(spans) == 1 else to_device(torch.cat([torch.arange(*span) for span in spans]), like)
