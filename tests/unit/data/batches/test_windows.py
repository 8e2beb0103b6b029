"""Text packed into sequences: every token once, every sequence full, few documents cut."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.memory import rows_of
from torchtitan_cp.config.names import PACKINGS as CONFIG_PACKINGS
from torchtitan_cp.data.batches.windows import (
    PACKINGS,
    Window,
    _best_fit_decreasing,
    best_fit,
    concat,
    cut_rows,
    keep_whole,
)

lengths_and_sequence = st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 40)).map(
    lambda drawn: ([*drawn[0], -sum(drawn[0]) % drawn[1]], drawn[1])
)


def lengths_of(window: Window) -> list[list[int]]:
    """The lengths of the spans of each sequence."""
    lengths = (window.spans[:, 2] - window.spans[:, 1]).tolist()
    return [lengths[start:stop] for start, stop in zip(window.first, window.first[1:], strict=False)]


@pytest.mark.parametrize("method", PACKINGS)
@settings(deadline=None)
@given(drawn=lengths_and_sequence)
def test_every_token_lies_in_one_sequence_and_every_sequence_is_full(method: str, drawn: Any) -> None:
    lengths, seq_len = drawn
    window = PACKINGS[method](rows_of(lengths), seq_len)
    assert [sum(sequence) for sequence in lengths_of(window)] == [seq_len] * (sum(lengths) // seq_len)
    begins = np.cumsum([0, *lengths])
    places = [begins[document] + np.arange(start, stop) for document, start, stop, _ in window.spans]
    assert sorted(np.concatenate(places)) == list(range(sum(lengths)))
    np.testing.assert_array_equal(window.spans[:, 3], [text[0] for text in places])
    inside = np.split(window.spans[:, 3], window.first[1:-1])
    assert all((np.diff(sequence) > 0).all() for sequence in inside), "text keeps the stream's order in a sequence"
    longest = [sequence[np.argmax(sizes)] for sequence, sizes in zip(inside, lengths_of(window), strict=True)]
    assert longest == sorted(longest), "and sequences that of their longest parts"


@settings(deadline=None)
@given(drawn=lengths_and_sequence)
def test_best_fit_never_cuts_more_documents_than_concat(drawn: Any) -> None:
    lengths, seq_len = drawn
    rows = rows_of(lengths)
    packed, plain = best_fit(rows, seq_len), concat(rows, seq_len)
    assert cut_rows(rows, packed).sum() <= cut_rows(rows, plain).sum()
    assert cut_rows(rows, packed)[rows[:, 2] > seq_len].all()
    edges = set(range(seq_len, sum(lengths), seq_len))
    ends = np.cumsum(rows[:, 2])
    assert cut_rows(rows, plain).tolist() == [
        any(begin < edge < end for edge in edges) for begin, end in zip(ends - rows[:, 2], ends, strict=True)
    ]


@settings(deadline=None)
@given(drawn=lengths_and_sequence)
def test_placing_runs_of_one_length_is_best_fit_decreasing_by_the_book(drawn: Any) -> None:
    seq_len = drawn[1]
    lengths = np.array([length for length in drawn[0] if 0 < length <= seq_len], dtype=np.int64)
    sequences = int(lengths.sum()) // seq_len
    rooms, expected = [seq_len] * sequences, [-1] * len(lengths)
    for part in np.argsort(-lengths, kind="stable"):
        fitting = [(room, sequence) for sequence, room in enumerate(rooms) if room >= lengths[part]]
        if fitting:
            expected[part] = min(fitting)[1]
            rooms[expected[part]] -= lengths[part]
    sequence_of, left = _best_fit_decreasing(lengths, seq_len, sequences)
    assert sequence_of.tolist() == expected
    assert left == sorted((room, sequence) for sequence, room in enumerate(rooms) if room)


def test_what_fits_nowhere_fills_the_room_that_is_left() -> None:
    window = best_fit(rows_of([6, 6, 6, 6, 6]), 10)
    expected = [[0, 0, 6], [4, 2, 6], [1, 0, 6], [3, 4, 6], [4, 0, 2], [2, 0, 6], [3, 0, 4]]
    assert window.spans[:, :3].tolist() == expected
    assert window.first.tolist() == [0, 2, 5, 7]


def test_text_longer_than_a_sequence_keeps_its_whole_parts_in_order() -> None:
    window = best_fit(rows_of([3, 25, 2]), 10)
    assert window.spans[:, :3].tolist() == [[1, 0, 10], [1, 10, 20], [0, 0, 3], [1, 20, 25], [2, 0, 2]]
    assert window.first.tolist() == [0, 1, 2, 5]


def test_where_concat_cuts_fewer_documents_it_is_taken() -> None:
    rows = rows_of([5, 3, 2, 4, 4, 2])
    assert best_fit(rows, 10).spans.tolist() == concat(rows, 10).spans.tolist()
    assert lengths_of(best_fit(rows, 10)) == [[5, 3, 2], [4, 4, 2]]


def log_normal_rows(documents: int, seq_len: int) -> np.ndarray:
    lengths = np.maximum(np.random.default_rng(0).lognormal(6, 1.2, documents).astype(np.int64), 1)
    return rows_of([*lengths.tolist(), int(-lengths.sum() % seq_len)])


def test_log_normal_documents_waste_nothing_and_hardly_one_is_cut_that_fits() -> None:
    rows = log_normal_rows(100_000, 8192)
    window = best_fit(rows, 8192)
    assert {sum(sequence) for sequence in lengths_of(window)} == {8192}
    cut, plainly_cut = cut_rows(rows, window), cut_rows(rows, concat(rows, 8192))
    assert plainly_cut.sum() > 9000
    assert (cut & (rows[:, 2] <= 8192)).sum() < 100


def test_long_documents_do_not_come_first() -> None:
    """Packed longest first, but read in the stream's order: size and number are uncorrelated (3 sigma)."""
    longest = np.array([max(sequence) for sequence in lengths_of(best_fit(log_normal_rows(20_000, 8192), 8192))])
    correlation = np.corrcoef(np.argsort(np.argsort(longest)), np.arange(len(longest)))[0, 1]
    assert abs(correlation) < 3 / len(longest) ** 0.5


