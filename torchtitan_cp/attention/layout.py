"""Which rows of the sequence each rank holds, the same number on each, and what that costs in pairs and messages.

layouts.py builds layouts by name.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.caching import hashed_once, keep_newest
from torchtitan_cp.attention.mask import AttentionMask, Span, merge_spans
from torchtitan_cp.attention.tiles import ALL_ROWS, count_pairs


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


@hashed_once
@dataclass(frozen=True)
class Layout:
    """Which rows of the sequence each rank holds.

    Attributes:
        spans: per rank, the (start, stop) global positions of its rows in local order, which ascends; spans that touch
            are joined.
        name: how the rows were assigned; layouts with the same spans are equal whatever their names.
    """

    spans: tuple[tuple[Span, ...], ...]
    name: str = field(default="documents", compare=False)

    @classmethod
    def of(cls, spans_by_rank: Iterable[Iterable[Span]], name: str = "documents") -> "Layout":
        """The layout of ranks that hold these spans, which may be empty and in any order."""
        return cls(tuple([merge_spans([span for span in spans if span[0] < span[1]]) for spans in spans_by_rank]), name)

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
                segments.append(Segment(rank, local, start, stop))
                local += stop - start
        return tuple(sorted(segments, key=attrgetter("start")))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Global position of each local token, `[S/P]` int64, made on a device (default: the CPU)."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.spans[rank]])

    @keep_newest
    def runs(self, mask: AttentionMask, sequence_length: int) -> tuple[tuple[int, ...], ...]:
        """Per rank, the local rows at which its runs begin. Within a run no document enters or leaves the rank.

        So the number of runs depends on how many documents are cut, not on how many there are. In padding a run may end
        for no reason.
        """
        rows = mask.documents(sequence_length)
        borders = {0, sequence_length} | set.intersection(*({*chain.from_iterable(documents)} for documents in rows))
        runs_by_rank = []
        for spans in self.spans:
            runs: list[int] = []
            local = previous_stop = 0
            for start, stop in spans:
                if not runs or not borders.issuperset((previous_stop, start)):
                    runs.append(local)
                local += stop - start
                previous_stop = stop
            runs_by_rank.append(tuple(runs))
        return tuple(runs_by_rank)

    def split(self, size: int) -> "Layout":
        """The layout in which `size` consecutive ranks share the rows of each rank here; `joined` is its inverse."""
        tokens = self.segments[-1].stop // self.ranks // size
        spans_by_rank: list[list[Span]] = [[] for _ in range(self.ranks * size)]
        for rank, local, start, stop in self.segments:
            while start < stop:
                part, inside = divmod(local, tokens)
                end = min(stop, start + tokens - inside)
                spans_by_rank[rank * size + part].append((start, end))
                local, start = local + end - start, end
        return Layout.of(spans_by_rank, self.name)

    def joined(self, size: int) -> "Layout":
        """The layout in which each `size` consecutive ranks are one."""
        joined = (sum(self.spans[first : first + size], ()) for first in range(0, self.ranks, size))
        return Layout.of(joined, self.name)


@keep_newest
def cut_by_document(layout: Layout, documents: tuple[Span, ...]) -> tuple[tuple[Segment, ...], ...]:
    """Each document's segments on all ranks, in the order of the sequence."""
    remaining, cut = iter(layout.segments), []
    segment = next(remaining)
    for start, document_stop in documents:
        segments = []
        while start < document_stop:
            while segment.stop <= start:
                segment = next(remaining)
            stop = min(segment.stop, document_stop)
            segments.append(Segment(segment.rank, segment.local + start - segment.start, start, stop))
            start = stop
        cut.append(tuple(segments))
    return tuple(cut)


def documents_of(
    layout: Layout, mask: AttentionMask, sequence_length: int
) -> Iterator[tuple[int, tuple[Segment, ...]]]:
    """Yields (batch row, or ALL_ROWS if the mask has only one; segments) of each document."""
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
        rows, self.band = mask.documents(sequence_length), mask.band
        self.borders = sorted({0, sequence_length, *chain.from_iterable(chain.from_iterable(rows))})
        self.rows: list[tuple[tuple[Span, ...], list[int], list[int]]] = []  # documents, starts, pairs before them
        for documents in rows:
            pairs = [count_pairs(stop - start, stop - start, self.band) for start, stop in documents]
            self.rows.append((documents, [start for start, _ in documents], [*accumulate(pairs, initial=0)]))
        if len(rows) == 1:  # most positions that are looked up are starts of documents
            self.update(zip(*self.rows[0][1:], strict=False))

    def __missing__(self, position: int) -> int:
        total = 0
        for documents, starts, pairs_before_start in self.rows:
            number = bisect_left(starts, position) - 1
            if number >= 0:
                start, stop = documents[number]
                queries = min(position, stop) - start
                total += pairs_before_start[number] + count_pairs(queries, stop - start, self.band)
        self[position] = total
        return total


pairs_before = keep_newest(PairsBefore)


def rank_areas(layout: Layout, mask: AttentionMask, sequence_length: int) -> list[int]:
    """Allowed (query, key) pairs of each rank's queries, summed over the mask's batch rows."""
    before = pairs_before(mask, sequence_length)
    return [sum([before[stop] - before[start] for start, stop in spans]) for spans in layout.spans]


def rows_sent(
    layout: Layout, mask: AttentionMask, sequence_length: int, ranks_per_node: int
) -> tuple[list[int], list[int]]:
    """Rows of keys that each rank sends in a ring, (in all, to other nodes), summed over the mask's batch rows.

    Under a window this is an upper bound: each rank that reads a segment is assumed to read as many of its rows as the
    window can reach.
    """
    sent, crossing, band = [0] * layout.ranks, [0] * layout.ranks, mask.band
    high = sequence_length if band.high is None else band.high
    # A set of ranks is an integer with one bit per rank. Per rank: all others, and those in other nodes.
    others = [~(1 << rank) for rank in range(layout.ranks)]
    far = [~(((1 << ranks_per_node) - 1) << rank // ranks_per_node * ranks_per_node) for rank in range(layout.ranks)]
    for _, segments in documents_of(layout, mask, sequence_length):
        if len(segments) == 1:
            continue
        # Without a causal order, or with a window to the right, earlier queries read a row too.
        readers = 0 if band.high == 0 else sum({1 << segment.rank for segment in segments})
        for rank, _, start, stop in reversed(segments):
            rows, reading = stop - start, readers
            if band.low is not None:
                reading = sum({1 << s.rank for s in segments if s.start + band.low < stop and start < s.stop + high})
                rows = min(rows, high - band.low)
            sent[rank] += rows * (reading & others[rank]).bit_count()
            crossing[rank] += rows * (reading & far[rank]).bit_count()
            readers |= 1 << rank
    return sent, crossing
