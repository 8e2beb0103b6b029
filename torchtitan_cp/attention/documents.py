"""Assigns packed documents to ranks, whole where they fit: who holds all of a document exchanges no keys for it.

Every rank gets the same number of tokens and the same area of the mask. Documents are placed largest first, each
on the rank with the most work left to take, or split over as few ranks as can take it. The shortest ones fill up what
is left, and only the last of them are cut to make the counts exact. A rank's share of a long document is rows from its
head and rows from its tail, as many of each as give the rank its area: zigzag is the case of one document on all
ranks. Where ranks sit in nodes, documents are assigned to the nodes first and then, within each, to its ranks.
"""

import heapq
import math
from bisect import insort
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from torchtitan_cp.attention.layout import PairsBefore
from torchtitan_cp.attention.mask import Span

# A document is placed whole on a rank that it overfills by no more than this fraction of an even share of the work.
SLACK = 0.05
# Times that the cuts of documents that share bins are worked out, each with the newest cuts of the others.
SWEEPS = 2


class Part(NamedTuple):
    """Rows of a document: [head, head_stop) and [tail, tail_stop), global positions. Sorts by area.

    Attributes:
        area: allowed (query, key) pairs of these rows' queries.
        tokens: how many rows.
    """

    area: int
    tokens: int
    head: int
    head_stop: int
    tail: int
    tail_stop: int


