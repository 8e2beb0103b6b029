"""Assigns packed documents to ranks, whole where they fit: who holds all of a document exchanges no keys for it.

Every rank gets the same number of tokens and the same area of the mask. Documents are placed largest first, each
on the rank with the most work left to take, or split over as few ranks as can take it. The shortest ones fill up what
is left, and only the last of them are cut to make the counts exact. A rank's share of a long document is rows from its
head and rows from its tail, as many of each as give the rank its area: zigzag is the case of one document on all
ranks. Where ranks sit in nodes, documents are assigned to the nodes first and then, within each, to its ranks.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from torchtitan_cp.attention.mask import Band, Span
from torchtitan_cp.attention.tiles import count_pairs

# A document is placed whole on a rank that it overfills by no more than this fraction of an even share of the work.
SLACK = 0.05
# Times that the cuts of split documents are worked out, each with the newest cuts of the others.
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

    @property
    def spans(self) -> tuple[Span, Span]:
        """The rows; one of the spans may be empty."""
        return (self.head, self.head_stop), (self.tail, self.tail_stop)


@dataclass
class Bin:
    """A rank, or a node of ranks, while it is filled.

    Attributes:
        tokens: that it still takes.
        work: that it still takes beyond what the shortest documents will bring.
        area: pairs that it lacks of an even share.
        parts: what it was given.
    """

    tokens: int
    work: float
    area: float
    parts: list[Part] = field(default_factory=list)

    def give(self, part: Part, work: float) -> None:
        """Add a part that brings so much work beyond that of as many tokens of short documents."""
        self.tokens -= part.tokens
        self.work -= work
        self.area -= part.area
        self.parts.append(part)


@dataclass
class Split:
    """A document that several bins share.

    Attributes:
        part: all of its rows.
        takers: (bin, tokens) of each.
        areas: pairs that each takes, estimated until the document is cut.
        cut: the rows of each taker.
    """

    part: Part
    takers: list[tuple[Bin, int]]
    areas: list[float]
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
            parts.append(Part(area, stop - start, (start, stop), start, stop, stop, stop))
        end = stop
    tokens, best, least = sequence_length // ranks, [parts], math.inf
    for size, fraction in ((ranks_per_node, 0.2), (ranks, 0.2 if ranks_per_node < ranks else 0.5)):
        nodes = mask.assign(parts, ranks // size, tokens * size, fraction) if size < ranks else [parts]
        held = [found for node in nodes for found in mask.assign(node, size, tokens, fraction)]
        areas = [sum(part.area for part in found) for found in held]
        if max(areas) < least:
            best, least = held, max(areas)
        if least <= EVEN * sum(areas) / ranks:
            break
    return [[span for part in found for span in part.spans] for found in best]


class DocumentMask:
    """What a query of a document sees, and the ways to assign and cut documents that go by it."""

    def __init__(self, band: Band) -> None:
        self.band = band

    def count(self, start: int, stop: int, document: Span) -> int:
        """Allowed pairs of the queries [start, stop) of a document."""
        first, last = document
        return count_pairs(stop - start, last - first, self.band, first - start)

    def assign(self, parts: list[Part], count: int, tokens: int, fill_fraction: float) -> list[list[Part]]:
        """The parts of each of `count` bins that take so many tokens each.

        Args:
            fill_fraction: the shortest documents that hold this fraction of the tokens fill the bins up at the end.
        """
        parts = sorted(parts, reverse=True)
        even = sum(part.area for part in parts) / count
        first, density = _find_filling(parts, fill_fraction * count * tokens, even)
        even_work = even - density * tokens
        bins = [Bin(tokens, even_work, even) for _ in range(count)]
        splits = []
        for part in parts[:first]:
            work = part.area - density * part.tokens
            taker = _find_bin(bins, part.tokens, work - SLACK * even_work)
            if taker:
                taker.give(part, work)
            else:
                splits.append(_split(part, bins, work - SLACK * even_work))
        self._fill(parts[first:], [one for one in bins if one.tokens], density)
        for _ in range(SWEEPS):
            for split in splits:
                self._cut_evenly(split)
        for split in splits:
            for (taker, _), part in zip(split.takers, split.cut, strict=True):
                taker.parts.append(part)
        return [one.parts for one in bins]

    def _fill(self, parts: list[Part], bins: list[Bin], density: float) -> None:
        """Give short documents to the bins until these are full; those that fit nowhere are cut."""
        left = []
        for part in parts:
            taker = _find_bin(bins, part.tokens, -math.inf)
            if taker:
                taker.give(part, part.area - density * part.tokens)
            else:
                left.append(part)
        bins = [one for one in bins if one.tokens]
        for part in left:
            while part.tokens:
                taken, part = self.cut(part, min(part.tokens, bins[-1].tokens), 0)
                bins[-1].give(taken, 0)
                if not bins[-1].tokens:
                    bins.pop()

    def _cut_evenly(self, split: Split) -> None:
        """Cut a document so that all of its bins lack, or exceed, the same area."""
        for (taker, _), area in zip(split.takers, split.areas, strict=True):
            taker.area += area
        rest, split.cut = split.part, []
        lacking = sum(taker.area for taker, _ in split.takers) - rest.area
        for number, (taker, tokens) in enumerate(split.takers):
            taken, rest = self.cut(rest, tokens, taker.area - lacking / (len(split.takers) - number))
            taker.area -= taken.area
            lacking -= taker.area
            split.cut.append(taken)
        split.areas = [part.area for part in split.cut]

    def cut(self, part: Part, tokens: int, area: float) -> tuple[Part, Part]:
        """(rows from both ends of a part that come nearest to an area, the rest).

        A row less from the tail and one more from the head lowers the area by the same amount wherever they are, under
        a causal mask: the numbers are solved for. Under a window they are interpolated.
        """
        whole_area, whole_tokens, document, head, head_stop, tail, tail_stop = part
        unbroken = head_stop == tail
        fewest = 0 if unbroken else max(0, tokens - (tail_stop - tail))
        most = tokens if unbroken else min(tokens, head_stop - head)
        first = tail_stop - tokens  # of the tail's rows, with none from the head

        def pairs(rows: int) -> int:
            return self.count(head, head + rows, document) + self.count(first + rows, tail_stop, document)

        rows, highest, lowest = fewest, pairs(fewest), pairs(most)
        if lowest < highest:
            rows += round((most - fewest) * min(max((highest - area) / (highest - lowest), 0), 1))
        taken = Part(pairs(rows), tokens, document, head, head + rows, first + rows, tail_stop)
        if unbroken:
            head_stop = tail = first + rows
        left = (whole_area - taken.area, whole_tokens - tokens)
        return taken, Part(*left, document, head + rows, head_stop, tail, first + rows)


def _find_filling(parts: list[Part], tokens: float, even: float) -> tuple[int, float]:
    """Of sorted parts: the first of the shortest ones that hold so many tokens, and their pairs a token."""
    first, held, area = len(parts), 0, 0
    while first and held < tokens and 4 * parts[first - 1].area <= even:
        first -= 1
        held += parts[first].tokens
        area += parts[first].area
    return first, area / max(1, held)


def _find_bin(bins: list[Bin], tokens: int, work: float) -> Bin | None:
    """Of the bins with room for so many tokens, and for so much work, the one with the most work to take."""
    found = None
    for one in bins:
        if one.tokens >= tokens and one.work >= work:
            found, work = one, one.work
    return found


def _split(part: Part, bins: list[Bin], work: float) -> Split:
    """Split a document over the fewest bins that can take it, by what each still takes."""
    bins = sorted(bins, key=lambda one: -one.work)
    chosen, taken, room = 0, 0.0, 0
    while chosen < len(bins) and (taken < work or room < part.tokens):
        taken += max(bins[chosen].work, 0)
        room += bins[chosen].tokens
        chosen += 1
    left, shares = part.tokens, []
    for one in bins[:chosen]:
        shares.append(min(left, one.tokens, int(part.tokens * max(one.work, 0) / (taken or 1))))
        left -= shares[-1]
    shares += [0] * (len(bins) - chosen)
    for place, one in enumerate(bins):
        more = min(left, one.tokens - shares[place])
        shares[place] += more
        left -= more
    takers = [(one, tokens) for one, tokens in zip(bins, shares, strict=True) if tokens]
    areas = [part.area * tokens / part.tokens for _, tokens in takers]
    for (one, tokens), area in zip(takers, areas, strict=True):
        one.tokens -= tokens
        one.work -= work * tokens / part.tokens
        one.area -= area
    return Split(part, takers, areas)
