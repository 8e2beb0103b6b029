"""How the text of a window is dealt out to sequences of S tokens: nothing is dropped, nothing is padded.

A window is a stretch of the stream of exactly W * S tokens, given as rows of (document, start, stop). A packing turns
it into W sequences of S tokens, and depends on nothing but the window. Pure arithmetic on integers; no token is read.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from torchtitan_cp.data.batches.stream import counted

DOCUMENT, START, STOP, PLACE = range(4)


class Window(NamedTuple):
    """A window, packed.

    Attributes:
        pieces: `[pieces, 4]` int64, rows of (document, start, stop, place): the sequences one after another, the
            pieces of each in the order of the stream. `place` is where a piece begins in the window, in tokens.
        first: `[W + 1]` int64, the row at which each sequence begins; the last is the number of rows.
    """

    pieces: np.ndarray
    first: np.ndarray


def concat(rows: np.ndarray, seq_len: int) -> Window:
    """Sequences are consecutive tokens; a document is cut where a sequence ends.

    Args:
        rows: `[rows, 3]` int64, (document, start, stop) of W * S tokens in the order of the stream.
        seq_len: S.
    """
    placed = _placed(rows)
    tokens = int(_lengths(placed).sum())
    pieces = _cut(placed, np.arange(seq_len, tokens, seq_len))
    return _window(pieces, pieces[:, PLACE] // seq_len, tokens // seq_len)


def best_fit(rows: np.ndarray, seq_len: int) -> Window:
    """Best-fit decreasing: as many documents as possible lie whole in one sequence.

    Text longer than S is cut into parts of S tokens and a remainder. Longest first, each part goes to the sequence
    with the least room that still takes it; parts that fit nowhere are cut to fill the room that is left. Sequences
    come in the stream's order of their longest part, so that long documents are not read before short ones.
    A window in which `concat` happens to cut fewer documents is packed by `concat`: best fit is a heuristic.

    Source: Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830), which pads what is left.

    Args:
        rows: `[rows, 3]` int64, (document, start, stop) of W * S tokens in the order of the stream.
        seq_len: S.
    """
    placed = _placed(rows)
    sequences = int(_lengths(placed).sum()) // seq_len
    parts = _cut_long(placed, seq_len)
    sequence, rooms = _best_fit_decreasing(_lengths(parts), seq_len, sequences)
    left = parts[sequence < 0]
    left = left[np.argsort(-_lengths(left), kind="stable")]
    fill, filled = _fill(left, rooms)
    pieces, sequence = np.concatenate([parts[sequence >= 0], fill]), np.concatenate([sequence[sequence >= 0], filled])
    packed = _window(pieces, _by_longest(pieces, sequence)[sequence], sequences)
    plain = concat(rows, seq_len)
    return packed if cut_rows(rows, packed).sum() <= cut_rows(rows, plain).sum() else plain


PACKINGS: dict[str, Callable[[np.ndarray, int], Window]] = {"concat": concat, "best_fit": best_fit}


def cut_rows(rows: np.ndarray, window: Window) -> np.ndarray:
    """Which of the window's rows lie in more than one piece: `[rows]` bool."""
    row = np.searchsorted(np.cumsum(_lengths(rows)), window.pieces[:, PLACE], side="right")
    return np.bincount(row, minlength=len(rows)) > 1


def _lengths(pieces: np.ndarray) -> np.ndarray:
    return pieces[:, STOP] - pieces[:, START]


def _placed(rows: np.ndarray) -> np.ndarray:
    """(document, start, stop) -> (document, start, stop, place)."""
    lengths = _lengths(rows)
    return np.column_stack([rows, np.cumsum(lengths) - lengths])


