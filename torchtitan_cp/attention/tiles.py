"""Rectangles of the mask: what one kernel call computes, and how a banded tile splits into dense ones."""

from functools import lru_cache
from typing import NamedTuple

from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.merge import Rows

ALL_ROWS = -1
FULL = Band()
CAUSAL = Band(None, 0)


class Tile(NamedTuple):
    """Local query rows [q_start, q_stop) against key rows [k_start, k_stop), as far as `band` allows.

    Key rows index the KV of the step (the local shard, or the rows received). The band bounds
    (key row - k_start) - (query row - q_start), and every query row sees a key of the tile. `row` is the
    batch row, or ALL_ROWS. A `flipped` tile has a causal band that applies after its rows are reversed: a query
    sees the keys from the diagonal on.
    """

    row: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    band: Band = FULL
    flipped: bool = False

    @property
    def pairs(self) -> int:
        """Allowed (query, key) pairs."""
        return count_pairs(self.q_stop - self.q_start, self.k_stop - self.k_start, self.band)

    def precedes(self, other: "Tile") -> bool:
        """Whether all of its queries and keys lie before those of another tile."""
        before = self.q_stop <= other.q_start and self.k_stop <= other.k_start
        return self.row < other.row or (self.row == other.row and before)

    def moved(self, queries: int, keys: int) -> "Tile":
        """The tile, shifted by this many rows of queries and keys."""
        row, q_start, q_stop, k_start, k_stop, band, flipped = self
        return Tile(row, q_start + queries, q_stop + queries, k_start + keys, k_stop + keys, band, flipped)


def rows_of(tile: Tile) -> tuple[Rows, Rows]:
    """Indices of a tile's queries and keys: (batch rows, local rows) each."""
    batch = slice(None) if tile.row == ALL_ROWS else slice(tile.row, tile.row + 1)
    return (batch, slice(tile.q_start, tile.q_stop)), (batch, slice(tile.k_start, tile.k_stop))


def count_pairs(queries: int, keys: int, band: Band, distance: int = 0) -> int:
    """Allowed pairs of a rectangle whose first key lies `distance` after its first query."""
    if band == CAUSAL and queries - distance <= keys and distance <= 0:
        return queries * (queries + 1 - 2 * distance) // 2
    upper = queries * keys if band.high is None else _pairs_up_to(queries, keys, band.high - distance)
    lower = 0 if band.low is None else _pairs_up_to(queries, keys, band.low - distance - 1)
    return upper - lower


def _pairs_up_to(queries: int, keys: int, high: int) -> int:
    """Pairs (i, j) with j - i <= high: row i sees min(max(i + high + 1, 0), keys) keys."""
    first = max(0, -high)
    if first >= queries:
        return 0
    saturated = min(max(keys - high - 1, first), queries)  # from this row on, a query sees all keys
    growing = saturated - first
    return growing * (first + high + 1) + growing * (growing - 1) // 2 + (queries - saturated) * keys


@lru_cache(maxsize=4096)
def dense_parts(queries: int, keys: int, band: Band) -> tuple[Tile, ...]:
    """A banded tile as full rectangles and causal squares that do not overlap, for kernels that take no band.

    A causal square holds the keys up to its diagonal. If flipped, it holds the keys from the diagonal on: the same
    kernel call on reversed rows.
    """
    if band == FULL:
        return (Tile(ALL_ROWS, 0, queries, 0, keys),)
    if band.low is None:
        assert band.high is not None
        return tuple(_below_diagonal(queries, keys, band.high))
    if band.high is None:
        mirrored = _below_diagonal(queries, keys, keys - queries - band.low)
        return tuple(
            Tile(ALL_ROWS, queries - stop, queries - start, keys - k_stop, keys - k_start, shape, shape == CAUSAL)
            for _, start, stop, k_start, k_stop, shape, _ in mirrored
        )
    return tuple(_between_diagonals(queries, keys, band.low, band.high))


def _below_diagonal(queries: int, keys: int, high: int) -> list[Tile]:
    """Tiles of the pairs (query i, key j) with j - i <= high."""
    first = max(0, -high)  # rows before it see nothing
    seen_by_all = min(high + first, keys)
    square = min(queries - first, keys - seen_by_all)
    parts = []
    if seen_by_all > 0 and queries > first:
        parts.append(Tile(ALL_ROWS, first, queries, 0, seen_by_all))
    if square > 0:
        end = seen_by_all + square
        parts.append(Tile(ALL_ROWS, first, first + square, seen_by_all, end, CAUSAL))
        if first + square < queries:
            parts.append(Tile(ALL_ROWS, first + square, queries, seen_by_all, end))
    return parts


def _between_diagonals(queries: int, keys: int, low: int, high: int) -> list[Tile]:
    """Tiles of the pairs with low <= j - i <= high, in blocks of as many queries as keep the two diagonals apart."""
    block, parts = max(1, high - low), []
    for start in range(0, queries, block):
        rows = min(block, queries - start)
        # Only the low bound can exclude keys of this block before `middle`, and only the high bound those from it on.
        middle = start + high + (high == low)
        for k_start, k_stop, band in (
            (max(0, start + low), min(keys, middle), Band(low=low)),
            (max(0, middle), min(keys, middle + rows), Band(high=high)),
        ):
            if k_start < k_stop and (high > low or band.high is None):
                inner = band.shifted(k_start - start, rows, k_stop - k_start)
                parts += [part.moved(start, k_start) for part in dense_parts(rows, k_stop - k_start, inner)]
    return parts
