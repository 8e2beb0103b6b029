"""Assigns packed documents to ranks, whole where they fit: who holds all of a document exchanges no keys for it.

Every rank gets the same number of tokens and the same area of the mask. Documents are placed largest first, each
on the rank with the most work left to take, or split over as few ranks as can take it. The shortest ones fill up what
is left, and only the last of them are cut to make the counts exact. A rank's share of a long document is rows from its
head and rows from its tail, as many of each as give the rank its area: zigzag is the case of one document on all
ranks. Where ranks sit in nodes, documents are assigned to the nodes first and then, within each, to its ranks.
"""

import heapq
from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from torchtitan_cp.attention.mask import Band, Span
from torchtitan_cp.attention.tiles import CAUSAL, count_pairs

# A document is placed whole on a rank that it overfills by no more than this fraction of an even share of the work.
SLACK = 0.05
# Times that the cuts of documents that share bins are worked out, each with the newest cuts of the others.
SWEEPS = 2
# An assignment whose busiest rank has at most so many times the mean is taken.
EVEN = 1.05


class Part(NamedTuple):
    """Rows of a document: [head, head_stop) and [tail, tail_stop), global positions. Sorts by area.

    Attributes:
        area: allowed (query, key) pairs of these rows' queries.
        tokens: how many rows.
        document: (start, stop) of the whole document; empty for rows between documents, which see no keys.
    """

    area: int
    tokens: int
    document: Span
    head: int
    head_stop: int
    tail: int
    tail_stop: int


@dataclass(slots=True)
class Bin:
    """A rank, or a node of ranks, while it is filled.

    Attributes:
        tokens: that it still takes.
        load: work given to it beyond what the shortest documents will bring, less an even share.
        area: pairs that it lacks of an even share.
        parts: what it was given.
    """

    tokens: int
    load: float
    area: float
    parts: list[Part] = field(default_factory=list)


@dataclass(slots=True)
class Split:
    """A document that several bins share.

    Attributes:
        part: all of its rows.
        takers: the bins.
        cut: the rows of each; until the document is cut, only how many, and an estimate of their area.
    """

    part: Part
    takers: list[Bin] = field(default_factory=list)
    cut: list[Part] = field(default_factory=list)


