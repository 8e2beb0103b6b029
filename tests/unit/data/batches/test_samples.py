"""Sequences of a stage by number: every token once, in an order that no rank is in, and the label of each."""

import pickle
from collections import Counter
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
from torchtitan_cp.data.batches.samples import PackedSequence, PackedStream, StageSamples, held_out_samples
from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.data.errors import DataError

S = 64
EVEN = ResolvedStageData({"a": 3.0, "b": 1.0}, "concat", 4, document_mask=True, restart_positions=True)
BEST = replace(EVEN, packing="best_fit")


def streams() -> dict[str, TokenStream]:
    random = np.random.default_rng(2)
    return {
        name: TokenStream(MemoryStore(random.integers(1, 150, size=40)), 4 * S, seed=1)
        for name, size in (("a", 40), ("b", 20))
    }


def stage(
    data: ResolvedStageData, steps: int = 8, seq_len: int = S, first: dict[str, int] | None = None
) -> StageSamples:
    return StageSamples(streams(), seq_len, data, 0, 0, 4, first or {}, steps)


@pytest.mark.parametrize("data", [EVEN, BEST])
def test_stages_read_each_sources_stream_on_where_the_one_before_stopped(data: ResolvedStageData) -> None:
    read, first = Counter[tuple[str, int, int]](), dict[str, int]()
    for seq_len, steps in ((S, 5), (2 * S, 3), (4 * S, 2)):
        samples = stage(data, steps, seq_len, first)
        for number in range(4 * steps):
            for span in samples.sequence(number).spans:
                read.update((span.source, span.document, place) for place in range(span.start, span.stop))
        first = samples.tokens_after(steps)
    for name, stream in streams().items():
        spans = stream.spans(0, first[name]).tolist()
        want = Counter((name, document, place) for document, start, stop in spans for place in range(start, stop))
        assert Counter({key: count for key, count in read.items() if key[0] == name}) == want
    assert sum(read.values()) == sum(first.values())


def test_the_same_sequences_come_after_pickling_as_a_worker_gets_them() -> None:
    samples = stage(BEST)
    copy = pickle.loads(pickle.dumps(samples))
    for number in (0, 7, 31):
        ours, theirs = samples.sequence(number), copy.sequence(number)
        assert ours.spans == theirs.spans
        assert np.array_equal(ours.tokens, theirs.tokens)


def test_a_share_of_the_sequences_is_cut_into_short_ones() -> None:
    data = replace(EVEN, document_mask=False, short_share=0.25, short_seq_len=16)
    samples = stage(data, steps=100)
    lengths = [samples.document_lengths(number) for number in range(400)]
    assert set(lengths) == {(S,), (16,) * 4}
    assert lengths.count((16,) * 4) == pytest.approx(100, abs=2)
    assert samples.sequence(lengths.index((16,) * 4)).document_lengths == (16,) * 4


def test_attention_grows_step_by_step_to_the_whole_sequence() -> None:
    data = replace(EVEN, document_mask=False, growth_from=16, growth_steps=4)
    samples = stage(data)
    assert [samples.document_lengths(4 * step)[0] for step in range(6)] == [16, 28, 40, 52, 64, 64]
    assert samples.document_lengths(4) == samples.document_lengths(7) == (28, 28, 8)


def test_documents_are_cut_at_the_blocks_and_nowhere_else() -> None:
    samples = stage(replace(EVEN, growth_from=20, growth_steps=100))
    masked = stage(EVEN)
    for number in range(4):
        ends = set(np.cumsum(masked.document_lengths(number)).tolist()) | {20, 40, 60}
        assert set(np.cumsum(samples.document_lengths(number)).tolist()) == ends


def test_a_source_ends_with_its_epochs_and_a_stage_that_is_too_long_is_refused() -> None:
    limited = replace(EVEN, max_epochs={"a": 0.25})
    samples = stage(limited, steps=8)
    tokens = streams()["a"].store.tokens
    assert samples.tokens_after(8)["a"] <= 0.25 * tokens
    assert samples.epochs_after(8)["a"] == pytest.approx(0.25, abs=S / tokens)
    [(name, last)] = samples.last_steps().items()
    assert name == "a"
    assert samples.tokens_after(last - 1)["a"] < samples.tokens_after(last)["a"] == samples.tokens_after(8)["a"]
    with pytest.raises(
        DataError, match=r"data.max_epochs allows stage 1 only .* sequences of 64 tokens, but the stage has 4,000"
    ):
        stage(replace(EVEN, max_epochs={"a": 1.0, "b": 1.0}), steps=1000)


