"""Assigns packed documents to ranks, whole where they fit: a rank that holds all of one exchanges no keys for it.

Every rank gets the same number of tokens and the same area of the mask. Documents are placed largest first, each
on the rank with the most work left to take, or split over as few ranks as can take it, and these in as few nodes. The
shortest ones fill up what is left, first where most area is lacking, and only the last of them are cut to make the
counts exact. A rank's share of a long document is rows from its head and rows from its tail, as many of each as give
the rank its area: zigzag is the case of one document on all ranks.
"""

import heapq
from bisect import insort
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from torchtitan_cp.attention.caching import keep_newest
from torchtitan_cp.attention.layout import PairsBefore, pairs_before
from torchtitan_cp.attention.mask import AttentionMask, Span

# A document is placed whole on a rank that it overfills by no more than this fraction of an even share of the work.
SLACK = 0.04
# Times that the cuts of documents that share bins are worked out, each with the newest cuts of the others.
SWEEPS = 2
LOAD = attrgetter("load")


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


# As Part._make, in a third of the time: a plan makes a thousand.
new_part = partial(tuple.__new__, Part)


@dataclass(slots=True, eq=False)
class Bin:
    """A rank while it is filled.

    Attributes:
        node: of the rank.
        tokens: that it still takes.
        area: pairs that it lacks of an even share.
        load: work beyond what the shortest documents will bring, less an even share of that.
        parts: what it was given.
    """

    node: int
    tokens: int
    area: float
    load: float
    parts: list[Part] = field(default_factory=list)

    def take(self, part: Part) -> None:
        """Hold this part."""
        self.tokens -= part[1]
        self.area -= part[0]
        self.parts.append(part)


# The bins that share a document with the rows of each; until it is cut, only how many, and an estimate of their area.
Shares = list[tuple[Bin, Part]]


