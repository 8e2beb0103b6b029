"""Layouts by name, and the one that goes by packed documents."""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import itemgetter

from torchtitan_cp.attention.documents import assign_documents
from torchtitan_cp.attention.errors import LayoutError, check_name
from torchtitan_cp.attention.layout import (
    Layout,
    balanced,
    check_divisible,
    contiguous,
    documents_of,
    pairs_before,
    rank_areas,
    rows_sent,
    zigzag,
)
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.tiles import count_pairs

# Pairs that a rank computes while a row of keys and values travels (within a node, to another one): 32 query and 8 key
# heads of 128 in bf16 at 400 TFLOP/s, and 400 or 50 GB/s.
RowPairs = tuple[float, float]
ROW_PAIRS: RowPairs = (250, 2000)
NODE_RANKS = 8
# Ranks of a ring of which the messages of each step are counted, not all together.
STEP_RANKS = 16
# `relative_time` at which no other layout is tried; and where trying takes long: with so many ranks times documents.
FAIR, FAIR_OF_MANY, MANY = 1.06, 1.25, 8_000


def documents(
    sequence_length: int,
    ranks: int,
    mask: AttentionMask,
    ranks_per_node: int = NODE_RANKS,
    all_to_all_ranks: int = 1,
    row_pairs: RowPairs = ROW_PAIRS,
) -> Layout:
    """Hold packed documents whole where they fit, and long ones on as few ranks as their tokens and area ask.

    This is taken if it is within 6 % of an even share of the work, messages included, by `relative_time` (25 % of many
    documents on many ranks). If not, documents are also cut more evenly, and the fastest of these, `balanced` and
    `zigzag` is taken. Batch rows that are packed differently are cut at the borders of all their documents, and
    assigned by their summed area.

    Args:
        ranks_per_node: consecutive ranks that sit in one node, within which documents stay first.
        all_to_all_ranks: consecutive ranks that trade heads: together they are one rank of the ring.
        row_pairs: pairs that a rank computes while a row of keys and values travels, within a node and to another.

    Raises:
        LayoutError: if S is not divisible by P.
    """
    check_divisible(sequence_length, ranks, f"cp = {ranks}")
    if 1 < all_to_all_ranks < ranks:
        return documents(sequence_length, ranks // all_to_all_ranks, mask, 1, 1, row_pairs).split(all_to_all_ranks)
    ranks_per_node = math.gcd(ranks, ranks_per_node)
    before, timed = pairs_before(mask, sequence_length), list[tuple[float, Layout]]()
    even, fair = before[sequence_length] / ranks, FAIR_OF_MANY if ranks * len(before.borders) > MANY else FAIR
    for layout in _candidates(sequence_length, ranks, mask, ranks_per_node):
        # Messages are not counted where a rank's pairs alone take longer than another layout.
        if not timed or max(rank_areas(layout, mask, sequence_length)) < timed[0][0] * even:
            timed.append((relative_time(layout, mask, sequence_length, ranks_per_node, row_pairs), layout))
            timed.sort(key=itemgetter(0))
        if timed[0][0] <= fair:
            break
    return timed[0][1]


def relative_time(
    layout: Layout, mask: AttentionMask, sequence_length: int, ranks_per_node: int, row_pairs: RowPairs = ROW_PAIRS
) -> float:
    """Time of the busiest rank in a ring, for its pairs and messages, over that of an even share.

    Messages of up to `STEP_RANKS` ranks travel while the step before them is computed. Of more ranks they are taken to
    travel behind any step: the longer of both counts.
    """
    areas, (within, across) = rank_areas(layout, mask, sequence_length), row_pairs
    if layout.ranks > STEP_RANKS:
        sent, crossing = rows_sent(layout, mask, sequence_length, ranks_per_node)
        messages = (max(across * far, within * rows) for rows, far in zip(sent, crossing, strict=True))
        times = map(max, areas, messages)
    else:
        waits = _waits(layout, mask, sequence_length, areas, ranks_per_node, row_pairs)
        times = map(sum, zip(areas, waits, strict=True))
    return max(times) * layout.ranks / (sum(areas) or 1)


def _waits(
    layout: Layout,
    mask: AttentionMask,
    sequence_length: int,
    areas: list[int],
    ranks_per_node: int,
    row_pairs: RowPairs,
) -> list[float]:
    """Pairs that each rank could compute while it waits for the messages of each step."""
    ranks, band = layout.ranks, mask.band
    pairs = [[0] * ranks for _ in range(ranks)]  # by reader and step
    costs = [[0.0] * ranks for _ in range(ranks)]  # by source and step
    for _, segments in documents_of(layout, mask, sequence_length):
        for number, (source, _, start, stop) in enumerate(segments if len(segments) > 1 else ()):
            readers = set()
            for reader, _, first, last in segments[number if band.high == 0 else 0 :]:
                step = (reader - source) % ranks
                if step and (found := count_pairs(last - first, stop - start, band, start - first)):
                    pairs[reader][step] += found
                    if reader not in readers:
                        far = reader // ranks_per_node != source // ranks_per_node
                        costs[source][step] += (stop - start) * row_pairs[far]
                        readers.add(reader)
    waits = [0.0] * ranks
    for rank in range(ranks):
        ahead = areas[rank] - sum(pairs[rank])
        for step in range(1, ranks):
            cost = max(costs[rank][step], costs[rank - step][step])
            waits[rank] += max(0.0, cost - ahead)
            ahead = pairs[rank][step]
    return waits


def _candidates(sequence_length: int, ranks: int, mask: AttentionMask, ranks_per_node: int) -> Iterator[Layout]:
    # The more fills up, the more even the ranks, and the more documents are cut.
    for filling, short in ((0.25, 0.125), (0.5, 0.25)):
        yield Layout.of(assign_documents(sequence_length, ranks, mask, ranks_per_node, filling, short))
    yield balanced(sequence_length, ranks, mask)
    if sequence_length % (2 * ranks) == 0:
        yield zigzag(sequence_length, ranks)


LAYOUTS: dict[str, Callable[..., Layout]] = {
    "contiguous": lambda sequence_length, ranks, mask, *_: contiguous(sequence_length, ranks),
    "zigzag": lambda sequence_length, ranks, mask, *_: zigzag(sequence_length, ranks),
    "balanced": lambda sequence_length, ranks, mask, *_: balanced(sequence_length, ranks, mask),
    "documents": documents,
}


@lru_cache(maxsize=256)
def make_layout(
    name: str,
    sequence_length: int,
    ranks: int,
    mask: AttentionMask,
    ranks_per_node: int = NODE_RANKS,
    all_to_all_ranks: int = 1,
    row_pairs: RowPairs = ROW_PAIRS,
) -> Layout:
    """Build a layout by name. `auto` is documents where documents are packed, else zigzag.

    Raises:
        LayoutError: an unknown name, or a length that does not divide.
    """
    if name == "auto":
        packed = any(len(documents) > 1 for documents in mask.documents(sequence_length))
        name = "documents" if packed else "zigzag"
    check_name("layout", name, ("auto", *LAYOUTS), LayoutError)
    return LAYOUTS[name](sequence_length, ranks, mask, ranks_per_node, all_to_all_ranks, row_pairs)
