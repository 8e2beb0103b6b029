"""Labels, weights and turns of packed sequences, where a store says which tokens are learned."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.memory import MemoryStore
from torchtitan_cp.attention import make_plan
from torchtitan_cp.config.data import ResolvedStageData
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.micro_batches import BatchLayout, collate
from torchtitan_cp.data.batches.packed_stream import PackedSequence, PackedStream
from torchtitan_cp.data.batches.stream import TokenStream

BEST_FIT = ResolvedStageData({}, "best_fit", packing_window=2, document_mask=True, restart_positions=True)
CONCAT = replace(BEST_FIT, packing="concat")


#        system, user, answer, user, answer; a document; one without an answer
MASKS = [[0, 0, 1, 1, 1, 0, 0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0]]


def packed(data: ResolvedStageData, seq_len: int, store: Any = None) -> PackedStream:
    store = store or MemoryStore([len(mask) for mask in MASKS], masks=MASKS)
    return PackedStream(TokenStream(store, 64, seed=0, shuffle=False), seq_len, data)


def test_a_label_is_ignored_where_its_own_token_is_masked() -> None:
    sequence = packed(CONCAT, 17).sequence(0)
    assert sequence.tokens.tolist() == list(range(17))
    ignored = IGNORED
    first = [ignored, 2, 3, 4, ignored, ignored, ignored, 8, 9, ignored]
    assert sequence.labels.tolist() == [*first, 11, 12, 13, *[ignored] * 4]
    assert sequence.turns.tolist() == [-1, 0, 0, 0, -1, -1, -1, 1, 1, -1, 0, 0, 0, -1, -1, -1, -1]
    expected = [0, 1 / 5, 1 / 5, 1 / 5, 0, 0, 0, 1 / 5, 1 / 5, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0, 0]
    assert sequence.weights.tolist() == pytest.approx(expected)
    assert (sequence.weights.dtype, sequence.turns.dtype) == (np.float32, np.int64)


def test_without_document_masks_the_next_documents_first_token_keeps_its_mask() -> None:
    sequence = packed(replace(CONCAT, document_mask=False), 17).sequence(0)
    assert sequence.labels[9] == 10  # learned, though of the next document
    assert sequence.labels[13] == IGNORED


def test_a_conversation_that_is_cut_keeps_its_labels_and_its_second_part_has_no_turns() -> None:
    before, after = packed(CONCAT, 8).sequence(0), packed(CONCAT, 8).sequence(1)
    assert before.labels.tolist()[-1] == 8  # the token after the cut
    assert after.labels.tolist()[:2] == [9, IGNORED]
    assert after.turns.tolist()[:6] == [-1, -1, 0, 0, 0, -1]
    assert before.weights.sum() == pytest.approx(1)
    assert after.weights.sum() == pytest.approx(2)  # its second part, and the next document


@settings(deadline=None)
@given(masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=12), data=st.data())
def test_labels_follow_from_the_masks_in_every_packing(masks: list[list[bool]], data: st.DataObject) -> None:
    store = MemoryStore([len(mask) for mask in masks], masks=masks)
    choice = data.draw(st.sampled_from([BEST_FIT, CONCAT]))
    stream = PackedStream(TokenStream(store, 16, seed=3), data.draw(st.integers(1, 24)), choice)
    learned = np.concatenate([np.array(mask, dtype=bool) for mask in masks])
    ends = store.begins[1:] - 1
    for number in range(4):
        sequence = stream.sequence(number)
        following = np.where(np.isin(sequence.tokens, ends), 0, sequence.tokens + 1)
        expected = np.where((following > 0) & learned[following], following, IGNORED)
        text = sum(span.stop - span.start for span in sequence.spans)
        assert sequence.labels[:text].tolist() == expected[:text].tolist()
        assert (sequence.labels[text:] == IGNORED).all(), "padding is not learned"
        assert not sequence.weights[text:].any()
        assert (sequence.turns[text:] == -1).all()
        for (_, document, start, stop), offset in zip(sequence.spans, _offsets(sequence), strict=True):
            part = slice(offset, offset + stop - start)
            kept = sequence.labels[part] != IGNORED
            assert sequence.weights[part].sum() == pytest.approx(float(kept.any()), abs=1e-6)
            turns = [turn for turn in sequence.turns[part].tolist() if turn >= 0]
            runs = sum(np.diff(kept.astype(int), prepend=0) == 1)
            assert sorted(set(turns)) == (list(range(runs)) if start == 0 else [])
            assert turns == sorted(turns), document


def _offsets(sequence: PackedSequence) -> list[int]:
    lengths = [span.stop - span.start for span in sequence.spans]
    return [sum(lengths[:index]) for index in range(len(lengths))]


def test_weights_go_to_ranks_as_labels_do_and_only_where_they_are_wanted() -> None:
    stream = packed(CONCAT, 16)
    layout = BatchLayout(16, 1, 2, 1, 0, make_plan)
    assert collate(stream.sequence, layout, [0, 1]).weights is None
    batch = collate(stream.sequence, replace(layout, weighted=True), [0, 1])
    expected = np.stack([stream.sequence(number).weights for number in (0, 1)])
    assert torch.equal(batch.weights, batch.plan.shard(torch.from_numpy(expected), dim=1))


def test_the_cuts_of_a_stage_are_counted() -> None:
    store = MemoryStore([len(mask) for mask in MASKS], masks=MASKS)
    stream = TokenStream(store, 64, seed=0, shuffle=False)
    # 0-7 | 8-13, 14-15 | 16, 0-6 | 7-13, 14 | ...: the first is cut between 7, not learned, and 8.
    assert PackedStream(stream, 8, CONCAT, samples=2).cuts()[:3] == (3, 2, 0)
    # Cut after 3, between two tokens of an answer, and after 7, 11 (in a document learned whole) and 15.
    assert PackedStream(stream, 4, CONCAT, samples=4).cuts()[:3] == (3, 3, 2)
    assert PackedStream(stream, 17, BEST_FIT, samples=2).cuts() == (6, 0, 0, 0.0, 2.0)
    assert PackedStream(stream, 8, BEST_FIT, samples=0).cuts() == (0, 0, 0, 0.0, 0.0)


def test_best_fit_cuts_no_conversation_that_fits_and_says_how_much_is_padding_and_how_often_each_is_read() -> None:
    store = MemoryStore([len(mask) for mask in MASKS], masks=MASKS)
    stream = TokenStream(store, 64, seed=0, shuffle=False)
    # 10 and 3 tokens of the first epoch and 4 of it in the next row; then 10 of the second one's, and so on.
    found = PackedStream(stream, 13, BEST_FIT, samples=20).cuts()
    assert (found.cut, found.inside_turns) == (0, 0)
    text = sum(len(MASKS[number % 3]) for number in range(found.conversations))
    assert found.padding == pytest.approx(1 - text / (20 * 13))
    assert found.epochs == pytest.approx(text / 17)
    said = f"0 of {found.conversations} conversations cut, 0 cuts inside a learned turn, {found.padding:.1%} padding "
    assert str(found) == said + f"(each conversation is read {found.epochs:.1f} times)"
    # The conversation of 10 tokens is longer than a sequence of 6, and only that is cut.
    short = PackedStream(stream, 6, replace(BEST_FIT, packing_window=4), samples=20)
    assert 0 < short.cuts().cut == sum(span.stop == 6 for n in range(20) for span in short.sequence(n).spans)
