"""How much is kept for the states of documents."""

import pytest

from torchtitan_cp.attention import AttentionMask, make_plan


@pytest.mark.parametrize("lengths", [(1,), (10, 3, 7), (40, 24)])
def test_what_is_kept_for_states_goes_by_the_documents_that_are_cut_and_not_by_all(lengths: tuple[int, ...]) -> None:
    """16 times as many documents took 16 times as much: a gigabyte a layer for 1,000 documents in 1M tokens."""
    kept = []
    for tokens in (1 << 10, 1 << 14):
        count = tokens // sum(lengths)
        row = (*lengths * count, *[1] * (tokens - count * sum(lengths)))
        plan = make_plan(tokens, mask=AttentionMask(document_lengths=(row,)), ranks=4, layout="documents")
        kept.append(plan.most_runs)
    assert kept[1] <= kept[0] <= 4
