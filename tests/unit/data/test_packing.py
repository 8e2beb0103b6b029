"""Packed sequences by number: every token once, the label of each, and what a window reports."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.memory import MemoryStore
from torchtitan_cp.data import DataError, TokenStream
from torchtitan_cp.data.batches.packing import IGNORED, PackedSequence, PackedStream, Packing
from torchtitan_cp.data.batches.stream import SeparatedStore
from torchtitan_cp.optim import IGNORED as IGNORED_BY_THE_LOSS

LENGTHS = [5, 1, 17, 0, 30, 2, 9, 40, 3, 3, 11]
GROUPS = [0, 1, 0, 0, 1, 2, 2, 1, 0, 2, 2]
BEST_FIT = Packing("best_fit", window_sequences=4, document_mask=True, restart_positions=True)
CONCAT = replace(BEST_FIT, method="concat")


def stream_of(lengths: list[int] = LENGTHS, order: str = "shuffled") -> TokenStream:
    return TokenStream(MemoryStore(lengths, GROUPS[: len(lengths)]), 40, seed=4, order=order)


@st.composite
def packed_streams(draw: st.DrawFn) -> Any:
    """A function that makes the same packed stream each time, anywhere in any stream."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=len(GROUPS)).filter(any))
    order = draw(st.sampled_from(["shuffled", "related"]))
    packing = Packing(
        draw(st.sampled_from(["concat", "best_fit"])), draw(st.integers(1, 9)), draw(st.booleans()), draw(st.booleans())
    )
    seq_len, first_token = draw(st.integers(1, 50)), draw(st.integers(0, 200))
    return lambda samples=None: PackedStream(
        stream_of(lengths, order), seq_len, packing, source="books", first_token=first_token, samples=samples
    )


def text_of(stream: PackedStream, sequences: list[PackedSequence]) -> list[int]:
    """The tokens that the sample ids name."""
    read = stream.stream.store.read
    return [int(token) for sequence in sequences for piece in sequence.pieces for token in read(*piece[1:])]


@settings(deadline=None)
@given(make=packed_streams(), windows=st.integers(1, 4))
def test_whole_windows_hold_the_streams_tokens_each_once(make: Any, windows: int) -> None:
    packed = make()
    count = windows * packed.window_sequences
    sequences = [packed.sequence(number) for number in range(count)]
    tokens = np.concatenate([sequence.tokens for sequence in sequences])
    assert packed.cursor_after(count) == packed.first_token + len(tokens)
    assert tokens.tolist() == text_of(packed, sequences)
    assert sorted(tokens) == sorted(packed.stream.read(packed.first_token, len(tokens)))


@settings(deadline=None)
@given(make=packed_streams(), samples=st.integers(1, 30))
def test_a_stage_of_known_length_leaves_nothing_unread(make: Any, samples: int) -> None:
    packed = make(samples)
    tokens = [token for number in range(samples) for token in packed.sequence(number).tokens.tolist()]
    assert sorted(tokens) == sorted(packed.stream.read(packed.first_token, samples * packed.seq_len))
    assert packed.cursor_after(samples) == packed.first_token + samples * packed.seq_len


@pytest.mark.parametrize("order", ["shuffled", "related"])
@pytest.mark.parametrize("packing", [CONCAT, BEST_FIT])
@pytest.mark.parametrize("seq_len", [1, 11])
def test_every_token_of_an_epoch_is_read_once(packing: Packing, order: str, seq_len: int) -> None:
    samples = sum(LENGTHS) // seq_len
    packed = PackedStream(stream_of(order=order), seq_len, packing, samples=samples)
    assert samples * seq_len == sum(LENGTHS)
    tokens = np.concatenate([packed.sequence(number).tokens for number in range(samples)])
    assert sorted(tokens) == list(range(sum(LENGTHS)))
    assert packed.epochs(samples) == 1


@settings(deadline=None)
@given(make=packed_streams(), numbers=st.permutations(range(8)))
def test_entered_anywhere_a_sequence_is_what_it_is_from_the_start(make: Any, numbers: list[int]) -> None:
    from_start = make()
    sequences = [from_start.sequence(number) for number in range(8)]
    jumping = make()
    for number in numbers:
        for packed in (make(), jumping):
            there = packed.sequence(number)
            assert there.pieces == sequences[number].pieces
            for name in ("tokens", "labels", "positions"):
                np.testing.assert_array_equal(getattr(there, name), getattr(sequences[number], name))


