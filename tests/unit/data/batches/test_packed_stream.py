"""The sequences of one source by number: every token once, the same wherever one enters, and what each label is."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.memory import MemoryStore
from torchtitan_cp.config.data import ResolvedStageData
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.mixture import UNLIMITED
from torchtitan_cp.data.batches.packed_stream import PackedSequence, PackedStream
from torchtitan_cp.data.batches.stream import TokenStream

LENGTHS = [5, 1, 17, 0, 30, 2, 9, 40, 3, 3, 11]
GROUPS = [0, 1, 0, 0, 1, 2, 2, 1, 0, 2, 2]
BEST_FIT = ResolvedStageData({}, "best_fit", packing_window=4, document_mask=True, restart_positions=True)
CONCAT = replace(BEST_FIT, packing="concat")


def stream_of(lengths: list[int] = LENGTHS, order: str = "shuffled", masks: Any = None) -> TokenStream:
    return TokenStream(MemoryStore(lengths, GROUPS[: len(lengths)], masks), 40, seed=4, order=order)


@st.composite
def packed_streams(draw: st.DrawFn, *, keep_whole: bool = False) -> Any:
    """A function that makes the same packed stream each time, anywhere in any stream, maybe of conversations."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=len(GROUPS)).filter(any))
    masks = [[True] * length for length in lengths] if keep_whole or draw(st.booleans()) else None
    order = draw(st.sampled_from(["shuffled", "related"]))
    packing = draw(st.sampled_from(["best_fit"] if keep_whole else ["concat", "best_fit"]))
    window = draw(st.integers(1, 9))
    data = ResolvedStageData({}, packing, window, draw(st.booleans()), draw(st.booleans()))
    seq_len, first_token = draw(st.integers(1, 50)), draw(st.integers(0, 200))
    return lambda samples=UNLIMITED: PackedStream(
        stream_of(lengths, order, masks), seq_len, data, source="books", first_token=first_token, samples=samples
    )


def text_of(stream: PackedStream, sequences: list[PackedSequence]) -> list[int]:
    """The tokens that the sample ids name."""
    read = stream.stream.store.read
    return [int(token) for sequence in sequences for span in sequence.spans for token in read(*span[1:])]


def unpadded(sequence: PackedSequence) -> np.ndarray:
    """The tokens of a sequence without its padding."""
    return sequence.tokens[: sum(span.stop - span.start for span in sequence.spans)]


@settings(deadline=None)
@given(make=packed_streams(), windows=st.integers(1, 4))
def test_whole_windows_hold_the_streams_tokens_each_once(make: Any, windows: int) -> None:
    packed = make()
    count = windows * packed.window_sequences
    sequences = [packed.sequence(number) for number in range(count)]
    tokens = np.concatenate([unpadded(sequence) for sequence in sequences])
    assert packed.cursor_after(count) == packed.first_token + len(tokens)
    assert packed.keeps_whole or len(tokens) == count * packed.seq_len
    assert tokens.tolist() == text_of(packed, sequences)
    assert sorted(tokens) == sorted(packed.stream.read(packed.first_token, len(tokens)))


@settings(deadline=None)
@given(make=packed_streams(), samples=st.integers(1, 30))
def test_a_stage_of_known_length_leaves_nothing_unread(make: Any, samples: int) -> None:
    packed = make(samples)
    tokens = [token for number in range(samples) for token in unpadded(packed.sequence(number)).tolist()]
    end = packed.cursor_after(samples)
    assert sorted(tokens) == sorted(packed.stream.read(packed.first_token, end - packed.first_token))
    assert packed.keeps_whole or end == packed.first_token + samples * packed.seq_len


@settings(deadline=None)
@given(make=packed_streams(keep_whole=True), samples=st.integers(1, 30))
def test_a_conversation_that_fits_a_sequence_is_never_cut(make: Any, samples: int) -> None:
    packed = make(samples)
    lengths = packed.stream.store.document_lengths
    spans = [span for number in range(samples) for span in packed.sequence(number).spans]
    # A stage before may have ended in the middle of one.
    _, begun, _ = packed.stream.spans(packed.first_token, 1)[0].tolist()
    cut = [span for span in spans if lengths[span.document] <= packed.seq_len and span.start > 0]
    assert len(cut) <= (begun > 0)
    assert all(span.stop == lengths[span.document] for span in spans if lengths[span.document] <= packed.seq_len)


@settings(deadline=None)
@given(make=packed_streams(), epochs=st.floats(0, 6), most=st.integers(0, 60))
def test_samples_within_epochs_end_before_the_source_was_read_that_often(make: Any, epochs: float, most: int) -> None:
    packed = make()
    left = packed.samples_within(epochs, most)
    limit = int(epochs * packed.stream.store.tokens)
    windows = left // packed.window_sequences * packed.window_sequences
    assert packed.cursor_after(windows) <= max(limit, packed.first_token)
    assert left >= max(0, limit - packed.first_token) // packed.seq_len
    if packed.keeps_whole and left < most:
        assert packed.cursor_after(windows + packed.window_sequences) > limit


