"""Which rank holds which chunk of the sequence. Every rank holds the same number of tokens."""

import heapq
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from torchtitan_cp.attention.errors import LayoutError, check_name
from torchtitan_cp.attention.mask import AttentionMask, Span, merge_spans
from torchtitan_cp.attention.tiles import count_pairs

FEW_CHUNKS, MOST_CHUNKS = 8, 64
CHUNK_COST = 0.005


@dataclass(frozen=True)
class Layout:
    """A sequence cut into equal chunks, and the chunks each rank holds.

    Attributes:
        chunk_tokens: tokens of one chunk.
        chunks: `chunks[r]` are the global chunk indices of rank r, in local order, which ascends.
    """

    chunk_tokens: int
    chunks: tuple[tuple[int, ...], ...]

    @cached_property
    def owners(self) -> tuple[tuple[int, int], ...]:
        """Per chunk, (the rank that holds it, the local row where it begins)."""
        owners = [(0, 0)] * sum(len(held) for held in self.chunks)
        for rank, held in enumerate(self.chunks):
            for slot, chunk in enumerate(held):
                owners[chunk] = (rank, slot * self.chunk_tokens)
        return tuple(owners)

    @property
    def name(self) -> str:
        """Its name, by which rank holds which chunk."""
        ranks, tokens = len(self.chunks), self.chunk_tokens
        if self == contiguous(ranks * tokens, ranks):
            return "contiguous"
        return "zigzag" if self == zigzag(2 * ranks * tokens, ranks) else "balanced"

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The (start, stop) global positions that a rank holds, in local order; touching ones are joined."""
        return merge_spans((chunk * self.chunk_tokens, (chunk + 1) * self.chunk_tokens) for chunk in self.chunks[rank])

    def positions(self, rank: int) -> Tensor:
        """Global position of each local token, `[S/P]` int64."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.spans(rank)])

    def rows_before(self, rank: int, position: int) -> int:
        """How many of a rank's rows lie before a global position."""
        chunk, inside = divmod(position, self.chunk_tokens)
        held = self.chunks[rank]
        slot = bisect_left(held, chunk)
        before = slot * self.chunk_tokens
        return before + inside if slot < len(held) and held[slot] == chunk else before

    def joined(self, size: int) -> "Layout":
        """The layout in which each `size` consecutive ranks are one."""
        groups = range(0, len(self.chunks), size)
        return Layout(
            self.chunk_tokens,
            tuple(tuple(sorted(sum(self.chunks[first : first + size], ()))) for first in groups),
        )


def contiguous(sequence_length: int, ranks: int) -> Layout:
    """Give rank r the r-th of P equal chunks. Unbalanced under a causal mask.

    Raises:
        LayoutError: if S is not divisible by P.
    """
    _check_divisible(sequence_length, ranks, f"cp = {ranks}")
    return Layout(sequence_length // ranks, tuple((rank,) for rank in range(ranks)))


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
    _check_divisible(sequence_length, 2 * ranks, f"2 x cp = {2 * ranks}")
    return Layout(sequence_length // (2 * ranks), tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))


def balanced(sequence_length: int, ranks: int, mask: AttentionMask) -> Layout:
    """Cut finer, and assign the chunks so that every rank has the same area of the mask.

    Of 1, 2, 4 and 8 chunks a rank, take the number whose busiest rank has the least to do, where each further
    chunk counts as half a percent of work, since larger chunks make larger tiles. Where a few long documents
    hold most of the area, one such chunk exceeds a rank's share, and up to 64 are tried. Chunks are assigned
    largest first, each to the rank with the least area so far that has room (Graham's LPT rule, 1969).

    Raises:
        LayoutError: if S is not divisible by P.
    """
    _check_divisible(sequence_length, ranks, f"cp = {ranks}")
    best: tuple[float, Layout] | None = None
    held = 1
    while sequence_length % (held * ranks) == 0 and held <= MOST_CHUNKS:
        chunk_tokens, penalty = sequence_length // (held * ranks), 1 + CHUNK_COST * held
        areas = chunk_areas(chunk_tokens, held * ranks, mask, sequence_length)
        # Even a perfect balance of so many chunks would cost more than the best so far.
        if best and held > FEW_CHUNKS and best[0] <= sum(areas) / ranks * penalty:
            break
        chunks, busiest = _assign_chunks(areas, ranks)
        if best is None or busiest * penalty < best[0]:
            best = (busiest * penalty, Layout(chunk_tokens, chunks))
        held *= 2
    assert best is not None
    return best[1]


def chunk_areas(chunk_tokens: int, chunks: int, mask: AttentionMask, sequence_length: int) -> list[int]:
    """Allowed (query, key) pairs of each chunk's queries, summed over the mask's batch rows."""
    areas, band = [0] * chunks, mask.band
    for documents in mask.documents(sequence_length):
        for first, last in documents:
            for chunk in range(first // chunk_tokens, (last - 1) // chunk_tokens + 1):
                start, stop = max(first, chunk * chunk_tokens), min(last, (chunk + 1) * chunk_tokens)
                areas[chunk] += count_pairs(stop - start, last - first, band, first - start)
    return areas


def _assign_chunks(areas: list[int], ranks: int) -> tuple[tuple[tuple[int, ...], ...], int]:
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
    return tuple(tuple(sorted(chunks)) for chunks in held), busiest


def _check_divisible(sequence_length: int, unit: int, name: str) -> None:
    if sequence_length < 1 or sequence_length % unit:
        lower = sequence_length // unit * unit
        nearest = f"{lower} or {lower + unit}" if lower > 0 else f"{unit}"
        raise LayoutError(f"a sequence of {sequence_length} tokens is not divisible by {name}", fix=f"use {nearest}")


LAYOUTS = {
    "contiguous": lambda sequence_length, ranks, mask: contiguous(sequence_length, ranks),
    "zigzag": lambda sequence_length, ranks, mask: zigzag(sequence_length, ranks),
    "balanced": balanced,
}


@lru_cache(maxsize=256)
def make_layout(name: str, sequence_length: int, ranks: int, mask: AttentionMask) -> Layout:
    """Build a layout by name. `auto` is balanced where documents are packed, else zigzag.

    Raises:
        LayoutError: an unknown name, or a length that does not divide.
    """
    if name == "auto":
        packed = any(len(documents) > 1 for documents in mask.documents(sequence_length))
        name = "balanced" if packed else "zigzag"
    check_name("layout", name, ("auto", *LAYOUTS), LayoutError)
    return LAYOUTS[name](sequence_length, ranks, mask)
