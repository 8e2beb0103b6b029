"""Which chunk of the sequence lives on which rank. Every rank holds the same number of tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_cp.attention.errors import LayoutError


@dataclass(frozen=True)
class Layout:
    """A sequence cut into equal chunks, and the chunks each rank holds.

    Attributes:
        chunk_tokens: tokens of one chunk.
        chunks: `chunks[r]` are the global chunk indices of rank r, in local order, which ascends.
    """

    chunk_tokens: int
    chunks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        assert all(list(held) == sorted(held) for held in self.chunks), "local order is global order"

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """The (start, stop) global positions of a rank's chunks, in local order."""
        return [(chunk * self.chunk_tokens, (chunk + 1) * self.chunk_tokens) for chunk in self.chunks[rank]]

    def positions(self, rank: int) -> Tensor:
        """Global position of each local token, `[S/P]` int64."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.spans(rank)])


def contiguous(sequence_length: int, ranks: int) -> Layout:
    """Give rank r the r-th of P equal pieces. Unbalanced under a causal mask.

    Raises:
        LayoutError: if S is not divisible by P.
    """
    _check_divisible(sequence_length, ranks, f"cp = {ranks}")
    return Layout(sequence_length // ranks, tuple((rank,) for rank in range(ranks)))


def zigzag(sequence_length: int, ranks: int) -> Layout:
    """Give each rank one chunk from the head of the sequence and its mirror from the tail.

    Under a causal mask later queries see more keys, so a head chunk (cheap) pairs with a tail chunk
    (dear) and every rank does the same work. Source: Megatron-Core's dual-chunk order.

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


def _check_divisible(sequence_length: int, unit: int, name: str) -> None:
    if sequence_length < 1 or sequence_length % unit:
        lower = sequence_length // unit * unit
        nearest = f"{lower} or {lower + unit}" if lower > 0 else f"{unit}"
        raise LayoutError(f"a sequence of {sequence_length} tokens is not divisible by {name}", fix=f"use {nearest}")


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {"contiguous": contiguous, "zigzag": zigzag}


def make_layout(name: str, sequence_length: int, ranks: int) -> Layout:
    """Build a layout by name; `auto` is zigzag.

    Raises:
        LayoutError: an unknown name, or a length that does not divide.
    """
    if name == "auto":
        return zigzag(sequence_length, ranks)
    if name not in LAYOUTS:
        raise LayoutError(f"layout {name!r} is not available", fix=f"use one of auto, {', '.join(LAYOUTS)}")
    return LAYOUTS[name](sequence_length, ranks)