def assign_documents(
    documents: tuple[Span, ...], sequence_length: int, band: Band, ranks: int, ranks_per_node: int
) -> list[list[Span]]:
    """Spans of the sequence for each rank, S/P tokens in all, in any order and some of them empty.

    Where documents cannot be assigned evenly to nodes first, they are assigned to all ranks at once; in one node, with
    more of them to fill up with.

    Args:
        documents: (start, stop) of each, in order. Rows outside of them attend to nothing and are assigned too.
        sequence_length: S; divisible by `ranks`, and these by `ranks_per_node`.
        band: what a query of a document sees by distance.
    """
    mask, end, parts = DocumentMask(band), 0, []
    for start, stop in (*documents, (sequence_length, sequence_length)):
        if start > end:
            parts.append(Part(0, start - end, (end, end), end, start, start, start))
        if stop > start:
            area = mask.count(start, stop, (start, stop))
            parts.append(Part._make((area, stop - start, (start, stop), start, stop, stop, stop)))
        end = stop
    parts.sort(reverse=True)
    tokens, even = sequence_length // ranks, sum(part.area for part in parts) / ranks
    several = ranks_per_node < ranks
    nodes = mask.assign(parts, ranks // ranks_per_node, tokens * ranks_per_node, 0.2) if several else [parts]
    held: list[list[Part]] = []
    at_once, busiest = held, 0
    for node in nodes:
        found = mask.assign(node, ranks_per_node, tokens, 0.2)
        held, busiest = [*held, *found], max(busiest, _busiest_area(found))
        if busiest > EVEN * even:
            at_once = at_once or mask.assign(parts, ranks, tokens, 0.2 if several else 0.5)
            # The other nodes cannot make it any better.
            if busiest > _busiest_area(at_once):
                held = at_once
                break
    return [[span for part in rows for span in (part[3:5], part[5:7])] for rows in held]


def _busiest_area(held: list[list[Part]]) -> int:
    """Pairs of the bin with the most, of these bins' parts."""
    return max(sum(part.area for part in parts) for parts in held)


class DocumentMask:
    """What a query of a document sees, and the ways to assign and cut documents that go by it."""

    def __init__(self, band: Band) -> None:
        self.band, self.causal = band, band == CAUSAL

    def count(self, start: int, stop: int, document: Span) -> int:
        """Allowed pairs of the queries [start, stop) of a document."""
        if self.causal:
            return (stop - start) * (start + stop + 1 - 2 * document[0]) // 2
        return count_pairs(stop - start, document[1] - document[0], self.band, document[0] - start)

    def assign(self, parts: list[Part], count: int, tokens: int, fill_fraction: float) -> list[list[Part]]:
        """The parts of each of `count` bins that take so many tokens each.

        Args:
            fill_fraction: the shortest documents that hold this fraction of the tokens fill the bins up at the end.
        """
        parts = sorted(parts, reverse=True)
        even = sum(part.area for part in parts) / count
        first, density = _find_filling(parts, fill_fraction * count * tokens, even)
        even_work = even - density * tokens
        bins = [Bin(tokens, -even_work, even) for _ in range(count)]
        ready, splits = bins.copy(), []  # bins by load
        for part in parts[:first]:
            work = part.area - density * part.tokens
            if not _give(part, work, ready, SLACK * even_work - work):
                splits.append(_split(part, ready, work - SLACK * even_work))
        self._fill(parts[first:], [one for one in bins if one.tokens])
        for one in bins:
            one.area -= sum([part.area for part in one.parts])
        for split in splits * min(SWEEPS, len(splits)):
            self._cut_evenly(split)
        for split in splits:
            for taker, part in zip(split.takers, split.cut, strict=True):
                taker.parts.append(part)
        return [one.parts for one in bins]

    def _fill(self, parts: list[Part], bins: list[Bin]) -> None:
        """Give short documents to the bins with the most room until these are full; what fits nowhere is cut."""
        left, rooms = [], [(-one.tokens, number) for number, one in enumerate(bins)]
        heapq.heapify(rooms)
        for part in parts:
            room, number = rooms[0]
            if part.tokens <= -room:
                bins[number].parts.append(part)
                heapq.heapreplace(rooms, (room + part.tokens, number))
            else:
                left.append(part)
        for part in left:
            while part.tokens:
                room, number = rooms.pop()
                taken, part = self.cut(part, min(part.tokens, -room), 0)
                bins[number].parts.append(taken)
                if room + taken.tokens:
                    rooms.append((room + taken.tokens, number))

    def _cut_evenly(self, split: Split) -> None:
        """Cut a document so that all of its bins lack, or exceed, the same area."""
        rest, shares = split.part, list(zip(split.takers, split.cut, strict=True))
        lacking = sum([taker.area + share.area for taker, share in shares]) - rest.area
        for number, (taker, share) in enumerate(shares):
            taken = rest
            taker.area += share.area
            if share.tokens < rest.tokens:
                taken, rest = self.cut(rest, share.tokens, taker.area - lacking / (len(shares) - number))
            taker.area -= taken.area
            lacking -= taker.area
            split.cut[number] = taken

    def cut(self, part: Part, tokens: int, area: float) -> tuple[Part, Part]:
        """(rows from both ends of a part that come nearest to an area, the rest).

        A row less from the tail and one more from the head lowers the area by the same amount wherever they are, under
        a causal mask: the numbers are solved for. Under a window they are interpolated.
        """
        whole_area, whole_tokens, document, head, head_stop, tail, tail_stop = part
        first = tail_stop - tokens  # of the tail's rows, with none from the head
        unbroken = head_stop == tail
        fewest, most = (0, tokens) if unbroken else (max(0, tail - first), min(tokens, head_stop - head))

        def pairs(rows: int) -> int:
            return self.count(head, head + rows, document) + self.count(first + rows, tail_stop, document)

        rows, taken_area = fewest, pairs(fewest)
        fall = first - head if self.causal else (taken_area - pairs(most)) / max(1, most - fewest)
        if fall > 0 and taken_area > area:
            rows = min(most, fewest + round((taken_area - area) / fall))
            taken_area = int(taken_area - (rows - fewest) * fall) if self.causal else pairs(rows)
        taken = Part._make((taken_area, tokens, document, head, head + rows, first + rows, tail_stop))
        if unbroken:
            head_stop = tail = first + rows
        left = (whole_area - taken_area, whole_tokens - tokens, document, head + rows, head_stop, tail, first + rows)
        return taken, Part._make(left)


def _find_filling(parts: list[Part], tokens: float, even: float) -> tuple[int, float]:
    """Of sorted parts: the first of the shortest ones that hold so many tokens, and their pairs a token."""
    first, held, area = len(parts), 0, 0
    while first and held < tokens and 4 * parts[first - 1].area <= even:
        first -= 1
        held += parts[first].tokens
        area += parts[first].area
    return first, area / max(1, held)


def _give(part: Part, work: float, bins: list[Bin], most_load: float) -> bool:
    """Give a part to the least loaded of the bins, in this order, that has room; False if none below a load has."""
    for place, one in enumerate(bins):
        if one.load > most_load:
            break
        if one.tokens >= part.tokens:
            one.tokens -= part.tokens
            one.load += work
            one.parts.append(part)
            insort(bins, bins.pop(place), key=attrgetter("load"))
            return True
    return False


def _split(part: Part, bins: list[Bin], work: float) -> Split:
    """Split a document over the fewest bins that can take it, the least loaded ones, by what each still takes."""
    chosen, taken, room = 0, 0.0, 0
    while chosen < len(bins) and (taken < work or room < part.tokens):
        taken += max(-bins[chosen].load, 0)
        room += bins[chosen].tokens
        chosen += 1
    shares = [min(one.tokens, int(part.tokens * max(-one.load, 0) / (taken or 1))) for one in bins[:chosen]]
    left, split = part.tokens - sum(shares), Split(part)
    for one, share in zip(bins, shares, strict=False):
        tokens = min(share + left, one.tokens)
        left -= tokens - share
        if tokens:
            area = part.area * tokens // part.tokens
            split.takers.append(one)
            split.cut.append(Part(area, tokens, *part[2:]))
            one.tokens -= tokens
            one.load += work * tokens / part.tokens
            one.area -= area
    bins.sort(key=attrgetter("load"))
    return split
