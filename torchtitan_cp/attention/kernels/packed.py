"""Many tiles in one kernel call: their rows one tile after another, with cumulative lengths ("varlen").

With packed documents a rank has a short tile for each document that it holds. Tiles of one kind that share no row of
queries or keys are gathered once, computed in one call and merged once.
"""

from collections.abc import Hashable
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.caching import BoundedCache, to_device
from torchtitan_cp.attention.mask import Span, count_rows, merge_spans
from torchtitan_cp.attention.merge import Rows
from torchtitan_cp.attention.tiles import ALL_ROWS, Tile

INDEX_BYTES = 256 << 20  # for the row indices of the latest steps


class Packed(NamedTuple):
    """Tiles of one call of a kernel that takes rows `[T, H, D]`.

    Attributes:
        kind: what they have in common to the kernel, such as a window.
        cu_seqlens_q, cu_seqlens_k: `[tiles + 1]` int32 on the device, cumulative rows of the tiles.
        max_q, max_k: rows of the longest tile.
    """

    kind: Hashable
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int


_calls = BoundedCache(INDEX_BYTES)


def pack(tiles: tuple[Tile, ...], kind: Hashable, like: Tensor) -> tuple[Rows, Rows, Packed]:
    """(queries, keys, Packed) of tiles that ascend and share no row; a tile of all batch rows is repeated for each.

    Args:
        kind: what the tiles have in common to the kernel.
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
    """Indices of queries and of keys, given as ascending (batch row, start, stop).

    If adjacent batch rows have the same spans, the index gives `[B, n]` rows, by slices where possible; else `[n]`.
    """
    spans_by_row = [
        {row: merge_spans(span[1:] for span in group) for row, group in groupby(side, itemgetter(0))} for side in sides
    ]
    rows = list(spans_by_row[0])
    if rows[-1] - rows[0] == len(rows) - 1 and all(len({*spans.values()}) == 1 for spans in spans_by_row):
        batch = slice(None) if rows == [ALL_ROWS] else slice(rows[0], rows[-1] + 1)
        return [(batch, _row_index(spans[rows[0]], like)) for spans in spans_by_row]
    indices: list[Rows] = []
    for spans in spans_by_row:
        counts = torch.tensor([count_rows(spans[row]) for row in rows])
        batch_rows = to_device(torch.tensor(rows).repeat_interleave(counts), like)
        indices.append((batch_rows, _row_index(sum(spans.values(), ()), like)))
    return indices


def _row_index(spans: tuple[Span, ...], like: Tensor) -> slice | Tensor:
    """The rows of the spans, one span after the other."""
    return slice(*spans[0]) if len(spans) == 1 else to_device(torch.cat([torch.arange(*span) for span in spans]), like)