@pytest.mark.parametrize("order", ["shuffled", "related"])
@pytest.mark.parametrize("packing", [CONCAT, BEST_FIT])
@pytest.mark.parametrize("seq_len", [1, 11])
def test_every_token_of_an_epoch_is_read_once(packing: ResolvedStageData, order: str, seq_len: int) -> None:
    samples = sum(LENGTHS) // seq_len
    packed = PackedStream(stream_of(order=order), seq_len, packing, samples=samples)
    assert samples * seq_len == sum(LENGTHS)
    tokens = np.concatenate([packed.sequence(number).tokens for number in range(samples)])
    assert sorted(tokens) == list(range(sum(LENGTHS)))
    assert packed.cursor_after(samples) == packed.stream.store.tokens


@settings(deadline=None)
@given(make=packed_streams(), numbers=st.permutations(range(8)))
def test_entered_anywhere_a_sequence_is_what_it_is_from_the_start(make: Any, numbers: list[int]) -> None:
    from_start = make()
    sequences = [from_start.sequence(number) for number in range(8)]
    jumping = make()
    for number in numbers:
        for packed in (make(), jumping):
            there = packed.sequence(number)
            assert there.spans == sequences[number].spans
            for name in ("tokens", "labels", "positions"):
                np.testing.assert_array_equal(getattr(there, name), getattr(sequences[number], name))


@settings(deadline=None)
@given(make=packed_streams(), number=st.integers(0, 12))
def test_labels_positions_and_lengths_follow_from_the_spans(make: Any, number: int) -> None:
    packed = make()
    sequence = packed.sequence(number)
    ends = packed.stream.store.begins[1:]
    places = [(span, place) for span in sequence.spans for place in range(span.start, span.stop)]
    padding = packed.seq_len - len(places)
    assert packed.keeps_whole or not padding
    text = unpadded(sequence)
    assert sequence.tokens[len(places) :].tolist() == np.resize(text, packed.seq_len)[len(places) :].tolist()
    next_of_document = [
        token + 1 if token + 1 < ends[span.document] else IGNORED for (span, _), token in zip(places, text, strict=True)
    ]
    if packed.data.document_mask:
        assert sequence.labels.tolist() == next_of_document + [IGNORED] * padding
        lengths = [span.stop - span.start for span in sequence.spans]
        assert sequence.document_lengths == (*lengths, *[padding] * (padding > 0))
    else:
        last = [IGNORED] * (padding + 1) if padding else next_of_document[-1:]
        assert sequence.labels.tolist() == [*text[1:], *last]
        assert sequence.document_lengths == (packed.seq_len,)
    restarted = [place - span.start for span, place in places] + list(range(padding))
    positions = restarted if packed.data.restart_positions else list(range(packed.seq_len))
    assert sequence.positions.tolist() == positions
    assert {array.dtype for array in (sequence.tokens, sequence.labels, sequence.positions)} == {np.dtype(np.int64)}
    assert {span.source for span in sequence.spans} == {"books"}


def test_without_a_mask_concat_gives_the_streams_own_sequences() -> None:
    """But for the last label: after a sequence that ends with a block, the document's next token."""
    packed = PackedStream(stream_of(), 8, replace(CONCAT, document_mask=False, restart_positions=False), first_token=3)
    for number in range(40):
        tokens = packed.stream.read(3 + number * 8, 8)
        np.testing.assert_array_equal(packed.sequence(number).tokens, tokens)
        np.testing.assert_array_equal(packed.sequence(number).labels[:-1], tokens[1:])


def test_lengths_are_known_without_reading_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedStream(stream_of(), 16, BEST_FIT)
    expected = [packed.sequence(number).document_lengths for number in range(9)]
    monkeypatch.setattr(MemoryStore, "read", None)
    assert [packed.document_lengths(number) for number in range(9)] == expected


def test_a_window_once_begun_counts_as_read() -> None:
    best_fit, concat = (PackedStream(stream_of(), 16, packing, first_token=5) for packing in (BEST_FIT, CONCAT))
    assert [best_fit.cursor_after(count) for count in (0, 1, 4, 5)] == [5, 69, 69, 133]
    assert [concat.cursor_after(count) for count in (0, 1, 4, 5)] == [5, 21, 69, 85]


@settings(deadline=None)
@given(make=packed_streams(), index=st.integers(0, 4))
def test_the_whole_fraction_counts_documents_that_lie_in_one_sequence(make: Any, index: int) -> None:
    packed = make()
    first = index * packed.window_sequences
    spans = [span for at in range(packed.window_sequences) for span in packed.sequence(first + at).spans]
    lengths = packed.stream.store.document_lengths
    begins = sum(span.start == 0 for span in spans)
    whole = sum(span.start == 0 and span.stop == lengths[span.document] for span in spans)
    assert packed.whole_fraction(index) == whole / max(1, begins)


def test_the_whole_fraction_of_known_text() -> None:
    stream = TokenStream(MemoryStore([6, 6, 4, 4, 25, 5]), 64, seed=0, shuffle=False)
    assert PackedStream(stream, 10, replace(BEST_FIT, packing_window=5)).whole_fraction(0) == 5 / 6
    assert PackedStream(stream, 10, CONCAT).whole_fraction(0) == 1 / 2
