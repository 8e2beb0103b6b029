"""How a window of text is packed into sequences of S tokens: nothing is dropped.

A window is W * S consecutive tokens of the stream, given as rows of (document, start, stop). A packing turns it into W
sequences of S tokens and depends only on the window. Plain text fills them. Conversations are kept whole: a window then
takes as much from the front of the rows as fits, and the rest of a sequence is padding. This is integer arithmetic; no
token is read.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

DOCUMENT, START, STOP, OFFSET = range(4)


class Window(NamedTuple):
    """A packed window.

    Attributes:
        spans: `[spans, 4]` int64, rows of (document, start, stop, offset): the sequences one after another, the
            spans of each in the order of the stream. `offset` is where a span begins in the window, in tokens.
        first: `[W + 1]` int64, the row at which each sequence begins; the last is the number of rows.
    """

    spans: np.ndarray
    first: np.ndarray

    @property
    def tokens(self) -> int:
        """How many tokens of the stream the window holds."""
        return int(_lengths(self.spans).sum())


def concat(rows: np.ndarray, seq_len: int) -> Window:
    """Sequences are consecutive tokens; a document is cut where a sequence ends.

    Args:
        rows: `[rows, 3]` int64, (document, start, stop) of W * S tokens in the order of the stream.
        seq_len: S.
    """
    spans = _with_offsets(rows)
    tokens = int(_lengths(spans).sum())
    spans = _cut(spans, np.arange(seq_len, tokens, seq_len))
    return _window(spans, spans[:, OFFSET] // seq_len, tokens // seq_len)


def best_fit(rows: np.ndarray, seq_len: int) -> Window:
    """Best-fit decreasing: as many documents as possible lie whole in one sequence.

    Text longer than S is cut into parts of S tokens and a remainder. Longest first, each part goes to the sequence
    with the least room that still holds it; parts that fit nowhere are cut to fill the remaining room. Sequences are
    ordered by where their longest part lies in the stream, so that long documents do not all come first. Best fit is a
    heuristic: a window in which `concat` cuts fewer documents is packed by `concat`.

    Source: Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830), which pads instead.

    Args:
        rows: `[rows, 3]` int64, (document, start, stop) of W * S tokens in the order of the stream.
        seq_len: S.
    """
    spans = _with_offsets(rows)
    sequences = int(_lengths(spans).sum()) // seq_len
    parts = _cut_long(spans, seq_len)
    sequence, rooms = _best_fit_decreasing(_lengths(parts), seq_len, sequences)
    left = parts[sequence < 0]
    left = left[np.argsort(-_lengths(left), kind="stable")]
    fill, filled = _fill(left, rooms)
    spans, sequence = np.concatenate([parts[sequence >= 0], fill]), np.concatenate([sequence[sequence >= 0], filled])
    packed = _window(spans, _by_longest(spans, sequence)[sequence], sequences)
    plain = concat(rows, seq_len)
    return packed if cut_rows(rows, packed).sum() <= cut_rows(rows, plain).sum() else plain


def keep_whole(rows: np.ndarray, seq_len: int, document_lengths: np.ndarray) -> Window:
    """Best-fit decreasing that cuts no document of up to S tokens, and leaves room in sequences instead.

    It takes the most documents from the front of the rows that best fit decreasing has room for, as far as a few tries
    find it, then one after another while one fits. Longer documents are cut as by `best_fit`.

    Args:
        rows: `[rows, 3]` int64, (document, start, stop) of W * S tokens in the order of the stream.
        seq_len: S.
        document_lengths: `[documents]` int64, of the store: the last row may end before its document does.

    Returns:
        W sequences, none empty. Their spans are the first `Window.tokens` tokens of the rows.
    """
    parts = _cut_long(_with_offsets(rows), seq_len)
    document, start, stop, _ = parts[-1].tolist()
    if stop < document_lengths[document] and stop - start < seq_len:
        parts = parts[:-1]  # of a document that the next window begins with
    lengths, sequences, count = _lengths(parts), int(_lengths(rows).sum()) // seq_len, len(parts)
    ends = np.cumsum(lengths)
    while True:
        sequence, rooms = _best_fit_decreasing(lengths[:count], seq_len, sequences)
        placed = int(lengths[:count][sequence >= 0].sum())
        if placed == ends[count - 1]:
            break
        count = int(np.searchsorted(ends, placed, side="right"))
    more = list[int]()
    for length in lengths[count:].tolist():
        found = _take_room(rooms, length)
        if found < 0:
            break
        more.append(found)
    spans, sequence = parts[: count + len(more)], np.append(sequence, np.array(more, dtype=np.int64))
    return _window(spans, _by_longest(spans, sequence)[sequence], sequences)


PACKINGS: dict[str, Callable[[np.ndarray, int], Window]] = {"concat": concat, "best_fit": best_fit}


def cut_rows(rows: np.ndarray, window: Window) -> np.ndarray:
    """Which of the window's rows lie in more than one span: `[rows]` bool."""
    row = np.searchsorted(np.cumsum(_lengths(rows)), window.spans[:, OFFSET], side="right")
    return np.bincount(row, minlength=len(rows)) > 1


