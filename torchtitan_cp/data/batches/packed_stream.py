"""The sequences of S tokens that a stage reads from one source: the documents packed in each, labels and positions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from torchtitan_cp.config.data import ResolvedStageData
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.mixture import UNLIMITED, samples_within
from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.data.batches.windows import OFFSET, PACKINGS, Window, keep_whole
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
            sequence; the last label of the sequence is as with document_mask. IGNORED where the store's mask says that
            the next token is not learned.
        positions: `[S]` int64, 0 to S - 1, or from 0 in each span.
        document_lengths: in tokens, S in sum; each attends to itself only. One number without document_mask.
        spans: the text, in order. What they leave of S is padding: it repeats the text, so that a router sees nothing
            unusual, is a document of its own, and none of it is learned.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    document_lengths: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def document_positions(self) -> np.ndarray:
        """`[S]` int64: how many tokens of its own document precede each in the sequence, masked or not."""
        return np.concatenate([np.arange(length) for length in self._lengths])

    @property
    def weights(self) -> np.ndarray:
        """`[S]` fp32: 1/n for each of the n learned labels of a span, which then add up to 1; 0 for the others."""
        learned, span = self.labels != IGNORED, self._span_numbers
        return (learned / np.maximum(np.bincount(span, learned), 1)[span]).astype(np.float32)

    @property
    def turns(self) -> np.ndarray:
        """`[S]` int64: which run of learned labels of its document each belongs to, from 0.

        -1 for labels that are not learned, and in spans that do not begin their document.
        """
        learned, span = self.labels != IGNORED, self._span_numbers
        first = np.diff(span, prepend=-1) > 0
        begins = np.cumsum(learned & (first | ~np.roll(learned, 1)))
        before = (begins - learned)[first]  # runs that begin before each span
        counted = learned & np.array([*(part.start == 0 for part in self.spans), False])[span]
        return np.where(counted, begins - before[span] - 1, -1)

    @property
    def _lengths(self) -> list[int]:
        """Tokens of each span, and of the padding if there is some."""
        return _with_padding([span.stop - span.start for span in self.spans], len(self.tokens))

    @property
    def _span_numbers(self) -> np.ndarray:
        return np.repeat(np.arange(len(self._lengths)), self._lengths)


def _with_padding(lengths: list[int], seq_len: int) -> list[int]:
    """These lengths, and what they leave of S if they leave something."""
    padding = seq_len - sum(lengths)
    return [*lengths, padding] if padding else lengths


class Cuts(NamedTuple):
    """What packing did to the conversations of a stage.

    Attributes:
        conversations: how many begin in the stage; one that is read twice counts twice.
        cut: how many of these do not end in the sequence that they begin in.
        inside_turns: cuts between two learned tokens.
        padding: the fraction of the tokens of all sequences that is padding.
        epochs: how often the stage reads the source.
    """

    conversations: int
    cut: int
    inside_turns: int
    padding: float
    epochs: float

    def __str__(self) -> str:
        padding = f", {self.padding:.1%} padding" * (self.padding > 0)
        return (
            f"{self.cut:,} of {self.conversations:,} conversations cut, {self.inside_turns:,} cuts inside a learned "
            f"turn{padding} (each conversation is read {self.epochs:.1f} times)"
        )


@dataclass(eq=False)
class PackedStream:
    """A stage's sequences from one source, by number. Each depends only on the arguments and its number.

    `best_fit` keeps conversations whole, so how much a window holds depends on its documents: to find where one begins,
    those before it are packed once. It caches the last two packed windows, because sequences are read mostly in order.
    Memory is 32 bytes for each span in these.

    Args:
        stream: the source's text.
        seq_len: S.
        data: how the stage packs and masks documents. `best_fit` mixes the documents of a window, so it keeps related
            documents together only within a window.
        source: its name, for `PackedSequence.spans`.
        first_token: cursor of the stream at which the stage begins.
        samples: how many sequences the stage takes: the last window ends with them, and none of its text is left
            unread. A stage that is lengthened later must keep the number that its last window began with.
        replacements: further sequences, in place of skipped ones. Each is packed alone, so that a skip changes no
            sequence of the window that is being read.
    """

    stream: TokenStream
    seq_len: int
    data: ResolvedStageData
    source: str = ""
    first_token: int = 0
    samples: int = UNLIMITED
    replacements: int = 0

    def __post_init__(self) -> None:
        self.keeps_whole = self.data.packing == "best_fit" and self.stream.store.has_masks
        self.window_sequences = 1 if self.data.packing == "concat" else self.data.packing_window
        self._window = lru_cache(maxsize=2)(self._make_window)
        # By number of the window. Two threads may fill it, with the same values.
        self._starts = {0: self.first_token}

    def sequence(self, number: int) -> PackedSequence:
        """Sequence `number` of the stage from this source."""
        spans = self._spans(number)
        tokens, targets, labels = _read(self.stream.store, spans)
        if len(tokens) < self.seq_len:
            tokens, ends = np.resize(tokens, self.seq_len), (0, self.seq_len - len(tokens))
            targets, labels = (np.pad(values, ends, constant_values=IGNORED) for values in (targets, labels))
        if not self.data.document_mask:
            labels[:-1] = targets[1:]
        named = tuple(Span(self.source, *span) for span in spans)
        row = PackedSequence(tokens, labels, np.arange(self.seq_len), self.document_lengths(number), named)
        return replace(row, positions=row.document_positions) if self.data.restart_positions else row

    def document_lengths(self, number: int) -> tuple[int, ...]:
        """The same as `sequence(number).document_lengths`, without reading a token."""
        if not self.data.document_mask:
            return (self.seq_len,)
        return tuple(_with_padding([stop - start for _, start, stop in self._spans(number)], self.seq_len))

    def cursor_after(self, count: int) -> int:
        """Where in the stream the next stage begins, after the first `count` sequences of this one.

        A window that was begun counts as read. So where a stage ends before its last planned step, as a gate may have
        it, up to W - 1 of its sequences are left out.
        """
        windows = -(-min(count, self.samples) // self.window_sequences)
        return self._start(windows + max(0, count - self.samples))

    def samples_within(self, max_epochs: float, most: int) -> int:
        """How many sequences are left before the source was read `max_epochs` times.

        Args:
            most: windows that keep documents whole are packed until they have so many sequences; what is left after
                them is counted as if it filled its sequences.
        """
        windows, tokens = 0, self.stream.store.tokens
        limit = math.floor(max_epochs * tokens)
        while self.keeps_whole and windows * self.window_sequences < most and self._start(windows + 1) <= limit:
            windows += 1
        left = samples_within(max_epochs, tokens, self.seq_len, self._start(windows))
        return windows * self.window_sequences + left

    def whole_fraction(self, window: int) -> float:
        """Of the documents that begin in a window, the fraction that is kept whole in one sequence."""
        document, start, stop, _ = self._window(window * self.window_sequences).spans.T
        begins = start == 0
        whole = begins & (stop == self.stream.store.document_lengths[document])
        return int(whole.sum()) / max(1, int(begins.sum()))

    def cuts(self) -> Cuts:
        """What packing does to the conversations of the whole stage."""
        store, counts = self.stream.store, np.zeros(3, dtype=np.int64)
        for begin in range(0, self.samples, self.window_sequences):
            document, start, stop, _ = self._window(begin).spans.T
            cut, first = stop < store.document_lengths[document], start == 0
            ends = zip(document[cut].tolist(), stop[cut].tolist(), strict=True)
            inside = [bool(np.all(store.read_mask(at, end - 1, end + 1))) for at, end in ends]
            counts += first.sum(), (first & cut).sum(), sum(inside)
        conversations, cut_ones, inside_turns = counts.tolist()
        text, tokens = self.cursor_after(self.samples) - self.first_token, self.samples * self.seq_len
        padding = 1 - text / tokens if tokens else 0.0
        return Cuts(conversations, cut_ones, inside_turns, padding, text / store.tokens)

    def _spans(self, number: int) -> list[list[int]]:
        """(document, start, stop) of each span of a sequence, in order."""
        assert number < self.samples + self.replacements, "the stage has no such sequence"
        index = number % self.window_sequences if number < self.samples else 0
        window = self._window(number - index)
        return window.spans[window.first[index] : window.first[index + 1], :OFFSET].tolist()

    def _make_window(self, first: int) -> Window:
        """The packed window that begins with sequence `first`."""
        count = min(self.window_sequences, self.samples - first) if first < self.samples else 1
        windows = first // self.window_sequences if first < self.samples else self._windows + first - self.samples
        rows = self.stream.spans(self._start(windows), count * self.seq_len)
        if self.keeps_whole:
            return keep_whole(rows, self.seq_len, self.stream.store.document_lengths)
        return PACKINGS[self.data.packing](rows, self.seq_len)

    @property
    def _windows(self) -> int:
        """Windows of the stage without replacements."""
        return -(-self.samples // self.window_sequences)

    def _start(self, window: int) -> int:
        """The cursor of the stream at which a window begins: what those before it hold."""
        if not self.keeps_whole:
            return self.first_token + self.seq_len * self._first(window)
        while window not in self._starts:
            last = len(self._starts) - 1
            self._starts[last + 1] = self._starts[last] + self._window(self._first(last)).tokens
        return self._starts[window]

    def _first(self, window: int) -> int:
        """The sequence that a window begins with."""
        whole = window * self.window_sequences
        return whole if window < self._windows else self.samples + window - self._windows


def _read(store: TokenStore, spans: Sequence[Sequence[int]]) -> np.ndarray:
    """The text of the spans, `[3, S]` int64: tokens; targets, the tokens but IGNORED where not learned; labels, the
    targets shifted by one within each document."""
    rows = []
    for document, start, stop in spans:
        end = min(stop + 1, int(store.document_lengths[document]))
        text, mask = store.read(document, start, end), store.read_mask(document, start, end)
        targets = np.append(text if mask is None else np.where(mask, text, IGNORED), IGNORED)
        count = stop - start
        rows.append(np.stack([text[:count], targets[:count], targets[1 : count + 1]]))
    return np.concatenate(rows, axis=1)
