"""Sequences of S tokens packed from a stream, by number: the documents in each, their labels and positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.config.sections import ResolvedStageData
from torchtitan_cp.data.batches.stream import SeparatedStore, TokenStream
from torchtitan_cp.data.batches.windows import DOCUMENT, OFFSET, PACKINGS, START, STOP, Window
from torchtitan_cp.data.corpus.store import TokenStore


class Span(NamedTuple):
    """Tokens `start` to `stop` of a document of a source."""

    source: str
    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class PackedSequence:
    """One row of a batch, before ranks share it.

    Attributes:
        tokens: `[S]` int64.
        labels: `[S]` int64. With document_mask, the next token of the same document, even where the document continues
            in another sequence, and IGNORED after the document's last token. Without it, the next token of the
            sequence; the last label of the sequence is as with document_mask.
        positions: `[S]` int64, 0 to S - 1, or from 0 in each span.
        document_lengths: in tokens, S in sum; each attends to itself only. One number without document_mask.
        spans: the text, in order.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    document_lengths: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def document_positions(self) -> np.ndarray:
        """`[S]` int64: how many tokens of its own document precede each in the sequence, masked or not."""
        return np.concatenate([np.arange(span.stop - span.start) for span in self.spans])


@dataclass(eq=False)
class PackedStream:
    """A stage's sequences from one source, by number. Each depends only on the arguments and its number.

    It caches the last two packed windows, because sequences are read mostly in order. Memory is 32 bytes for each span
    in two windows.

    Args:
        stream: the source's text.
        seq_len: S.
        data: how the stage packs and masks documents. `best_fit` mixes the documents of a window, so it keeps related
            documents together only within a window.
        source: its name, for `PackedSequence.spans`.
        first_token: cursor of the stream at which the stage begins.
        samples: how many sequences the stage takes, if known: the last window then ends with them, and none of its
            text is left unread. A stage that is lengthened later must keep the number that its last window began with.
    """

    stream: TokenStream
    seq_len: int
    data: ResolvedStageData
    source: str = ""
    first_token: int = 0
    samples: int | None = None

    def __post_init__(self) -> None:
        self.window_sequences = 1 if self.data.packing == "concat" else self.data.packing_window
        self._window = lru_cache(maxsize=2)(self._make_window)

    def sequence(self, number: int) -> PackedSequence:
        """Sequence `number` of the stage from this source."""
        spans = self._spans(number)
        tokens, labels = _read(self.stream.store, spans)
        if not self.data.document_mask:
            labels[:-1] = tokens[1:]
        lengths = [stop - start for _, start, stop in spans]
        positions = [np.arange(length) for length in (lengths if self.data.restart_positions else [self.seq_len])]
        return PackedSequence(
            tokens,
            labels,
            np.concatenate(positions),
            self.document_lengths(number),
            tuple(Span(self.source, *span) for span in spans),
        )

    def document_lengths(self, number: int) -> tuple[int, ...]:
        """The same as `sequence(number).document_lengths`, without reading a token."""
        if not self.data.document_mask:
            return (self.seq_len,)
        return tuple(stop - start for _, start, stop in self._spans(number))

    def cursor_after(self, count: int) -> int:
        """Where in the stream the next stage begins, after the first `count` sequences of this one.

        A window that was begun counts as read: without `samples`, up to W - 1 of its sequences may be left out.
        """
        sequences = -(-count // self.window_sequences) * self.window_sequences
        return self.first_token + self.seq_len * (sequences if self.samples is None else min(sequences, self.samples))

    def whole_fraction(self, window: int) -> float:
        """Fraction of a window's documents that lie whole in one sequence."""
        rows, packed = self._window(window)
        ends = self.stream.store.document_lengths[packed.spans[:, DOCUMENT]]
        return int(((packed.spans[:, START] == 0) & (packed.spans[:, STOP] == ends)).sum()) / len(rows)

    def _spans(self, number: int) -> list[list[int]]:
        """(document, start, stop) of each span of a sequence, in order."""
        assert self.samples is None or number < self.samples, "the stage has no such sequence"
        index, sequence = divmod(number, self.window_sequences)
        _, window = self._window(index)
        return window.spans[window.first[sequence] : window.first[sequence + 1], :OFFSET].tolist()

    def _make_window(self, index: int) -> tuple[np.ndarray, Window]:
        """The text of a window as rows of (document, start, stop), and the same packed."""
        first = index * self.window_sequences
        count = self.window_sequences if self.samples is None else min(self.window_sequences, self.samples - first)
        rows = self.stream.spans(self.first_token + first * self.seq_len, count * self.seq_len)
        return rows, PACKINGS[self.data.packing](rows, self.seq_len)


def _read(store: TokenStore | SeparatedStore, spans: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the spans, and the token that follows each in its document: both `[S]` int64."""
    tokens, labels = [], []
    for document, start, stop in spans:
        continues = stop < store.document_lengths[document]
        text = store.read(document, start, stop + int(continues))
        tokens.append(text[: stop - start])
        labels.append(text[1:] if continues else np.append(text[1:], IGNORED))
    return np.concatenate(tokens), np.concatenate(labels)
