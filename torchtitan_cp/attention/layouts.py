"""Layouts by name: three of equal chunks, and one that follows the packed documents."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from torchtitan_cp.attention.caching import keep_newest
from torchtitan_cp.attention.documents import assign_documents
from torchtitan_cp.attention.errors import LayoutError, check_name
from torchtitan_cp.attention.layout import Layout, pairs_before, rank_areas
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.ring_cost import ROW_PAIRS, RowPairs, relative_time

MAX_CHUNKS = 64
# Each further chunk of a rank counts as this fraction of its work, since smaller chunks make smaller tiles.
CHUNK_COST = 0.005
NODE_RANKS = 8
# A layout with this `relative_time` is taken without trying others. The second number applies where ranks times
# documents exceed MANY, and trying others takes long.
ACCEPTED, ACCEPTED_OF_MANY, MANY = 1.06, 1.25, 8_000


def contiguous(sequence_length: int, ranks: int, *_: object) -> Layout:
    """Give rank r the r-th of P equal chunks. Unbalanced under a causal mask.

    Raises:
        LayoutError: if S is not divisible by P.
    """
    check_divisible(sequence_length, ranks, f"cp = {ranks}")
    return _of_chunks("contiguous", sequence_length // ranks, ([rank] for rank in range(ranks)))


def zigzag(sequence_length: int, ranks: int, *_: object) -> Layout:
    """Give each rank one chunk from the head of the sequence and its mirror from the tail.

    Under a causal mask later queries see more keys, so a head chunk (cheap) pairs with a tail chunk
    (expensive) and every rank does the same work. Source: Megatron-Core's dual-chunk order.

    Args:
        sequence_length: S, in tokens; must be divisible by 2 * ranks.
        ranks: P, size of the context-parallel group.

    Raises:
        LayoutError: if S is not divisible by 2 * P. The message names the nearest lengths that are, and a layout that
            takes S if P divides it.
    """
    if ranks == 1:
        return contiguous(sequence_length, 1)
    others = "" if sequence_length < 1 or sequence_length % ranks else ", or layout = 'balanced'"
    check_divisible(sequence_length, 2 * ranks, f"2 x cp = {2 * ranks}", others)
    tokens = sequence_length // (2 * ranks)
    return _of_chunks("zigzag", tokens, ((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))


def balanced(sequence_length: int, ranks: int, mask: AttentionMask, *_: object) -> Layout:
    """Cut finer, and assign the chunks so that every rank has the same area of the mask.

    Of 1, 2, 4 and 8 chunks a rank, take the number whose busiest rank has the least to do, where each further
    chunk counts as half a percent of work, since larger chunks make larger tiles. Up to 64 chunks are tried where
    a few long documents hold most of the area, and a single chunk exceeds a rank's share. Chunks are assigned
    largest first, each to the rank with the least area so far that has room (Graham's LPT rule, 1969).

    Raises:
        LayoutError: if S is not divisible by P.
    """
    layout, cost = contiguous(sequence_length, ranks), math.inf
    before = pairs_before(mask, sequence_length)
    chunks_per_rank, even_area = 1, before[sequence_length] / ranks
    while sequence_length % (chunks_per_rank * ranks) == 0 and chunks_per_rank <= MAX_CHUNKS:
        penalty = 1 + CHUNK_COST * chunks_per_rank
        if cost <= even_area * penalty:  # even a perfect balance of so many chunks would not be better
            break
        tokens = sequence_length // (chunks_per_rank * ranks)
        ends = [before[stop] for stop in range(0, sequence_length + 1, tokens)]
        chunks, busiest_area = _assign_chunks([stop - start for start, stop in pairwise(ends)], ranks)
        if busiest_area * penalty < cost:
            layout, cost = _of_chunks("balanced", tokens, chunks), busiest_area * penalty
        chunks_per_rank *= 2
    return layout


def _of_chunks(name: str, tokens: int, chunks: Iterable[Iterable[int]]) -> Layout:
    """The layout of ranks that hold these chunks, of `tokens` each."""
    return Layout.of(([(chunk * tokens, (chunk + 1) * tokens) for chunk in of_rank] for of_rank in chunks), name)


def _assign_chunks(areas: list[int], ranks: int) -> tuple[list[list[int]], int]:
    """(chunks of each rank, area of the busiest): the same number to each, largest first to the least busy."""
    chunks: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    busiest_area = 0
    for chunk in sorted(range(len(areas)), key=lambda chunk: -areas[chunk]):
        area, rank = heapq.heappop(heap)
        chunks[rank].append(chunk)
        area += areas[chunk]
        busiest_area = max(busiest_area, area)
        if len(chunks[rank]) < len(areas) // ranks:
            heapq.heappush(heap, (area, rank))
    return chunks, busiest_area


def check_divisible(sequence_length: int, unit: int, name: str, others: str = "") -> None:
    """Raise LayoutError unless `unit`, which the message calls `name`, divides the sequence.

    Args:
        others: what the fix names beside the nearest lengths.
    """
    if sequence_length < 1 or sequence_length % unit:
        lower = sequence_length // unit * unit
        nearest = f"{lower} or {lower + unit}" if lower > 0 else f"{unit}"
        message = f"a sequence of {sequence_length} tokens is not divisible by {name}"
        raise LayoutError(message, fix=f"use {nearest}{others}")


def documents(
    sequence_length: int,
    ranks: int,
    mask: AttentionMask,
    ranks_per_node: int = NODE_RANKS,
    all_to_all_ranks: int = 1,
    row_pairs: RowPairs = ROW_PAIRS,
) -> Layout:
    """Hold packed documents whole where they fit, and long ones on as few ranks as their tokens and area need.

    This layout is taken if its `relative_time` is within 6 % of an even share of the work, messages included (25 % for
    many documents on many ranks). If not, documents are also cut more evenly, and the fastest of these layouts,
    `balanced` and `zigzag` is taken. Batch rows that are packed differently are cut at the borders of all their
    documents, and assigned by their summed area.

    Args:
        ranks_per_node: consecutive ranks that sit in one node; a document stays within a node where it can.
        all_to_all_ranks: consecutive ranks that trade heads: together they are one rank of the ring.
        row_pairs: pairs that a rank computes while a row of keys and values travels, within a node and to another.

    Raises:
        LayoutError: if S is not divisible by P.
    """
    check_divisible(sequence_length, ranks, f"cp = {ranks}")
    if 1 < all_to_all_ranks < ranks:
        return documents(sequence_length, ranks // all_to_all_ranks, mask, 1, 1, row_pairs).split(all_to_all_ranks)
    ranks_per_node = math.gcd(ranks, ranks_per_node)
    before = pairs_before(mask, sequence_length)
    even_area = before[sequence_length] / ranks
    accepted_time = ACCEPTED_OF_MANY if ranks * len(before.borders) > MANY else ACCEPTED
    candidates = _candidates(sequence_length, ranks, mask, ranks_per_node)
    fastest = next(candidates)
    fastest_time = relative_time(fastest, mask, sequence_length, ranks_per_node, row_pairs)
    while fastest_time > accepted_time and (layout := next(candidates, None)):
        # A layout on which a rank's pairs alone take longer than the fastest one is not faster.
        if max(rank_areas(layout, mask, sequence_length)) < fastest_time * even_area:
            time = relative_time(layout, mask, sequence_length, ranks_per_node, row_pairs)
            if time < fastest_time:
                fastest, fastest_time = layout, time
    return fastest


def _candidates(sequence_length: int, ranks: int, mask: AttentionMask, ranks_per_node: int) -> Iterator[Layout]:
    # With more filler the ranks are more even, and more documents are cut.
    for filler, short in ((0.25, 0.125), (0.5, 0.25)):
        yield Layout.of(assign_documents(sequence_length, ranks, mask, ranks_per_node, filler, short))
    yield balanced(sequence_length, ranks, mask)
    if sequence_length % (2 * ranks) == 0:
        yield zigzag(sequence_length, ranks)


LAYOUTS: dict[str, Callable[..., Layout]] = {make.__name__: make for make in (contiguous, zigzag, balanced, documents)}


def check_layout(name: str) -> str:
    """Return `name`, or raise LayoutError unless it is `auto` or a registered layout."""
    return check_name("layout", name, ("auto", *LAYOUTS), LayoutError)


@keep_newest
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
    return LAYOUTS[check_layout(name)](sequence_length, ranks, mask, ranks_per_node, all_to_all_ranks, row_pairs)
