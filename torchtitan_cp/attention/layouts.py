"""Layouts by name, and the one that goes by packed documents."""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

from torchtitan_cp.attention.documents import EVEN, assign_documents
from torchtitan_cp.attention.errors import LayoutError, check_name
from torchtitan_cp.attention.layout import (
    Layout,
    balanced,
    check_divisible,
    contiguous,
    rank_areas,
    rows_sent,
    zigzag,
)
from torchtitan_cp.attention.mask import AttentionMask

# Pairs that a rank computes while a row of keys and values travels to another node: 32 query and 8 key heads of 128
# in bf16 at 400 TFLOP/s and 50 GB/s. Within a node it travels NODE_LINK times as fast.
ROW_PAIRS, NODE_LINK, NODE_RANKS = 2000, 8, 8
# `relative_time` at which no other layout is tried for more than NODE_RANKS ranks, where trying takes long; else EVEN.
FAIR = 1.1


def documents(
    sequence_length: int, ranks: int, mask: AttentionMask, ranks_per_node: int = NODE_RANKS, all_to_all_ranks: int = 1
) -> Layout:
    """Hold packed documents whole where they fit, and long ones on as few ranks as their tokens and area ask.

    Of `assign_documents`, `balanced` and `zigzag`, the one of least `relative_time`; the first is taken as it is if it
    is within 5 % of an even share, or 10 % of more than 8 ranks. Batch rows that are packed differently take
    one of the latter two.

    Args:
        ranks_per_node: consecutive ranks that sit in one node, within which documents stay first.
        all_to_all_ranks: consecutive ranks that trade heads: together they are one rank of the ring.

    Raises:
        LayoutError: if S is not divisible by P.
    """
    check_divisible(sequence_length, ranks, f"cp = {ranks}")
    if 1 < all_to_all_ranks < ranks:
        return documents(sequence_length, ranks // all_to_all_ranks, mask, 1).split(all_to_all_ranks)
    ranks_per_node = math.gcd(ranks, ranks_per_node)
    best, least = None, math.inf
    enough = EVEN if ranks <= NODE_RANKS else FAIR
    for layout in _candidates(sequence_length, ranks, mask, ranks_per_node):
        time = relative_time(layout, mask, sequence_length, ranks_per_node)
        if time < least:
            best, least = layout, time
        if least <= enough:
            break
    assert best is not None
    return best


def relative_time(layout: Layout, mask: AttentionMask, sequence_length: int, ranks_per_node: int) -> float:
    """Time of the busiest rank, for its pairs or for its messages in a ring if longer, over that of an even share."""
    pairs = rank_areas(layout, mask, sequence_length)
    sent, crossing = rows_sent(layout, mask, sequence_length, ranks_per_node)
    messages = (ROW_PAIRS * max(across, rows / NODE_LINK) for rows, across in zip(sent, crossing, strict=True))
    return max(map(max, pairs, messages)) * layout.ranks / (sum(pairs) or 1)


def _candidates(sequence_length: int, ranks: int, mask: AttentionMask, ranks_per_node: int) -> Iterator[Layout]:
    rows = set(mask.documents(sequence_length))
    if len(rows) == 1:
        size = ranks_per_node if ranks_per_node > 1 else ranks
        yield Layout.of(assign_documents(rows.pop(), sequence_length, mask.band, ranks, size))
    yield balanced(sequence_length, ranks, mask)
    if sequence_length % (2 * ranks) == 0:
        yield zigzag(sequence_length, ranks)


LAYOUTS: dict[str, Callable[..., Layout]] = {
    "contiguous": lambda sequence_length, ranks, mask, *nodes: contiguous(sequence_length, ranks),
    "zigzag": lambda sequence_length, ranks, mask, *nodes: zigzag(sequence_length, ranks),
    "balanced": lambda sequence_length, ranks, mask, *nodes: balanced(sequence_length, ranks, mask),
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
) -> Layout:
    """Build a layout by name. `auto` is documents where documents are packed, else zigzag.

    Raises:
        LayoutError: an unknown name, or a length that does not divide.
    """
    if name == "auto":
        packed = any(len(documents) > 1 for documents in mask.documents(sequence_length))
        name = "documents" if packed else "zigzag"
    check_name("layout", name, ("auto", *LAYOUTS), LayoutError)
    return LAYOUTS[name](sequence_length, ranks, mask, ranks_per_node, all_to_all_ranks)
