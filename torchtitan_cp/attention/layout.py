"""Which rows of the sequence each rank holds, the same number on each, and what that costs in pairs and messages.

The layouts of equal chunks stand here; layouts.py has the one of packed documents, and all of them by name.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.errors import LayoutError
from torchtitan_cp.attention.mask import AttentionMask, Span, merge_spans
from torchtitan_cp.attention.tiles import ALL_ROWS, CAUSAL, count_pairs

MOST_CHUNKS = 64
# A further chunk of a rank counts as this part of its work: smaller ones make smaller tiles.
CHUNK_COST = 0.005


class Segment(NamedTuple):
    """Consecutive tokens on one rank: global positions [start, stop), from local row `local`."""

    rank: int
    local: int
    start: int
    stop: int

    @property
    def rows(self) -> Span:
        """The local rows."""
        return self.local, self.local + self.stop - self.start


# As Segment._make, in a third of the time: a plan makes a thousand.
new_segment = partial(tuple.__new__, Segment)


@dataclass(frozen=True)
class Layout:
    """Which rows of the sequence each rank holds.

    Attributes:
        spans: per rank, the (start, stop) global positions of its rows in local order, which ascends; touching
            ones are joined.
        name: how they were assigned; layouts of the same spans are equal whatever their names.
    """

    spans: tuple[tuple[Span, ...], ...]
    name: str = field(default="documents", compare=False)

    @classmethod
    def of(cls, held: Iterable[Iterable[Span]], name: str = "documents") -> "Layout":
        """The layout of ranks that hold these spans, in any order, empty ones among them."""
        return cls(tuple([merge_spans([span for span in spans if span[0] < span[1]]) for spans in held]), name)

    @property
    def ranks(self) -> int:
        """P."""
        return len(self.spans)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The spans of all ranks in the order of the sequence."""
        segments = []
        for rank, spans in enumerate(self.spans):
            local = 0
            for start, stop in spans:
                segments.append(new_segment((rank, local, start, stop)))
                local += stop - start
        return tuple(sorted(segments, key=itemgetter(2)))

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Global position of each local token, `[S/P]` int64, made on a device (default: the CPU)."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.spans[rank]])

    def split(self, size: int) -> "Layout":
        """The layout in which `size` consecutive ranks share the rows of each of these; `joined` is its inverse."""
        tokens = self.segments[-1].stop // self.ranks // size
        held: list[list[Span]] = [[] for _ in range(self.ranks * size)]
        for rank, local, start, stop in self.segments:
            while start < stop:
                part, inside = divmod(local, tokens)
                end = min(stop, start + tokens - inside)
                held[rank * size + part].append((start, end))
                local, start = local + end - start, end
        return Layout.of(held, self.name)

    def joined(self, size: int) -> "Layout":
        """The layout in which each `size` consecutive ranks are one."""
        joined = (sum(self.spans[first : first + size], ()) for first in range(0, self.ranks, size))
        return Layout.of(joined, self.name)


@lru_cache(maxsize=64)
def cut_by_document(layout: Layout, documents: tuple[Span, ...]) -> tuple[tuple[Segment, ...], ...]:
    """Each document's segments on all ranks, in the order of the sequence."""
    segments, result, stop = iter(layout.segments), [], 0
    for begin, last in documents:
        found = []
        while begin < last:
            while stop <= begin:
                segment = next(segments)
                rank, local, start, stop = segment
            end = stop if stop < last else last
            whole = start == begin and stop == end
            found.append(segment if whole else new_segment((rank, local + begin - start, begin, end)))
            begin = end
        result.append(tuple(found))
    return tuple(result)


def documents_of(
    layout: Layout, mask: AttentionMask, sequence_length: int
) -> Iterator[tuple[int, tuple[Segment, ...]]]:
    """Yields (batch row, or ALL_ROWS where there is one; segments) of each document."""
    rows = mask.documents(sequence_length)
    for number, documents in enumerate(rows):
        for segments in cut_by_document(layout, documents):
            yield ALL_ROWS if len(rows) == 1 else number, segments


class PairsBefore(dict[int, int]):
    """Allowed (query, key) pairs of the queries before a position, summed over the mask's batch rows.

    Attributes:
        borders: where the documents of all rows begin and end, from 0 to S.
    """

    def __init__(self, mask: AttentionMask, sequence_length: int) -> None:
        rows, self.band, self.causal = mask.documents(sequence_length), mask.band, mask.band == CAUSAL
        self.borders = sorted({0, sequence_length, *chain.from_iterable(chain.from_iterable(rows))})
        self.rows: list[tuple[tuple[Span, ...], list[int], list[int]]] = []  # documents, starts, pairs before them
        for documents in rows:
            pairs = [count_pairs(stop - start, stop - start, self.band) for start, stop in documents]
            self.rows.append((documents, [start for start, _ in documents], [*accumulate(pairs, initial=0)]))
        if len(rows) == 1:  # most positions asked for are starts
            self.update(zip(*self.rows[0][1:], strict=False))

    def __missing__(self, position: int) -> int:
        total = 0
        for documents, starts, before in self.rows:
            number = bisect_left(starts, position) - 1
            if number >= 0:
                start, stop = documents[number]
                rows = (position if position < stop else stop) - start
                inside = rows * (rows + 1) // 2 if self.causal else count_pairs(rows, stop - start, self.band)
                total += before[number] + inside
        self[position] = total
        return total


pairs_before = lru_cache(maxsize=16)(PairsBefore)