@dataclass(slots=True)
class Bin:
    """A rank, or a node of ranks, while it is filled.

    Attributes:
        tokens: that it still takes.
        area: pairs that it lacks of an even share.
        parts: what it was given.
    """

    tokens: int
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
    pairs_before: PairsBefore,
    ranks: int,
    ranks_per_node: int,
    fill_fraction: float = 0.2,
    most_pairs: float = math.inf,
) -> list[list[Span]]:
    """Spans for each rank: S/P tokens in all, in any order and some of them empty.

    Args:
        ranks: divide S; ranks_per_node: divide these.
        fill_fraction: the shortest documents that hold this fraction of the tokens fill the ranks up at the end.
        most_pairs: nothing is returned as soon as a rank would have more pairs.
    """
    borders, parts = pairs_before.borders, []
    for (start, before), (stop, after) in pairwise(zip(borders, pairs_before.pairs, strict=True)):
        parts.append(Part._make((after - before, stop - start, start, stop, stop, stop)))
    held, tokens = [parts], borders[-1] // ranks
    for bins, room in ((ranks // ranks_per_node, tokens * ranks_per_node), (ranks_per_node, tokens)):
        if bins > 1:
            nodes, held = held, []
            for node in nodes:
                held += _assign(node, bins, room, fill_fraction, pairs_before)
                if room == tokens and max(sum([part[0] for part in rows]) for rows in held[-bins:]) > most_pairs:
                    return []
    return [[span for part in rows for span in (part[2:4], part[4:6])] for rows in held]


def _assign(
    parts: list[Part], count: int, tokens: int, fill_fraction: float, pairs_before: PairsBefore
) -> list[list[Part]]:
    """The parts of each of `count` bins that take so many tokens each."""
    parts = sorted(parts, reverse=True)
    even = sum([part[0] for part in parts]) / count
    first, density = _find_filling(parts, fill_fraction * count * tokens, even)
    even_work = even - density * tokens
    bins, splits = [Bin(tokens, even) for _ in range(count)], []
    # Work beyond what the shortest documents will bring, less an even share, of each bin: the least loaded first.
    loads = [(-even_work, number) for number in range(count)]
    for part in parts[:first]:
        area, size = part[:2]
        work = area - density * size
        most = SLACK * even_work - work
        for load, number in loads:
            one = bins[number]
            if load > most or one.tokens >= size:
                break
        if load > most or one.tokens < size:
            splits.append(_split(part, -most, bins, loads))
            continue
        one.tokens -= size
        one.area -= area
        one.parts.append(part)
        loads.remove((load, number))
        insort(loads, (load + work, number), key=itemgetter(0))
    _fill(parts[first:], [one for one in bins if one.tokens], pairs_before)
    for split in splits * min(SWEEPS, len(splits)):
        _cut_evenly(split, pairs_before)
    for split in splits:
        for taker, part in zip(split.takers, split.cut, strict=True):
            taker.parts.append(part)
    return [one.parts for one in bins]


def _find_filling(parts: list[Part], tokens: float, even: float) -> tuple[int, float]:
    """Of sorted parts: the first of the shortest ones that hold so many tokens, and their pairs a token."""
    first, held, area = len(parts), 0, 0
    while first and held < tokens and 4 * parts[first - 1][0] <= even:
        first -= 1
        held += parts[first][1]
        area += parts[first][0]
    return first, area / max(1, held)


def _split(part: Part, work: float, bins: list[Bin], loads: list[tuple[float, int]]) -> Split:
    """Split a document over the fewest bins that can take it, the least loaded ones, by what each still takes."""
    chosen, taken, room = 0, 0.0, 0
    while chosen < len(loads) and (taken < work or room < part.tokens):
        load, number = loads[chosen]
        taken += max(-load, 0)
        room += bins[number].tokens
        chosen += 1
    shares = [min(bins[n].tokens, int(part.tokens * max(-load, 0) / (taken or 1))) for load, n in loads[:chosen]]
    left, split = part.tokens - sum(shares), Split(part)
    for place, share in enumerate(shares):
        load, number = loads[place]
        one = bins[number]
        tokens = min(share + left, one.tokens)
        left -= tokens - share
        if tokens:
            area = part.area * tokens // part.tokens
            split.takers.append(one)
            split.cut.append(part._replace(area=area, tokens=tokens))
            one.tokens -= tokens
            one.area -= area
            loads[place] = (load + work * tokens / part.tokens, number)
    loads.sort(key=itemgetter(0))
    return split


def _fill(parts: list[Part], bins: list[Bin], pairs_before: PairsBefore) -> None:
    """Give short documents to the bins with the most room until these are full; what fits nowhere is cut."""
    left, rooms = [], [(-one.tokens, number) for number, one in enumerate(bins)]
    heapq.heapify(rooms)
    for part in parts:
        room, number = rooms[0]
        if part[1] <= -room:
            bins[number].parts.append(part)
            bins[number].area -= part[0]
            heapq.heapreplace(rooms, (room + part[1], number))
        else:
            left.append(part)
    rooms = [entry for entry in rooms if entry[0]]
    for part in left:
        while part.tokens:
            room, number = rooms.pop()
            taken, part = _cut(part, min(part.tokens, -room), 0, pairs_before)
            bins[number].parts.append(taken)
            bins[number].area -= taken.area
            if room + taken.tokens:
                rooms.append((room + taken.tokens, number))


def _cut_evenly(split: Split, pairs_before: PairsBefore) -> None:
    """Cut a document so that all of its bins lack, or exceed, the same area."""
    rest, shares = split.part, list(zip(split.takers, split.cut, strict=True))
    lacking = sum([taker.area + share.area for taker, share in shares]) - rest.area
    for number, (taker, share) in enumerate(shares):
        taken = rest
        taker.area += share.area
        if share.tokens < rest.tokens:
            taken, rest = _cut(rest, share.tokens, taker.area - lacking / (len(shares) - number), pairs_before)
        taker.area -= taken.area
        lacking -= taker.area
        split.cut[number] = taken


def _cut(part: Part, tokens: int, area: float, pairs_before: PairsBefore) -> tuple[Part, Part]:
    """(rows from both ends of a part that come nearest to an area, the rest).

    A row less from the tail and one more from the head lowers the area by the same amount wherever they are, in one
    document under a causal mask: the numbers are solved for. Elsewhere they are interpolated.
    """
    whole_area, whole_tokens, head, head_stop, tail, tail_stop = part
    first = tail_stop - tokens  # of the tail's rows, with none from the head
    unbroken = head_stop == tail
    fewest, most = (0, tokens) if unbroken else (max(0, tail - first), min(tokens, head_stop - head))
    growth, offset = pairs_before.slope(head, tail_stop)
    if growth:
        rows, fall = fewest, growth * (first - head)
        taken_area = fewest * (growth * (2 * head + fewest + 1) - 2 * offset)
        taken_area += (tokens - fewest) * (growth * (first + fewest + tail_stop + 1) - 2 * offset)
        taken_area //= 2
        if taken_area > area and fall:
            rows = min(most, fewest + round((taken_area - area) / fall))
            taken_area -= (rows - fewest) * fall
    else:
        rows, taken_area = _interpolate(head, first, tail_stop, fewest, most, area, pairs_before)
    taken = Part._make((taken_area, tokens, head, head + rows, first + rows, tail_stop))
    if unbroken:
        head_stop = tail = first + rows
    left = (whole_area - taken_area, whole_tokens - tokens, head + rows, head_stop, tail, first + rows)
    return taken, Part._make(left)


def _interpolate(
    head: int, first: int, stop: int, fewest: int, most: int, area: float, pairs_before: PairsBefore
) -> tuple[int, int]:
    """(rows from `head` on, area of these and of the rows from as many after `first` to `stop`) nearest to an area."""
    ends = pairs_before(stop) - pairs_before(head)

    def count(rows: int) -> int:
        return ends + pairs_before(head + rows) - pairs_before(first + rows)

    rows, largest = fewest, count(fewest)
    if largest > area and most > fewest and (fall := (largest - count(most)) / (most - fewest)) > 0:
        rows = min(most, fewest + round((largest - area) / fall))
    return rows, count(rows)