def _cut(pieces: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Pieces cut at places of their concatenation.

    Args:
        pieces: `[pieces, 4]` int64, none empty.
        at: `[cuts]` int64, counted from the first token of the first piece; inside the concatenation.

    Returns:
        `[pieces + cuts, 4]` int64 in the same order; a cut where a piece ends anyway adds none.
    """
    ends = np.cumsum(_lengths(pieces))
    edges = np.unique(np.concatenate([[0], ends, at]))
    owner = np.searchsorted(ends, edges[:-1], side="right")
    inside = edges[:-1] - (ends - _lengths(pieces))[owner]
    cut = pieces[owner]
    cut[:, START] += inside
    cut[:, PLACE] += inside
    cut[:, STOP] = cut[:, START] + np.diff(edges)
    return cut


def _cut_long(pieces: np.ndarray, seq_len: int) -> np.ndarray:
    """Pieces, those longer than S cut into parts of S tokens and a remainder; `[parts, 4]` in the same order."""
    cuts = (_lengths(pieces) - 1) // seq_len
    begins = np.cumsum(_lengths(pieces)) - _lengths(pieces)
    return _cut(pieces, np.repeat(begins, cuts) + seq_len * (counted(cuts) + 1))


def _best_fit_decreasing(lengths: np.ndarray, seq_len: int, sequences: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Which sequence takes each part whole.

    Parts of one length are placed together: the sequence that took one has the least room of all that take another.

    Args:
        lengths: `[parts]` int64, in 1..S, S * `sequences` in sum.
        seq_len: S.
        sequences: W.

    Returns:
        The sequence of each part, `[parts]` int64, -1 where none takes it; and (room, sequence) of the sequences that
        are not full, least room first.
    """
    order = np.argsort(-lengths, kind="stable")
    rooms: list[tuple[int, int]] = []
    opened = 0
    chosen, repeats = [], []
    for length, count in _runs(lengths[order]):
        left = count
        while left:
            index = bisect_left(rooms, (length, 0))
            if index < len(rooms):
                room, sequence = rooms.pop(index)
            elif opened < sequences:
                room, sequence, opened = seq_len, opened, opened + 1
            else:
                break
            taken = min(left, room // length)
            chosen.append(sequence)
            repeats.append(taken)
            left -= taken
            if room > taken * length:
                insort(rooms, (room - taken * length, sequence))
        chosen.append(-1)
        repeats.append(left)
    sequence_of = np.empty(len(lengths), dtype=np.int64)
    sequence_of[order] = np.repeat(np.array(chosen, dtype=np.int64), repeats)
    return sequence_of, rooms


def _runs(ordered: np.ndarray) -> list[tuple[int, int]]:
    """(value, how often) of equal neighbours."""
    values, counts = np.unique(-ordered, return_counts=True)
    return list(zip((-values).tolist(), counts.tolist(), strict=True))


def _fill(left: np.ndarray, rooms: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Parts that fit nowhere, cut to fill what room is left, which is exactly theirs; the largest room first.

    Returns:
        Pieces `[pieces, 4]`, and the sequence of each, `[pieces]`; both int64.
    """
    room, sequence = np.array(rooms[::-1], dtype=np.int64).reshape(-1, 2).T
    assert room.sum() == _lengths(left).sum(), "a window holds W * S tokens"
    ends = np.cumsum(room)
    pieces = _cut(left, ends[:-1])
    begins = np.cumsum(_lengths(pieces)) - _lengths(pieces)
    return pieces, sequence[np.searchsorted(ends, begins, side="right")]


def _by_longest(pieces: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """The place of each sequence among all, `[W]` int64, when they are ordered by where their longest piece lies."""
    order = np.lexsort((pieces[:, PLACE], -_lengths(pieces), sequence))
    _, first = np.unique(sequence[order], return_index=True)
    longest = pieces[order[first], PLACE]
    return np.argsort(np.argsort(longest))


def _window(pieces: np.ndarray, sequence: np.ndarray, sequences: int) -> Window:
    """Pieces and the sequence of each, put in order."""
    order = np.lexsort((pieces[:, PLACE], sequence))
    return Window(pieces[order], np.searchsorted(sequence[order], np.arange(sequences + 1)))
