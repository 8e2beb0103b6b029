"""What may attend to what: causal order, a sliding window, and the documents packed into a sequence."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import index
from typing import NamedTuple

from torch import Tensor

from torchtitan_cp.attention.caching import hashed_once, keep_newest
from torchtitan_cp.attention.errors import PlanError

UNBOUNDED = (-1, -1)
Span = tuple[int, int]
Lengths = tuple[tuple[int, ...], ...]


class Band(NamedTuple):
    """Which keys a query sees by distance: low <= key - query <= high; None is unbounded."""

    low: int | None = None
    high: int | None = None

    def shifted(self, distance: int, queries: int, keys: int) -> "Band":
        """This band in the rows of a rectangle whose first key lies `distance` after its first query.

        A bound that every pair of the `queries` x `keys` rectangle satisfies becomes None.
        """
        low = None if self.low is None or self.low - distance <= 1 - queries else self.low - distance
        high = None if self.high is None or self.high - distance >= keys - 1 else self.high - distance
        return Band(low, high)


@hashed_once
@dataclass(frozen=True)
class AttentionMask:
    """Which query may see which key, as plain hashable data.

    Attributes:
        causal: a query sees keys at its own position and before.
        window: (left, right) tokens beside the query that it sees; -1 is unbounded. Under a causal mask
            the right side is the query's own position.
        document_lengths: per batch row, the lengths of the packed documents, which sum to the sequence
            length; a query sees its own document only. None: each row is one document. A single row applies
            to every row of a batch of any size.
        used_lengths: per document, how many of its first rows are tokens; the rest is padding, which
            attends to nothing and is attended to by nothing. None: there is no padding.

    Raises:
        PlanError: the lengths are not a tuple per row, the window is not a pair, a number is not an integer, or a side
            of the window is below -1.
    """

    causal: bool = True
    window: tuple[int, int] = UNBOUNDED
    document_lengths: Lengths | None = None
    used_lengths: Lengths | None = None

    def __post_init__(self) -> None:
        try:
            left, right = map(index, self.window)
            lengths, used = _integers(self.document_lengths), _integers(self.used_lengths)
            self.__dict__.update(window=(left, right), document_lengths=lengths, used_lengths=used)
            hash(self)
        except (TypeError, ValueError):
            fix = "give window (left, right), e.g. (31, -1), and a tuple for each row, document_lengths = ((10, 54),)"
            raise PlanError("a mask must be made of tuples of integers: plans are cached by mask", fix=fix) from None
        if any(side < -1 for side in self.window):
            raise PlanError(f"window = {self.window} has a side below -1", fix="use tokens >= 0, or -1 for unbounded")

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor | Sequence[int],
        cu_seqlens_padded: Tensor | Sequence[int] | None = None,
        *,
        causal: bool = True,
        window: tuple[int, int] = UNBOUNDED,
    ) -> "AttentionMask":
        """The mask of a packed (thd) batch, described as for TransformerEngine and FlashAttention.

        Args:
            cu_seqlens: `[documents + 1]` cumulative lengths, from 0. A tensor on a device is copied to the host.
            cu_seqlens_padded: cumulative lengths with the padding after each document, if there is any.

        Raises:
            PlanError: the lengths do not start at 0, decrease, or are for different numbers of documents.
        """
        lengths = _lengths("cu_seqlens", cu_seqlens)
        if cu_seqlens_padded is None:
            return cls(causal, window, (tuple(length for length in lengths if length),))
        padded = _lengths("cu_seqlens_padded", cu_seqlens_padded)
        if len(padded) != len(lengths):
            raise PlanError(f"cu_seqlens has {len(lengths)} documents and cu_seqlens_padded {len(padded)}")
        documents = [(rows, tokens) for rows, tokens in zip(padded, lengths, strict=True) if rows or tokens]
        return cls(causal, window, (tuple(rows for rows, _ in documents),), (tuple(tokens for _, tokens in documents),))

    def windowed(self, keys: int) -> "AttentionMask":
        """This mask, in which a query sees only the last `keys` keys, its own included; 0 leaves it as it is."""
        return replace(self, window=(keys - 1, -1)) if keys else self

    @property
    def band(self) -> Band:
        """The window and the causal order, as one range of distances."""
        left, right = self.window
        high = 0 if self.causal else right if right >= 0 else None
        return Band(-left if left >= 0 else None, high)

    @property
    def dense(self) -> bool:
        """Whether it has neither a window nor documents, so that all tiles of its plans are full or causal."""
        return self.document_lengths is None and self.band in (Band(), Band(None, 0))

    @keep_newest
    def documents(self, sequence_length: int) -> tuple[tuple[Span, ...], ...]:
        """Per batch row, the (start, stop) of each document's tokens, in global positions.

        Raises:
            PlanError: lengths are below 1 or do not sum to `sequence_length`, or used lengths exceed them.
        """
        lengths, used = self.document_lengths, self.used_lengths
        if lengths is None:
            if used is not None:
                raise PlanError("used_lengths is given without document_lengths", fix="give both, or neither")
            return (((0, sequence_length),),)
        if not lengths:
            raise PlanError("document_lengths has no batch row", fix="give one tuple of lengths per row, or None")
        if used is not None and [len(row) for row in used] != [len(row) for row in lengths]:
            raise PlanError("used_lengths and document_lengths differ in shape", fix="give one number per document")
        rows = zip(range(len(lengths)), lengths, used or lengths, strict=True)
        return tuple(_token_spans(sequence_length, *row) for row in rows)


def _integers(rows: Lengths | None) -> Lengths | None:
    """The rows, with integers of numpy or torch as Python's: `+=` would change a tensor everywhere.

    Raises:
        TypeError: a number is not an integer.
    """
    if rows is None or all({*map(type, row)} <= {int} for row in rows):
        return rows
    return tuple(tuple(map(index, row)) for row in rows)


def _token_spans(sequence_length: int, row: int, lengths: tuple[int, ...], used: tuple[int, ...]) -> tuple[Span, ...]:
    """The (start, stop) of each document's tokens in batch row `row`, without documents that have none."""
    if min(lengths, default=0) < 1 or sum(lengths) != sequence_length:
        raise PlanError(
            f"document_lengths of batch row {row} sum to {sum(lengths)} with a shortest of {min(lengths, default=0)}",
            fix=f"give lengths of at least 1 that sum to seq_len = {sequence_length}",
        )
    for length, tokens in zip(lengths, used, strict=True):
        if not 0 <= tokens <= length:
            raise PlanError(
                f"a document of batch row {row} uses {tokens} of {length} rows", fix="use 0 to all of its rows"
            )
    starts = accumulate(lengths, initial=0)
    return tuple((start, start + tokens) for start, tokens in zip(starts, used, strict=False) if tokens)


def _lengths(name: str, cumulative: Tensor | Sequence[int]) -> list[int]:
    numbers = cumulative.tolist() if isinstance(cumulative, Tensor) else list(cumulative)
    if not numbers or numbers[0] != 0 or any(later < earlier for earlier, later in pairwise(numbers)):
        raise PlanError(f"{name} does not rise from 0", fix="give [0, length of the first document, ...]")
    return [later - earlier for earlier, later in pairwise(numbers)]


def count_rows(spans: tuple[Span, ...]) -> int:
    """How many rows the spans hold."""
    return sum(stop - start for start, stop in spans)


def rows_before(spans: tuple[Span, ...], position: int) -> int:
    """How many rows of the spans lie before a position."""
    return sum([min(stop, position) - start for start, stop in spans if start < position])


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sort spans, and join those that overlap or touch."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)
