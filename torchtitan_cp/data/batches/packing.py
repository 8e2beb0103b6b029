"""Sequences of S tokens packed from a stream, by number: the documents in each, their labels and positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from torchtitan_cp.data.batches.stream import Documents, TokenStream
from torchtitan_cp.data.batches.windows import DOCUMENT, PACKINGS, PLACE, START, STOP, Window, cut_rows
from torchtitan_cp.data.errors import DataError

IGNORED = -100  # the label that counts nothing: what cross entropy ignores in torch, and `optimizer.IGNORED`


@dataclass(frozen=True)
class Packing:
    """How a stage's sequences are made of documents.

    Attributes:
        method: `concat` or `best_fit`. The latter mixes the documents of a window, so that of an order that keeps
            related documents together only the window's share is left: use `concat` with it, or a small window.
        window_sequences: W, how many sequences `best_fit` packs at once; `concat` needs no window.
        document_mask: tokens see their own document only, and its last token predicts nothing.
        restart_positions: positions begin at 0 in each document.
    """

    method: str
    window_sequences: int
    document_mask: bool
    restart_positions: bool


class Piece(NamedTuple):
    """Which text lies in a sequence: tokens `start` to `stop` of a document of a source."""

    source: str
    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class PackedSequence:
    """One row of a batch, before ranks share it.

    Attributes:
        tokens: `[S]` int64.
        labels: `[S]` int64. With document_mask, the next token of the same document, also after its last token here
            where the document goes on elsewhere, and IGNORED after its very last. Without, the next token of the
            sequence; after the last of the sequence, as with document_mask.
        positions: `[S]` int64, 0 to S - 1, or from 0 on in each piece.
        document_lengths: in tokens, S in sum: what attends to itself only. One number without document_mask.
        pieces: the text, in the order it lies in.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    document_lengths: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def document_positions(self) -> np.ndarray:
        """`[S]` int64: how many tokens of its own document lie before each in the sequence, masked or not."""
        return np.concatenate([np.arange(piece.stop - piece.start) for piece in self.pieces])


@dataclass(frozen=True)
class PackingReport:
    """What a packing did to the text of one window.

    Attributes:
        documents: documents of which the window holds text; one that comes twice (another block, another epoch)
            counts twice.
        whole: those that lie whole in one sequence.
        cut: those whose text in the window lies in more than one piece.
        cut_by_concat: those that `concat` would have cut.
        newly_cut: those that are cut and that `concat` would not have cut.
    """

    documents: int
    whole: int
    cut: int
    cut_by_concat: int
    newly_cut: int

    @property
    def whole_fraction(self) -> float:
        """Share of documents kept whole."""
        return self.whole / self.documents


class PackedStream:
    """A stage's sequences from one source, by number. Each depends on the arguments and its number alone.

    A class, because the last two windows stay packed: sequences are read mostly in order. Memory is 32 bytes for each
    piece of text in two windows.

    Args:
        stream: the source's text.
        seq_len: S.
        packing: how documents become sequences.
        source: its name, for `PackedSequence.pieces`.
        first_token: cursor of the stream at which the stage begins.
        samples: how many sequences the stage takes, where that is known: the last window then ends with them, and no
            text of it is left unread. A stage that is lengthened later must keep the number it began its last window
            with.

    Raises:
        DataError: the method is not known, or a window holds no sequence.
    """

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        packing: Packing,
        *,
        source: str = "",
        first_token: int = 0,
        samples: int | None = None,
    ) -> None:
        if packing.method not in PACKINGS:
            raise DataError(f"the packing {packing.method!r} is not known", fix=f"use {' or '.join(PACKINGS)}")
        if packing.window_sequences < 1:
            raise DataError(
                f"a packing window of {packing.window_sequences} sequences holds none", fix="use 1 or more, such as 256"
            )
        self.stream, self.seq_len, self.packing, self.source = stream, seq_len, packing, source
        self.first_token, self.samples = first_token, samples
        self.window_sequences = 1 if packing.method == "concat" else packing.window_sequences
        self._window = lru_cache(maxsize=2)(self._make_window)

    def sequence(self, number: int) -> PackedSequence:
        """Sequence `number` of the stage from this source."""
        pieces = self._pieces(number)
        tokens, labels = _read(self.stream.store, pieces)
        if not self.packing.document_mask:
            labels[:-1] = tokens[1:]
        lengths = [stop - start for _, start, stop in pieces]
        positions = [np.arange(length) for length in (lengths if self.packing.restart_positions else [self.seq_len])]
        return PackedSequence(
            tokens,
            labels,
            np.concatenate(positions),
            self.document_lengths(number),
            tuple(Piece(self.source, *piece) for piece in pieces),
        )

    def document_lengths(self, number: int) -> tuple[int, ...]:
        """As of `sequence(number)`, without reading a token: enough to tell its work."""
        if not self.packing.document_mask:
            return (self.seq_len,)
        return tuple(stop - start for _, start, stop in self._pieces(number))

    def cursor_after(self, count: int) -> int:
        """Where in the stream the next stage begins, after the first `count` sequences of this one.

        A window that was begun counts as read: without `samples`, up to W - 1 of its sequences may be left out.
        """
        sequences = -(-count // self.window_sequences) * self.window_sequences
        return self.first_token + self.seq_len * (sequences if self.samples is None else min(sequences, self.samples))

    def epochs(self, count: int) -> float:
        """How often the source was read, from its first stage to the first `count` sequences of this one."""
        return self.cursor_after(count) / self.stream.store.tokens

    def report(self, window: int) -> PackingReport:
        """What packing did to the text of sequences `window` * W and on."""
        rows, packed = self._window(window)
        plain = PACKINGS["concat"](rows, self.seq_len)
        cut, cut_by_concat = cut_rows(rows, packed), cut_rows(rows, plain)
        pieces = packed.pieces
        ends = self.stream.store.document_lengths[pieces[:, DOCUMENT]]
        return PackingReport(
            documents=len(rows),
            whole=int(((pieces[:, START] == 0) & (pieces[:, STOP] == ends)).sum()),
            cut=int(cut.sum()),
            cut_by_concat=int(cut_by_concat.sum()),
            newly_cut=int((cut & ~cut_by_concat).sum()),
        )

    def _pieces(self, number: int) -> list[list[int]]:
        """(document, start, stop) of a sequence, in the order they lie in it."""
        assert self.samples is None or number < self.samples, "the stage has no such sequence"
        index, sequence = divmod(number, self.window_sequences)
        _, window = self._window(index)
        return window.pieces[window.first[sequence] : window.first[sequence + 1], :PLACE].tolist()

    def _make_window(self, index: int) -> tuple[np.ndarray, Window]:
        """The text of a window as rows of (document, start, stop), and the same packed."""
        first = index * self.window_sequences
        count = self.window_sequences if self.samples is None else min(self.window_sequences, self.samples - first)
        rows = self.stream.pieces(self.first_token + first * self.seq_len, count * self.seq_len)
        return rows, PACKINGS[self.packing.method](rows, self.seq_len)


def _read(store: Documents, pieces: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the pieces, and the token that follows each in its document: both `[S]` int64."""
    tokens, labels = [], []
    for document, start, stop in pieces:
        goes_on = stop < store.document_lengths[document]
        text = store.read(document, start, stop + int(goes_on))
        tokens.append(text[: stop - start])
        labels.append(text[1:] if goes_on else np.append(text[1:], IGNORED))
    return np.concatenate(tokens), np.concatenate(labels)