def test_a_skipped_step_changes_no_sequence_and_the_stage_reads_its_text_once() -> None:
    data = replace(BEST, packing_window=256)  # which the stage does not fill
    plain, skipping = (StageSamples(streams(), S, data, 0, 0, 4, {}, 8, skipped) for skipped in (0, 2))
    assert [skipping.sequence(n).spans for n in range(32)] == [plain.sequence(n).spans for n in range(32)]
    read = Counter(
        (span.source, span.document, place)
        for number in range(40)
        for span in skipping.sequence(number).spans
        for place in range(span.start, span.stop)
    )
    after = skipping.tokens_after(10)
    for name, stream in streams().items():
        spans = stream.spans(0, after[name]).tolist()
        want = Counter((name, document, place) for document, start, stop in spans for place in range(start, stop))
        assert Counter({key: count for key, count in read.items() if key[0] == name}) == want
    assert sum(read.values()) == sum(after.values()) == 40 * S


def test_in_place_of_steps_that_were_passed_over_at_the_end_the_first_come_again() -> None:
    limited = replace(EVEN, max_epochs={"a": 1.0, "b": 1.0})
    whole = stage(limited, steps=8).mixture.samples // 4
    exact, passing = (StageSamples(streams(), S, limited, 0, 0, 4, {}, whole, passed) for passed in (0, 2))
    first, last = 4 * whole, exact.mixture.samples
    for number in range(4 * (whole + 2)):
        assert passing.sequence(number).spans == exact.sequence(number % last).spans
        assert passing.document_lengths(number) == exact.document_lengths(number % last)
    assert last < first + 8, "text came again"
    assert passing.tokens_after(whole + 2)["a"] <= streams()["a"].store.tokens
    assert passing.epochs_after(whole)["a"] == exact.epochs_after(whole)["a"]


def test_held_out_text_comes_from_the_stages_sources_that_have_some() -> None:
    held = streams()
    assert held_out_samples({}, S, replace(BEST, mixture={"a": 1.0}), 2) is None
    assert held_out_samples(held, S, replace(BEST, mixture={"c": 1.0}), 2) is None
    samples = held_out_samples(held, S, replace(BEST, mixture={"a": 1.0, "c": 5.0}), 9)
    assert samples is not None
    assert {span.source for number in range(9) for span in samples.sequence(number).spans} == {"a"}
    held["masked"] = TokenStream(MemoryStore([9, 9], masks=[[True] * 9] * 2), 4 * S, seed=1)
    beside = held_out_samples(held, S, replace(BEST, mixture={"a": 1.0, "masked": 1.0}), 9)
    assert beside is not None
    assert [found.packed["a"].data.packing for found in (samples, beside)] == ["concat", "best_fit"]


LENGTHS = [5, 1, 17, 0, 30, 2, 9, 40, 3, 3, 11]
GROUPS = [0, 1, 0, 0, 1, 2, 2, 1, 0, 2, 2]
BEST_FIT = ResolvedStageData({}, "best_fit", packing_window=4, document_mask=True, restart_positions=True)
CONCAT = replace(BEST_FIT, packing="concat")


def stream_of(lengths: list[int] = LENGTHS, order: str = "shuffled") -> TokenStream:
    return TokenStream(MemoryStore(lengths, GROUPS[: len(lengths)]), 40, seed=4, order=order)


@st.composite
def packed_streams(draw: st.DrawFn) -> Any:
    """A function that makes the same packed stream each time, anywhere in any stream."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=len(GROUPS)).filter(any))
    order = draw(st.sampled_from(["shuffled", "related"]))
    packing, window = draw(st.sampled_from(["concat", "best_fit"])), draw(st.integers(1, 9))
    data = ResolvedStageData({}, packing, window, draw(st.booleans()), draw(st.booleans()))
    seq_len, first_token = draw(st.integers(1, 50)), draw(st.integers(0, 200))
    return lambda samples=UNLIMITED: PackedStream(
        stream_of(lengths, order), seq_len, data, source="books", first_token=first_token, samples=samples
    )


def text_of(stream: PackedStream, sequences: list[PackedSequence]) -> list[int]:
    """The tokens that the sample ids name."""
    read = stream.stream.store.read
    return [int(token) for sequence in sequences for span in sequence.spans for token in read(*span[1:])]


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
    next_of_document = [
        token + 1 if token + 1 < ends[span.document] else IGNORED
        for (span, _), token in zip(places, sequence.tokens, strict=True)
    ]
    if packed.data.document_mask:
        assert sequence.labels.tolist() == next_of_document
        assert sequence.document_lengths == tuple(span.stop - span.start for span in sequence.spans)
    else:
        assert sequence.labels.tolist() == [*sequence.tokens[1:], next_of_document[-1]]
        assert sequence.document_lengths == (packed.seq_len,)
    restarted = [place - span.start for span, place in places]
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