@settings(deadline=None)
@given(make=packed_streams(), number=st.integers(0, 12))
def test_labels_positions_and_lengths_follow_from_the_pieces(make: Any, number: int) -> None:
    packed = make()
    sequence = packed.sequence(number)
    ends = packed.stream.store.begins[1:]
    places = [(piece, place) for piece in sequence.pieces for place in range(piece.start, piece.stop)]
    next_of_document = [
        token + 1 if token + 1 < ends[piece.document] else IGNORED
        for (piece, _), token in zip(places, sequence.tokens, strict=True)
    ]
    if packed.packing.document_mask:
        assert sequence.labels.tolist() == next_of_document
        assert sequence.document_lengths == tuple(piece.stop - piece.start for piece in sequence.pieces)
    else:
        assert sequence.labels.tolist() == [*sequence.tokens[1:], next_of_document[-1]]
        assert sequence.document_lengths == (packed.seq_len,)
    restarted = [place - piece.start for piece, place in places]
    positions = restarted if packed.packing.restart_positions else list(range(packed.seq_len))
    assert sequence.positions.tolist() == positions
    assert {array.dtype for array in (sequence.tokens, sequence.labels, sequence.positions)} == {np.dtype(np.int64)}
    assert {piece.source for piece in sequence.pieces} == {"books"}


def test_without_a_mask_concat_gives_the_streams_own_sequences() -> None:
    """But for the last label: after a sequence that ends with a block, the document's next token."""
    packed = PackedStream(stream_of(), 8, replace(CONCAT, document_mask=False, restart_positions=False), first_token=3)
    for number in range(40):
        tokens, labels = packed.stream.sequence(3 + number * 8, 8)
        np.testing.assert_array_equal(packed.sequence(number).tokens, tokens)
        np.testing.assert_array_equal(packed.sequence(number).labels[:-1], labels[:-1])


def test_a_separator_is_a_token_of_the_document_before_it() -> None:
    store = SeparatedStore(MemoryStore([3, 2, 5]), separator=77)
    packed = PackedStream(TokenStream(store, 64, seed=0, shuffle=False), 13, CONCAT)
    sequence = packed.sequence(0)
    assert sequence.tokens.tolist() == [0, 1, 2, 77, 3, 4, 77, 5, 6, 7, 8, 9, 77]
    assert sequence.labels.tolist() == [1, 2, 77, IGNORED, 4, 77, IGNORED, 6, 7, 8, 9, 77, IGNORED]
    assert sequence.document_lengths == (4, 3, 6)


def test_lengths_are_told_without_reading_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedStream(stream_of(), 16, BEST_FIT)
    expected = [packed.sequence(number).document_lengths for number in range(9)]
    monkeypatch.setattr(MemoryStore, "read", None)
    assert [packed.document_lengths(number) for number in range(9)] == expected


def test_a_window_once_begun_counts_as_read() -> None:
    best_fit, concat = (PackedStream(stream_of(), 16, packing, first_token=5) for packing in (BEST_FIT, CONCAT))
    assert [best_fit.cursor_after(count) for count in (0, 1, 4, 5)] == [5, 69, 69, 133]
    assert [concat.cursor_after(count) for count in (0, 1, 4, 5)] == [5, 21, 69, 85]
    assert concat.epochs(1) == 21 / sum(LENGTHS)


@settings(deadline=None)
@given(make=packed_streams(), index=st.integers(0, 4))
def test_a_report_counts_what_the_sequences_hold(make: Any, index: int) -> None:
    packed = make()
    report = packed.report(index)
    first = index * packed.window_sequences
    pieces = [piece for at in range(packed.window_sequences) for piece in packed.sequence(first + at).pieces]
    lengths = packed.stream.store.document_lengths
    rows = packed.stream.pieces(
        packed.first_token + first * packed.seq_len, packed.window_sequences * packed.seq_len
    ).tolist()
    assert report.documents == len(rows)
    assert report.whole == sum(piece.start == 0 and piece.stop == lengths[piece.document] for piece in pieces)
    assert report.whole_fraction == report.whole / len(rows)
    held = [
        sum(piece.document == document and start <= piece.start < stop for piece in pieces)
        for document, start, stop in rows
    ]
    if len({row[0] for row in rows}) == len(rows):
        assert report.cut == sum(count > 1 for count in held)
    assert report.newly_cut <= report.cut <= report.cut_by_concat


def test_a_report_of_known_text() -> None:
    stream = TokenStream(MemoryStore([6, 6, 4, 4, 25, 5]), 64, seed=0, shuffle=False)
    packed = PackedStream(stream, 10, replace(BEST_FIT, window_sequences=5))
    report = packed.report(0)
    assert (report.documents, report.whole, report.cut, report.cut_by_concat, report.newly_cut) == (6, 5, 1, 2, 0)
    assert report.whole_fraction == 5 / 6
    plain = PackedStream(stream, 10, CONCAT).report(0)
    assert (plain.documents, plain.whole, plain.cut, plain.cut_by_concat, plain.newly_cut) == (2, 1, 0, 0, 0)


def test_an_unknown_packing_or_an_empty_window_is_refused() -> None:
    with pytest.raises(DataError, match=r"'first_fit' is not known\n  fix: use concat or best_fit"):
        PackedStream(stream_of(), 16, replace(BEST_FIT, method="first_fit"))
    with pytest.raises(DataError, match=r"window of 0 sequences holds none\n  fix: use 1 or more"):
        PackedStream(stream_of(), 16, replace(BEST_FIT, window_sequences=0))


def test_the_ignored_label_is_the_one_the_loss_ignores() -> None:
    assert IGNORED == IGNORED_BY_THE_LOSS