def rank_areas(layout: Layout, mask: AttentionMask, sequence_length: int) -> list[int]:
    """Allowed (query, key) pairs of each rank's queries, summed over the mask's batch rows."""
    before = pairs_before(mask, sequence_length)
    return [sum([before[stop] - before[start] for start, stop in spans]) for spans in layout.spans]


def rows_sent(
    layout: Layout, mask: AttentionMask, sequence_length: int, ranks_per_node: int
) -> tuple[list[int], list[int]]:
    """Rows of keys that each rank sends in a ring, (in all, to other nodes), summed over the mask's batch rows.

    Under a window this is an upper bound: a whole segment is counted where a part of it is read.
    """
    sent, crossing, band = [0] * layout.ranks, [0] * layout.ranks, mask.band
    # Sets of ranks are the bits of a number: these are others, and those in other nodes.
    others = [~(1 << rank) for rank in range(layout.ranks)]
    far = [~(((1 << ranks_per_node) - 1) << rank // ranks_per_node * ranks_per_node) for rank in range(layout.ranks)]
    for _, segments in documents_of(layout, mask, sequence_length):
        if len(segments) == 1:
            continue
        # Without a causal order, or with a window to the right, earlier queries read a row too.
        readers = 0 if band.high == 0 else sum({1 << segment.rank for segment in segments})
        for rank, _, start, stop in reversed(segments):
            reading = readers
            if band.low is not None:
                reading &= sum({1 << s.rank for s in segments if s.start + band.low < stop})
            sent[rank] += (stop - start) * (reading & others[rank]).bit_count()
            crossing[rank] += (stop - start) * (reading & far[rank]).bit_count()
            readers |= 1 << rank
    return sent, crossing


def contiguous(sequence_length: int, ranks: int) -> Layout:
    """Give rank r the r-th of P equal chunks. Unbalanced under a causal mask.

    Raises:
        LayoutError: if S is not divisible by P.
    """
    check_divisible(sequence_length, ranks, f"cp = {ranks}")
    tokens = sequence_length // ranks
    return Layout(tuple(((rank * tokens, (rank + 1) * tokens),) for rank in range(ranks)), "contiguous")


def zigzag(sequence_length: int, ranks: int) -> Layout:
    """Give each rank one chunk from the head of the sequence and its mirror from the tail.

    Under a causal mask later queries see more keys, so a head chunk (cheap) pairs with a tail chunk
    (expensive) and every rank does the same work. Source: Megatron-Core's dual-chunk order.

    Args:
        sequence_length: S, in tokens; must be divisible by 2 * ranks.
        ranks: P, size of the context-parallel group.

    Raises:
        LayoutError: if S is not divisible by 2 * P. The message names the nearest lengths that are.
    """
    if ranks == 1:
        return contiguous(sequence_length, 1)
    check_divisible(sequence_length, 2 * ranks, f"2 x cp = {2 * ranks}")
    tokens = sequence_length // (2 * ranks)
    return _of_chunks("zigzag", tokens, ((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))


def balanced(sequence_length: int, ranks: int, mask: AttentionMask) -> Layout:
    """Cut finer, and assign the chunks so that every rank has the same area of the mask.

    Of 1, 2, 4 and 8 chunks a rank, take the number whose busiest rank has the least to do, where each further
    chunk counts as half a percent of work, since larger chunks make larger tiles. Where a few long documents
    hold most of the area, one such chunk exceeds a rank's share, and up to 64 are tried. Chunks are assigned
    largest first, each to the rank with the least area so far that has room (Graham's LPT rule, 1969).

    Raises:
        LayoutError: if S is not divisible by P.
    """
    best = (math.inf, contiguous(sequence_length, ranks))
    before = pairs_before(mask, sequence_length)
    held, even = 1, before[sequence_length] / ranks
    while sequence_length % (held * ranks) == 0 and held <= MOST_CHUNKS:
        penalty = 1 + CHUNK_COST * held
        # Even a perfect balance of so many chunks would cost more than the best so far.
        if best[0] <= even * penalty:
            break
        tokens = sequence_length // (held * ranks)
        ends = [before[stop] for stop in range(0, sequence_length + 1, tokens)]
        areas = [stop - start for start, stop in pairwise(ends)]
        chunks, busiest = _assign_chunks(areas, ranks)
        if busiest * penalty < best[0]:
            best = (busiest * penalty, _of_chunks("balanced", tokens, chunks))
        held *= 2
    return best[1]


def _of_chunks(name: str, tokens: int, chunks: Iterable[Iterable[int]]) -> Layout:
    """The layout of ranks that hold these of equal chunks."""
    return Layout.of(([(chunk * tokens, (chunk + 1) * tokens) for chunk in held] for held in chunks), name)


def _assign_chunks(areas: list[int], ranks: int) -> tuple[list[list[int]], int]:
    """(chunks of each rank, area of the busiest): the same number to each, largest first to the least busy."""
    room = len(areas) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    busiest = 0
    for chunk in sorted(range(len(areas)), key=lambda chunk: -areas[chunk]):
        area, rank = heapq.heappop(heap)
        held[rank].append(chunk)
        area += areas[chunk]
        busiest = max(busiest, area)
        if len(held[rank]) < room:
            heapq.heappush(heap, (area, rank))
    return held, busiest


def check_divisible(sequence_length: int, unit: int, name: str) -> None:
    """Raise LayoutError unless a sequence divides by a unit that is called `name`."""
    if sequence_length < 1 or sequence_length % unit:
        lower = sequence_length // unit * unit
        nearest = f"{lower} or {lower + unit}" if lower > 0 else f"{unit}"
        raise LayoutError(f"a sequence of {sequence_length} tokens is not divisible by {name}", fix=f"use {nearest}")
