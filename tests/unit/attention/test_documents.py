"""The layout of packed documents: even ranks, few messages, and nodes that documents stay in."""

import random

import pytest

from benchmarks.layouts import CASES, count, find_lengths
from benchmarks.plan import draw_lengths
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.attention.documents import assign_documents
from torchtitan_cp.attention.layout import Layout, rank_areas, rows_sent
from torchtitan_cp.attention.layouts import ACCEPTED, balanced, documents, make_layout, zigzag
from torchtitan_cp.attention.mask import UNBOUNDED, count_rows
from torchtitan_cp.attention.ring_cost import relative_time

TWO_LONG = AttentionMask(document_lengths=((10_000, 55_536), (40_000, 1536, 24_000)))
WINDOWS = {"causal": (True, UNBOUNDED), "bidirectional": (False, UNBOUNDED), "window": (True, (40, -1))}


def draw_mask(seed: int, seq_len: int, causal: bool, window: tuple[int, int]) -> AttentionMask:
    """Documents of any length, some with padding after them."""
    generator, lengths = random.Random(seed), []
    while (left := seq_len - sum(lengths)) > 0:
        lengths.append(min(left, max(1, int(generator.lognormvariate(3, 1.5)))))
    used = tuple(length - generator.choice([0, 0, min(3, length)]) for length in lengths)
    return AttentionMask(causal, window, (tuple(lengths),), (used,))


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(1, 1), (2, 2), (3, 3), (6, 2), (8, 4), (16, 8)])
def test_every_rank_holds_as_many_tokens_and_every_token_is_held_once(
    kind: str, ranks: int, ranks_per_node: int
) -> None:
    for seed in range(20):
        mask, seq_len, filling = draw_mask(seed, 48 * ranks, *WINDOWS[kind]), 48 * ranks, (0.25, 0.5)[seed % 2]
        held = assign_documents(seq_len, ranks, mask, ranks_per_node, filling, filling / 2)
        assert [sum(stop - start for start, stop in spans) for spans in held] == [48] * ranks
        layout = Layout.of(held)
        positions = sorted(position for rank in range(ranks) for position in layout.positions(rank).tolist())
        assert positions == list(range(seq_len))
        assert Layout.of(assign_documents(seq_len, ranks, mask, ranks_per_node, filling, filling / 2)) == layout


@pytest.mark.parametrize("case", [0, 3, 5, 6], ids=lambda case: f"{CASES[case][3]} {CASES[case][0]}")
def test_keys_sent_and_imbalance_stay_low(case: int) -> None:
    kind, tokens, ranks, number, longest = CASES[case]
    mask = AttentionMask(document_lengths=(find_lengths(kind, tokens, number, longest, draw=0),))
    sent, across, imbalance, _, _ = count(tokens, ranks, mask, "documents")
    sent_balanced, across_balanced, _, _, _ = count(tokens, ranks, mask, "balanced")
    assert sent < 0.65 * sent_balanced
    assert across <= 0.5 * across_balanced
    assert imbalance < 1.1


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("name", ["documents", "balanced"])
def test_the_rows_counted_are_those_that_the_plans_send(kind: str, name: str) -> None:
    mask, seq_len, ranks = draw_mask(5, 512, *WINDOWS[kind]), 512, 8
    plans = [make_plan(seq_len, mask=mask, ranks=ranks, rank=rank, layout=name) for rank in range(ranks)]
    sent = [sum(count_rows(step.send) for step in plan.steps[1:]) for plan in plans]
    counted, crossing = rows_sent(plans[0].layout, mask, seq_len, 4)
    if kind == "window":
        assert all(more >= rows for more, rows in zip(counted, sent, strict=True))
    else:
        assert counted == sent
        assert plans[0].keys_sent == sum(sent) / seq_len
    to_other_node = [
        sum(count_rows(step.send) for step in plan.steps[1:] if step.target // 4 != plan.rank // 4) for plan in plans
    ]
    assert all(more >= rows for more, rows in zip(crossing, to_other_node, strict=True))


def test_documents_that_fit_in_a_node_stay_there() -> None:
    generator = random.Random(1)
    lengths = [generator.randrange(2000, 9000) for _ in range(100)]
    seq_len = sum(lengths) // 16 * 16 + 16
    mask = AttentionMask(document_lengths=((*lengths, seq_len - sum(lengths)),))
    layout = make_layout("documents", seq_len, 16, mask, ranks_per_node=4)
    sent, crossing = rows_sent(layout, mask, seq_len, 4)
    assert sum(crossing) < 0.02 * seq_len
    assert sum(sent) > 0
    hybrid = make_plan(seq_len, mask=mask, ranks=16, rank=0, strategy="hybrid", all_to_all_ranks=4, layout="documents")
    assert hybrid.layout.joined(4) == make_layout("documents", seq_len, 4, mask, ranks_per_node=1)
    assert hybrid.keys_sent < 0.02


@pytest.mark.parametrize("seed", range(8))
def test_it_is_near_an_even_share_or_no_slower_than_balanced_and_zigzag(seed: int) -> None:
    mask, seq_len = draw_mask(seed, 4096, True, UNBOUNDED), 4096
    times = [
        relative_time(layout, mask, seq_len, 8)
        for layout in (documents(seq_len, 8, mask), balanced(seq_len, 8, mask), zigzag(seq_len, 8))
    ]
    assert times[0] <= max(ACCEPTED, min(times[1:]))


def test_rows_that_are_packed_differently_share_a_layout_that_is_even_over_all_of_them() -> None:
    rows = tuple(draw_lengths("log-normal", 131_072, 18, seed) for seed in (1, 8))
    mask = AttentionMask(document_lengths=rows)
    layout = make_layout("auto", 131_072, 8, mask)
    assert layout.name == "documents"
    for chosen, one in ((layout, mask), (make_layout("auto", 65_536, 4, TWO_LONG), TWO_LONG)):
        areas = rank_areas(chosen, one, chosen.segments[-1].stop)
        assert max(areas) < 1.1 * sum(areas) / chosen.ranks


def test_messages_that_compute_hides_count_by_the_rates_given() -> None:
    mask = AttentionMask(document_lengths=(find_lengths("log-normal", 131_072, 18, 0, draw=0),))
    slow, free = (documents(131_072, 8, mask, 8, 1, (cost, cost)) for cost in (50_000, 0))
    times = [relative_time(layout, mask, 131_072, 8, (50_000, 50_000)) for layout in (slow, free)]
    assert times[0] <= times[1]
    # Each rank has 68 pairs, 36 of its own keys. Meanwhile 8 rows travel, as long as 40 pairs take: it waits for 4.
    for ranks_per_node, costs in ((2, (5, 0)), (1, (0, 5))):
        assert relative_time(zigzag(16, 2), AttentionMask(), 16, ranks_per_node, costs) == pytest.approx(72 / 68)
    assert sum(rows_sent(slow, mask, 131_072, 8)[0]) < sum(rows_sent(free, mask, 131_072, 8)[0])


def test_one_document_on_all_ranks_is_cut_as_zigzag_cuts_it() -> None:
    held = assign_documents(4096, 4, AttentionMask(), 4, 0.25, 0.125)
    want = zigzag(4096, 4)
    for spans, expected in zip(Layout.of(held).spans, want.spans, strict=True):
        assert sum(spans, ()) == pytest.approx(sum(expected, ()), abs=2)
