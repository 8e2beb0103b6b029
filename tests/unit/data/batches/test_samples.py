"""Sequences of a stage by number: every token once, in an order that no rank is in, and the label of each."""

import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.support.memory import MemoryStore
from torchtitan_cp.config.data import ResolvedStageData
from torchtitan_cp.data.batches.samples import StageSamples, held_out_samples
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