@settings(deadline=None, max_examples=300)
@given(drawn=lengths_and_sequence, missing=st.integers(0, 30))
def test_keeping_whole_cuts_no_document_that_fits_and_takes_the_front_of_the_rows(drawn: Any, missing: int) -> None:
    lengths, seq_len = drawn
    rows = rows_of(lengths)
    documents = np.array(lengths)
    documents[rows[-1, 0]] += missing  # the rest of the last document lies behind the rows
    window = keep_whole(rows, seq_len, documents)
    filled = [sum(sequence) for sequence in lengths_of(window)]
    assert len(filled) == sum(lengths) // seq_len
    assert all(0 < tokens <= seq_len for tokens in filled)
    ordered = window.spans[np.argsort(window.spans[:, 3])]
    places = np.concatenate([np.arange(begin, begin + stop - start) for _, start, stop, begin in ordered])
    assert places.tolist() == list(range(window.tokens)), "the front of the rows, each token once"
    for document, start, stop, _ in window.spans.tolist():
        whole = (start, stop) == (0, documents[document])
        assert whole or documents[document] > seq_len
        assert whole or stop - start == seq_len or stop == documents[document], "long ones as by best_fit"
    if (waiting := rows[np.cumsum(rows[:, 2]) > window.tokens]).size and not missing:
        document, start, stop = waiting[0].tolist()
        begun = window.spans[window.spans[:, 0] == document][:, 2].max(initial=0)
        assert min(seq_len, stop - begun) > seq_len - max(filled), "the next document fits into no sequence"


def test_keeping_whole_leaves_little_room_among_short_documents() -> None:
    lengths = np.maximum(np.random.default_rng(0).lognormal(5, 0.8, 4000).astype(np.int64), 1)
    rows = rows_of([*lengths[np.cumsum(lengths) < 256 * 1024].tolist()])
    rows = np.concatenate([rows, [[len(rows), 0, 256 * 1024 - int(rows[:, 2].sum())]]])
    window = keep_whole(rows, 1024, np.append(rows[:-1, 2], 5000))
    assert window.tokens > 0.995 * 256 * 1024
    # Of documents of 600 tokens a sequence of 1,024 holds one.
    window = keep_whole(rows_of([600] * 436 + [544]), 1024, np.array([600] * 436 + [600]))
    assert window.tokens == 256 * 600
    # The window's documents are those that come first, though later ones would fit better.
    assert lengths_of(keep_whole(rows_of([6, 6, 6, 2]), 10, np.array([6, 6, 6, 4]))) == [[6], [6]]


def test_the_config_names_the_packings_there_are() -> None:
    assert tuple(PACKINGS) == CONFIG_PACKINGS