def assign_documents(
    sequence_length: int, ranks: int, mask: AttentionMask, ranks_per_node: int, filling: float, short: float
) -> list[list[Span]]:
    """Spans for each rank: S/P tokens in all, in any order and some of them empty.

    Args:
        ranks: divide S; ranks_per_node: divide these.
        filling: the shortest documents that hold this fraction of the tokens fill the ranks up at the end.
        short: a document of at most this fraction of an even share of the area is never split over chosen ranks; only
            such documents fill up.
    """
    before, parts = pairs_before(mask, sequence_length), _whole_parts(mask, sequence_length)
    tokens, even = sequence_length // ranks, before[sequence_length] / ranks
    first, density = _find_filling(parts, filling * sequence_length, short * even)
    even_work = even - density * tokens
    bins, splits, late = [Bin(rank // ranks_per_node, tokens, even, -even_work) for rank in range(ranks)], [], []
    nodes = [bins[rank : rank + ranks_per_node] for rank in range(0, ranks, ranks_per_node)]
    # The least loaded first; of those, one of each node in turn, so that a document takes as many in one as in another.
    order = [*chain.from_iterable(zip(*nodes, strict=True))]
    for part in parts[:first]:
        area, size = part[:2]
        work = area - density * size
        most = SLACK * even_work - work
        place = next((one for one in order if one.load <= most and one.tokens >= size), None)
        if place is not None:
            place.take(part)
            place.load += work
            order.remove(place)
            insort(order, place, key=LOAD)
        elif area > short * even:
            splits.append((part, _split(part, -most, order, nodes)))
        else:
            late.append(part)
    _fill(late + parts[first:], bins, before)
    for part, shares in splits * min(SWEEPS, len(splits)):
        _cut_evenly(part, shares, before)
    for _, shares in splits:
        for taker, part in shares:
            taker.parts.append(part)
    return [[span for part in one.parts for span in (part[2:4], part[4:6])] for one in bins]


@keep_newest
def _whole_parts(mask: AttentionMask, sequence_length: int) -> list[Part]:
    """The documents, and the padding between them, largest first."""
    before = pairs_before(mask, sequence_length)
    ends = pairwise((position, before[position]) for position in before.borders)
    parts = [new_part((more - less, stop - start, start, stop, stop, stop)) for (start, less), (stop, more) in ends]
    return sorted(parts, reverse=True)


def _find_filling(parts: list[Part], tokens: float, most_pairs: float) -> tuple[int, float]:
    """(First of the shortest parts that hold so many tokens, each of at most so many pairs; their pairs a token)."""
    first, held, area = len(parts), 0, 0
    while first and held < tokens and parts[first - 1][0] <= most_pairs:
        first -= 1
        held += parts[first][1]
        area += parts[first][0]
    return first, area / max(1, held)


def _split(part: Part, work: float, order: list[Bin], nodes: list[list[Bin]]) -> Shares:
    """Split a document over the fewest bins that can take it, by what each still takes."""
    chosen, shares = _choose_bins(part.tokens, work, order, nodes), []
    lacking = sum([max(-one.load, 0) for one in chosen])
    wanted = [min(one.tokens, int(part.tokens * max(-one.load, 0) / (lacking or 1))) for one in chosen]
    left = part.tokens - sum(wanted)
    for one, share in zip(chosen, wanted, strict=True):
        tokens = min(share + left, one.tokens)
        left -= tokens - share
        if tokens:
            area = part.area * tokens // part.tokens
            shares.append((one, new_part((area, tokens, *part[2:]))))
            one.tokens -= tokens
            one.area -= area
            one.load += work * tokens / part.tokens
    order.sort(key=LOAD)
    return shares


def _choose_bins(tokens: int, work: float, order: list[Bin], nodes: list[list[Bin]]) -> list[Bin]:
    """The least loaded bins that can take so much, on fewer nodes if each node saved costs at most one bin."""
    chosen = _least_loaded(tokens, work, order) or order
    spanned = len({one.node for one in chosen})
    if spanned > 1:
        within, load, room = set[int](), 0.0, 0
        for node in sorted(nodes, key=lambda node: sum([one.load for one in node])):
            if -load >= (1 - SLACK) * work and room >= tokens:
                break
            within.add(node[0].node)
            load += sum([one.load for one in node])
            room += sum([one.tokens for one in node])
        held = _least_loaded(tokens, work, inside := [one for one in order if one.node in within]) or inside
        if len(held) + len(within) <= len(chosen) + spanned:
            return held
    return chosen


def _least_loaded(tokens: int, work: float, order: list[Bin]) -> list[Bin]:
    """The first of these that can take so much, or none."""
    for count, one in enumerate(order, 1):
        work += min(one.load, 0)
        tokens -= one.tokens
        if work <= 0 and tokens <= 0:
            return order[:count]
    return []


def _fill(parts: list[Part], bins: list[Bin], before: PairsBefore) -> None:
    """Give short documents to the bins that lack the most pairs, then to those with the most room, and cut the last."""
    for index, want in enumerate(("area", "tokens")):
        left, wanting = [], sorted([(-getattr(one, want), number) for number, one in enumerate(bins) if one.tokens])
        for part in parts:
            wanted, number = wanting[0]
            if part[1] <= bins[number].tokens:
                bins[number].take(part)
                heapq.heapreplace(wanting, (wanted + part[index], number))
            else:
                left.append(part)
        parts = left
    for part in parts:
        while part.tokens:
            one = next(one for one in bins if one.tokens)
            taken, part = _cut(part, min(part.tokens, one.tokens), 0, before)
            one.take(taken)


def _cut_evenly(rest: Part, shares: Shares, before: PairsBefore) -> None:
    """Cut a document so that all of its bins lack, or exceed, the same area."""
    lacking = sum([taker.area + share.area for taker, share in shares]) - rest.area
    for number, (taker, share) in enumerate(shares):
        taken = rest
        taker.area += share.area
        if share.tokens < rest.tokens:
            taken, rest = _cut(rest, share.tokens, taker.area - lacking / (len(shares) - number), before)
        taker.area -= taken.area
        lacking -= taker.area
        shares[number] = taker, taken


def _cut(part: Part, tokens: int, area: float, before: PairsBefore) -> tuple[Part, Part]:
    """(rows from both ends of a part that come nearest to an area, the rest).

    The more rows come from the head instead of the tail, the smaller is the area: their number is interpolated, which
    is exact in one document under a causal mask, where each such row lowers the area by the same distance.
    """
    whole_area, whole_tokens, head, _, _, stop = part  # [head, stop): a whole document, or what is left of one
    first = stop - tokens  # of the tail's rows, with none from the head
    rows, taken_area = 0, before[stop] - before[first]
    if taken_area > area:
        fall = (taken_area - before[head + tokens] + before[head]) / tokens
        rows = min(tokens, round((taken_area - area) / fall)) if fall > 0 else 0
        taken_area = before[stop] - before[first + rows] + before[head + rows] - before[head]
    tail = first + rows
    left = new_part((whole_area - taken_area, whole_tokens - tokens, head + rows, tail, tail, tail))
    return new_part((taken_area, tokens, head, head + rows, tail, stop)), left
