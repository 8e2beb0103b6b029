"""Assigns packed documents to ranks, whole where they fit: a rank that holds a whole document exchanges no keys for it.

Every rank gets the same number of tokens and about the same area of the mask. Documents are placed largest first. Each
goes to the least loaded rank, or is split over as few ranks as can take it, and these are in as few nodes as possible.
The shortest documents are the filler: they are placed last, first where most area is lacking, and only the last of them
are cut to make the token counts exact. A rank's share of a split document is rows from its head and rows from its tail,
as many of each as give the rank its area: zigzag is the case of one document on all ranks.
"""

import heapq
from bisect import insort
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from torchtitan_cp.attention.caching import keep_newest
from torchtitan_cp.attention.layout import PairsBefore, pairs_before
from torchtitan_cp.attention.mask import AttentionMask, Span

# A document may overfill a rank by this fraction of an even share of the work before it is split.
SLACK = 0.04
# How often the cuts of split documents are computed, each time with the newest cuts of the others.
SWEEPS = 2


class Part(NamedTuple):
    """Rows of a document: [head, head_stop) and [tail, tail_stop), global positions. Parts sort by area.

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


@dataclass(slots=True, eq=False)
class Bin:
    """A rank while it is filled.

    Attributes:
        node: the node that the rank sits in.
        tokens: how many more it takes.
        area: pairs that it lacks of an even share.
        load: its work, not counting filler, minus an even share of that; negative while there is room.
        parts: what it holds.
    """

    node: int
    tokens: int
    area: float
    load: float
    parts: list[Part] = field(default_factory=list)

    def take(self, part: Part) -> None:
        """Hold this part."""
        self.tokens -= part.tokens
        self.area -= part.area
        self.parts.append(part)


LOAD = attrgetter("load")
# The bins that share a document, with the rows of each. Before it is cut, only `tokens` and an estimated `area` count.
Shares = list[tuple[Bin, Part]]


def assign_documents(
    sequence_length: int, ranks: int, mask: AttentionMask, ranks_per_node: int, filler: float, short: float
) -> list[list[Span]]:
    """Spans for each rank: S/P tokens in all, in any order and some of them empty.

    Args:
        ranks: divides S; ranks_per_node: divides `ranks`.
        filler: the shortest documents that hold this fraction of the tokens are the filler.
        short: a document of at most this fraction of an even share of the area is never split over several
            chosen ranks; only such documents are filler.
    """
    before, parts = pairs_before(mask, sequence_length), _whole_documents(mask, sequence_length)
    tokens_per_rank, even_area = sequence_length // ranks, before[sequence_length] / ranks
    short_area = short * even_area
    filler_start, filler_density = _find_filler(parts, filler * sequence_length, short_area)
    even_work = even_area - filler_density * tokens_per_rank
    bins = [Bin(rank // ranks_per_node, tokens_per_rank, even_area, -even_work) for rank in range(ranks)]
    nodes = [bins[first : first + ranks_per_node] for first in range(0, ranks, ranks_per_node)]
    # Least loaded first. Equal bins alternate between nodes, so that a document uses equally many in each of its nodes.
    order = [*chain.from_iterable(zip(*nodes, strict=True))]
    splits: list[tuple[Part, Shares]] = []
    postponed = []
    for part in parts[:filler_start]:
        work = part.area - filler_density * part.tokens
        max_load = SLACK * even_work - work
        target = next((each for each in order if each.load <= max_load and each.tokens >= part.tokens), None)
        if target is not None:
            target.take(part)
            target.load += work
            order.remove(target)
            insort(order, target, key=LOAD)
        elif part.area > short_area:
            splits.append((part, _split(part, -max_load, order, nodes)))
        else:
            postponed.append(part)
    _fill(postponed + parts[filler_start:], bins, before)
    for part, shares in splits * min(SWEEPS, len(splits)):
        _cut_evenly(part, shares, before)
    for target, share in chain.from_iterable(shares for _, shares in splits):
        target.parts.append(share)
    return [[span for part in each.parts for span in (part[2:4], part[4:6])] for each in bins]


@keep_newest
def _whole_documents(mask: AttentionMask, sequence_length: int) -> list[Part]:
    """The documents, and the padding between them, largest area first."""
    before = pairs_before(mask, sequence_length)
    spans = pairwise(before.borders)
    parts = [Part(before[stop] - before[start], stop - start, start, stop, stop, stop) for start, stop in spans]
    return sorted(parts, reverse=True)


def _find_filler(parts: list[Part], tokens: float, max_area: float) -> tuple[int, float]:
    """(index of the first filler part, pairs per token of the filler); larger parts than `max_area` are not filler."""
    first, held_tokens, area = len(parts), 0, 0
    while first and held_tokens < tokens and parts[first - 1].area <= max_area:
        first -= 1
        held_tokens += parts[first].tokens
        area += parts[first].area
    return first, area / max(1, held_tokens)


def _split(part: Part, work: float, order: list[Bin], nodes: list[list[Bin]]) -> Shares:
    """Split a document over the fewest bins that can take it, in proportion to the room of each."""
    chosen = _choose_bins(part.tokens, work, order, nodes)
    room = sum([max(-each.load, 0) for each in chosen]) or 1
    wanted = [min(each.tokens, int(part.tokens * max(-each.load, 0) / room)) for each in chosen]
    left, shares = part.tokens - sum(wanted), []
    for each, wanted_tokens in zip(chosen, wanted, strict=True):
        tokens = min(wanted_tokens + left, each.tokens)
        left -= tokens - wanted_tokens
        if tokens:
            area = part.area * tokens // part.tokens
            shares.append((each, part._replace(area=area, tokens=tokens)))
            each.tokens -= tokens
            each.area -= area
            each.load += work * tokens / part.tokens
    order.sort(key=LOAD)
    return shares


def _choose_bins(tokens: int, work: float, order: list[Bin], nodes: list[list[Bin]]) -> list[Bin]:
    """The least loaded bins that can take so much, on fewer nodes if each node saved costs at most one bin."""
    chosen = _least_loaded(tokens, work, order) or order
    spanned = len({each.node for each in chosen})
    if spanned == 1:
        return chosen
    allowed, room_work, room_tokens = set[int](), 0.0, 0
    for node in sorted(nodes, key=lambda node: sum([each.load for each in node])):
        if room_work >= (1 - SLACK) * work and room_tokens >= tokens:
            break
        allowed.add(node[0].node)
        room_work -= sum([each.load for each in node])
        room_tokens += sum([each.tokens for each in node])
    inside = [each for each in order if each.node in allowed]
    compact = _least_loaded(tokens, work, inside) or inside
    return compact if len(compact) + len(allowed) <= len(chosen) + spanned else chosen


def _least_loaded(tokens: int, work: float, order: list[Bin]) -> list[Bin]:
    """As many of the first bins as can take so much; none if all together cannot."""
    for count, each in enumerate(order, 1):
        work += min(each.load, 0)
        tokens -= each.tokens
        if work <= 0 and tokens <= 0:
            return order[:count]
    return []


def _fill(parts: list[Part], bins: list[Bin], before: PairsBefore) -> None:
    """Give short documents to the bins that lack the most pairs, then to those with the most room, and cut the last."""
    for lacking in ("area", "tokens"):
        heap = sorted([(-getattr(each, lacking), number) for number, each in enumerate(bins) if each.tokens])
        left = []
        for part in parts:
            _, number = heap[0]
            if part.tokens <= bins[number].tokens:
                bins[number].take(part)
                heapq.heapreplace(heap, (-getattr(bins[number], lacking), number))
            else:
                left.append(part)
        parts = left
    for part in parts:
        while part.tokens:
            target = next(each for each in bins if each.tokens)
            taken, part = _cut(part, min(part.tokens, target.tokens), 0, before)
            target.take(taken)


def _cut_evenly(part: Part, shares: Shares, before: PairsBefore) -> None:
    """Cut a document so that all of its bins lack, or exceed, the same area."""
    rest = part
    lacking = sum([target.area + share.area for target, share in shares]) - part.area
    for number, (target, share) in enumerate(shares):
        taken = rest
        target.area += share.area
        if share.tokens < rest.tokens:
            taken, rest = _cut(rest, share.tokens, target.area - lacking / (len(shares) - number), before)
        target.area -= taken.area
        lacking -= target.area
        shares[number] = target, taken


def _cut(part: Part, tokens: int, area: float, before: PairsBefore) -> tuple[Part, Part]:
    """(`tokens` rows from both ends of a part whose area comes nearest to `area`, the rest).

    The more rows come from the head instead of the tail, the smaller is the area: their number is interpolated, which
    is exact in one document under a causal mask, where each such row lowers the area by the same distance.

    Args:
        part: a whole document, or what is left of one: [head, tail_stop).
    """
    head, stop = part.head, part.tail_stop
    tail = stop - tokens
    head_rows, taken_area = 0, before[stop] - before[tail]
    if taken_area > area:
        fall = (taken_area - before[head + tokens] + before[head]) / tokens
        head_rows = min(tokens, round((taken_area - area) / fall)) if fall > 0 else 0
        tail += head_rows
        taken_area = before[stop] - before[tail] + before[head + head_rows] - before[head]
    head_stop = head + head_rows
    rest = Part(part.area - taken_area, part.tokens - tokens, head_stop, tail, tail, tail)
    return Part(taken_area, tokens, head, head_stop, tail, stop), rest