def _lengths(spans: np.ndarray) -> np.ndarray:
    return spans[:, STOP] - spans[:, START]


def _with_offsets(rows: np.ndarray) -> np.ndarray:
    """(document, start, stop) -> (document, start, stop, offset)."""
    lengths = _lengths(rows)
    return np.column_stack([rows, np.cumsum(lengths) - lengths])


def _cut(spans: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Cut spans at these positions of their concatenation.

    Args:
        spans: `[spans, 4]` int64, none empty.
        at: `[cuts]` int64, positions inside the concatenation, no two the same.

    Returns:
        `[spans + cuts, 4]` int64 in the same order; a cut at the end of a span adds none.
    """
    ends = np.cumsum(_lengths(spans))
    new = at[ends[np.searchsorted(ends, at)] != at]
    edges = np.sort(np.concatenate([[0], ends, new]), kind="stable")  # NumPy's unique hashes, which takes seconds
    owner = np.searchsorted(ends, edges[:-1], side="right")
    inside = edges[:-1] - (ends - _lengths(spans))[owner]
    cut = spans[owner]
    cut[:, START] += inside
    cut[:, OFFSET] += inside
    cut[:, STOP] = cut[:, START] + np.diff(edges)
    return cut


def _cut_long(spans: np.ndarray, seq_len: int) -> np.ndarray:
    """Cut spans longer than S into parts of S tokens and a remainder; `[parts, 4]` in the same order."""
    cuts = (_lengths(spans) - 1) // seq_len
    earlier = np.repeat(np.cumsum(cuts) - cuts, cuts)  # cuts of the spans before
    return _cut(spans, np.repeat(spans[:, OFFSET], cuts) + seq_len * (np.arange(cuts.sum()) - earlier + 1))


def _best_fit_decreasing(lengths: np.ndarray, seq_len: int, sequences: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Which sequence holds each part whole.

    Args:
        lengths: `[parts]` int64, in 1..S, at most S * `sequences` in sum.
        seq_len: S.
        sequences: W.

    Returns:
        The sequence of each part, `[parts]` int64, -1 where none has room; and (room, sequence) of the sequences that
        are not full, least room first.
    """
    sequence_of = np.full(len(lengths), -1)
    rooms = [(seq_len, sequence) for sequence in range(sequences)]
    order = np.argsort(-lengths, kind="stable")
    for part, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        sequence_of[part] = _take_room(rooms, length)
    return sequence_of, rooms


def _take_room(rooms: list[tuple[int, int]], length: int) -> int:
    """The sequence with the least room for this many tokens, which it then has no longer; -1 if none has room.

    Args:
        rooms: (room, sequence), least room first; changed in place.
    """
    index = bisect_left(rooms, (length, 0))
    if index == len(rooms):
        return -1
    room, sequence = rooms.pop(index)
    if room > length:
        insort(rooms, (room - length, sequence))
    return sequence


def _fill(left: np.ndarray, rooms: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Cut the parts that fit nowhere so that they fill the remaining room exactly, the largest room first.

    Returns:
        Spans `[spans, 4]`, and the sequence of each, `[spans]`; both int64.
    """
    room, sequence = np.array(rooms[::-1], dtype=np.int64).reshape(-1, 2).T
    assert room.sum() == _lengths(left).sum(), "a window holds W * S tokens"
    ends = np.cumsum(room)
    spans = _cut(left, ends[:-1])
    begins = np.cumsum(_lengths(spans)) - _lengths(spans)
    return spans, sequence[np.searchsorted(ends, begins, side="right")]


def _by_longest(spans: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """The rank of each sequence, `[W]` int64, when sequences are ordered by the offset of their longest span."""
    order = np.lexsort((spans[:, OFFSET], -_lengths(spans), sequence))
    _, first = np.unique(sequence[order], return_index=True)
    longest = spans[order[first], OFFSET]
    return np.argsort(np.argsort(longest))


def _window(spans: np.ndarray, sequence: np.ndarray, sequences: int) -> Window:
    """A window of spans, given the sequence of each."""
    order = np.argsort(sequence * (spans[:, OFFSET].max() + 1) + spans[:, OFFSET])  # faster than a lexsort
    return Window(spans[order], np.searchsorted(sequence[order], np.arange(sequences + 1)))
