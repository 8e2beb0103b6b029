"""A stage's sequences of S tokens by number: the documents packed in each, their labels and positions, their source."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from torchtitan_cp.config.data import ResolvedStageData
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.mixture import UNLIMITED, Mixture, samples_within
from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.data.batches.windows import OFFSET, PACKINGS, Window
from torchtitan_cp.data.corpus.store import TokenStore
from torchtitan_cp.data.errors import DataError

GOLDEN = 0.6180339887498949  # its multiples spread evenly over [0, 1): they choose the short sequences


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
        counted = learned & np.array([part.start == 0 for part in self.spans])[span]
        return np.where(counted, begins - before[span] - 1, -1)

    @property
    def _span_numbers(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.spans)), [span.stop - span.start for span in self.spans])


@dataclass(eq=False)
class PackedStream:
    """A stage's sequences from one source, by number. Each depends only on the arguments and its number.

    It caches the last two packed windows, because sequences are read mostly in order. Memory is 32 bytes for each span
    in these.

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
        self.window_sequences = 1 if self.data.packing == "concat" else self.data.packing_window
        self._window = lru_cache(maxsize=2)(self._make_window)

    def sequence(self, number: int) -> PackedSequence:
        """Sequence `number` of the stage from this source."""
        spans = self._spans(number)
        tokens, targets, labels = _read(self.stream.store, spans)
        if not self.data.document_mask:
            labels[:-1] = targets[1:]
        named = tuple(Span(self.source, *span) for span in spans)
        row = PackedSequence(tokens, labels, np.arange(self.seq_len), self.document_lengths(number), named)
        return replace(row, positions=row.document_positions) if self.data.restart_positions else row

    def document_lengths(self, number: int) -> tuple[int, ...]:
        """The same as `sequence(number).document_lengths`, without reading a token."""
        if not self.data.document_mask:
            return (self.seq_len,)
        return tuple(stop - start for _, start, stop in self._spans(number))

    def cursor_after(self, count: int) -> int:
        """Where in the stream the next stage begins, after the first `count` sequences of this one.

        A window that was begun counts as read. So where a stage ends before its last planned step, as a gate may have
        it, up to W - 1 of its sequences are left out.
        """
        sequences = -(-count // self.window_sequences) * self.window_sequences
        return self.first_token + self.seq_len * max(count, min(sequences, self.samples))

    def whole_fraction(self, window: int) -> float:
        """Of the documents that begin in a window, the fraction that is kept whole in one sequence."""
        document, start, stop, _ = self._window(window * self.window_sequences).spans.T
        begins = start == 0
        whole = begins & (stop == self.stream.store.document_lengths[document])
        return int(whole.sum()) / max(1, int(begins.sum()))

    def cuts(self) -> tuple[int, int, int]:
        """Numbers in the whole stage: of conversations, of those that are cut, and of cuts inside a learned turn."""
        store, counts = self.stream.store, np.zeros(3, dtype=np.int64)
        for begin in range(0, self.samples, self.window_sequences):
            document, start, stop, _ = self._window(begin).spans.T
            cut, first = stop < store.document_lengths[document], start == 0
            ends = zip(document[cut].tolist(), stop[cut].tolist(), strict=True)
            inside = [bool(np.all(store.read_mask(at, end - 1, end + 1))) for at, end in ends]
            counts += first.sum(), (first & cut).sum(), sum(inside)
        conversations, cut_ones, inside_turns = counts.tolist()
        return conversations, cut_ones, inside_turns

    def _spans(self, number: int) -> list[list[int]]:
        """(document, start, stop) of each span of a sequence, in order."""
        assert number < self.samples + self.replacements, "the stage has no such sequence"
        index = number % self.window_sequences if number < self.samples else 0
        window = self._window(number - index)
        return window.spans[window.first[index] : window.first[index + 1], :OFFSET].tolist()

    def _make_window(self, first: int) -> Window:
        """The packed window that begins with sequence `first`."""
        count = min(self.window_sequences, self.samples - first) if first < self.samples else 1
        rows = self.stream.spans(self.first_token + first * self.seq_len, count * self.seq_len)
        return PACKINGS[self.data.packing](rows, self.seq_len)


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


@dataclass(eq=False)
class StageSamples:
    """The sequences of a stage. Each depends only on the arguments and its number.

    Args:
        streams: text of each source, by name.
        seq_len: S.
        data: the stage's; its mixture is not empty.
        seed: the order of sources follows from it and from the stage.
        stage: index in the curriculum, from 0.
        step_sequences: sequences of one optimizer step.
        first_tokens: tokens of each source's stream that earlier stages took.
        steps: optimizer steps that the stage has at most.
        skipped_steps: steps of text that recovery skipped; the stage reads as many more. Where sources have ended, it
            reads the stage's first text again.

    Raises:
        DataError: the sources end before the stage does.
    """

    streams: Mapping[str, TokenStream]
    seq_len: int
    data: ResolvedStageData
    seed: int
    stage: int
    step_sequences: int
    first_tokens: Mapping[str, int]
    steps: int
    skipped_steps: int = 0

    def __post_init__(self) -> None:
        first = {name: self.first_tokens.get(name, 0) for name in self.streams}
        limits = {
            name: samples_within(epochs, self.streams[name].store.tokens, self.seq_len, first[name])
            for name, epochs in self.data.max_epochs.items()
            if self.data.mixture.get(name)
        }
        self.mixture = Mixture(self.data.mixture, self.seed, self.stage, limits)
        samples = self.steps * self.step_sequences
        if samples > self.mixture.samples:
            raise DataError(
                f"data.max_epochs allows stage {self.stage + 1} only {self.mixture.samples:,} sequences of "
                f"{self.seq_len:,} tokens, but the stage has {samples:,}",
                fix="raise it, remove it for one of the sources, or make the stage shorter",
            )
        planned = self._counts(self.steps)
        self.packed = {
            name: PackedStream(
                self.streams[name], self.seq_len, self.data, name, first[name], planned[name], count - planned[name]
            )
            for name, count in self._counts(self.steps + self.skipped_steps).items()
        }

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return StageSamples, tuple(getattr(self, argument.name) for argument in fields(self))

    def sequence(self, number: int) -> PackedSequence:
        """Sequence `number` of the stage."""
        source, index = self.mixture.sample(number % self.mixture.samples)
        return replace(self.packed[source].sequence(index), document_lengths=self.document_lengths(number))

    def document_lengths(self, number: int) -> tuple[int, ...]:
        """Of sequence `number`, without reading a token: also cut at every multiple of its visible length."""
        source, index = self.mixture.sample(number % self.mixture.samples)
        lengths, visible = self.packed[source].document_lengths(index), self._visible_tokens(number)
        if visible >= self.seq_len:
            return lengths
        edges = sorted({*itertools.accumulate(lengths, initial=0), *range(0, self.seq_len, visible)})
        return tuple(stop - start for start, stop in itertools.pairwise(edges))

    def tokens_after(self, steps: int) -> dict[str, int]:
        """Tokens of each source's stream that this and earlier stages took, after so many steps of the stage."""
        counts = self._counts(steps)
        return {**self.first_tokens, **{name: self.packed[name].cursor_after(count) for name, count in counts.items()}}

    def epochs_after(self, steps: int) -> dict[str, float]:
        """How often each of the stage's sources was read after so many steps of the stage."""
        after = self.tokens_after(steps)
        return {name: after[name] / self.streams[name].store.tokens for name in self.packed}

    def last_steps(self) -> dict[str, int]:
        """The step of the stage, from 1, that takes the last of a source within its max_epochs; 0: none is left."""
        return {name: -(-samples // self.step_sequences) for name, samples in self.mixture.ends.items()}

    def _counts(self, steps: int) -> dict[str, int]:
        """Sequences of each source in so many steps of the stage."""
        return self.mixture.counts(min(steps * self.step_sequences, self.mixture.samples))

    def _visible_tokens(self, number: int) -> int:
        """Tokens that attend to each other in this sequence. Source of the growth: SkyLadder (Zhu et al., 2025)."""
        data, visible = self.data, self.seq_len
        step = number // self.step_sequences
        if data.growth_from and step < data.growth_steps:
            visible = data.growth_from + (self.seq_len - data.growth_from) * step // data.growth_steps
        if (number * GOLDEN) % 1 < data.short_share:
            visible = min(visible, data.short_seq_len)
        return visible


def held_out_samples(
    streams: Mapping[str, TokenStream], seq_len: int, data: ResolvedStageData, count: int, block: int = 0
) -> StageSamples | None:
    """Held-out sequences of a stage's sources, in the order of the stores; None if these sources hold nothing out.

    If a source has masks, they are packed as in training, so that few conversations lose their beginning.

    Args:
        data: the stage's; its mixture is not empty.
        count: how many sequences.
        block: tokens that attend to each other, counted from each sequence's start; 0: all.
    """
    mixture = {name: data.mixture[name] for name in streams if data.mixture.get(name)}
    if not mixture:
        return None
    packing = data.packing if any(streams[name].store.has_masks for name in mixture) else "concat"
    held_out = replace(data, mixture=mixture, packing=packing, packing_window=count, max_epochs={}, growth_from=0)
    held_out = replace(held_out, short_share=float(block > 0), short_seq_len=block)
    return StageSamples(streams, seq_len, held_out, 0, 0, count, {}, steps=1)
