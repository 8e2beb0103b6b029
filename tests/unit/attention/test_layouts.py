"""Layouts beside each other: how even the work of their ranks is, their names, and lengths they refuse."""

import pytest
import torch
from hypothesis import given, settings

from tests.support.oracle import allowed
from tests.support.plan_cases import cases, pairs_of, plans_of_all_ranks
from torchtitan_cp.attention import AttentionMask, LayoutError
from torchtitan_cp.attention.layout import rank_areas
from torchtitan_cp.attention.layouts import balanced, contiguous, make_layout, zigzag


def test_documents_that_hold_most_of_the_area_are_cut_finer_until_ranks_are_nearly_even() -> None:
    lengths = (36_000, *(500,) * 452, 144)
    mask = AttentionMask(document_lengths=(lengths,))
    layout = balanced(262_144, 8, mask)
    work = rank_areas(layout, mask, 262_144)
    # Of eight chunks a rank, the last of the long document alone is half as much again as a rank's share.
    assert 1.4 * sum(work) / 8 < 4096 * (36_000 - 4096)
    assert max(work) < 1.1 * sum(work) / 8
    assert len(layout.segments) > 8 * 8


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_layout_knows_its_name(ranks: int) -> None:
    assert contiguous(64, ranks).name == "contiguous"
    assert zigzag(64, ranks).name == ("zigzag" if ranks > 1 else "contiguous")
    packed = AttentionMask(document_lengths=((40, 3, 7, 14),))
    assert balanced(64, ranks, packed).name == "balanced"


@given(cases())
@settings(max_examples=100, deadline=None)
def test_balanced_is_no_worse_than_any_layout_of_two_chunks(case: tuple[int, int, AttentionMask, str]) -> None:
    seq_len, ranks, mask, _ = case
    busiest = {
        layout: max(pairs_of(plan) for plan in plans_of_all_ranks(seq_len, ranks, mask, layout))
        for layout in ("contiguous", "zigzag", "balanced")
    }
    rows = len(mask.documents(seq_len))
    mean = allowed(mask, seq_len).sum().item() / rows / ranks
    if rows == 1:
        assert busiest["balanced"] <= 4 / 3 * 1.04 * max(mean, min(busiest.values()))


@pytest.mark.parametrize("ranks", [4, 8, 32])
def test_balanced_evens_out_packed_documents_where_zigzag_does_not(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    lengths, left = [], 1 << 17
    while left:
        drawn = int(torch.exp(7.0 + 1.5 * torch.randn((), generator=generator, dtype=torch.float64)))
        lengths.append(min(left, max(1, drawn)))
        left -= lengths[-1]
    mask = AttentionMask(document_lengths=(tuple(lengths),))
    mean = sum(length * (length + 1) // 2 for length in lengths) / ranks
    busy = {
        name: max(pairs_of(plan) for plan in plans_of_all_ranks(1 << 17, ranks, mask, name)) / mean
        for name in ("zigzag", "balanced")
    }
    assert busy["balanced"] < 1.03 < busy["zigzag"]


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_zigzag_gives_every_rank_the_same_causal_work(ranks: int) -> None:
    areas = {pairs_of(plan) for plan in plans_of_all_ranks(2 * ranks * 16, ranks, AttentionMask(), "zigzag")}
    assert len(areas) == 1


def test_a_length_that_does_not_divide_names_the_nearest_that_do() -> None:
    with pytest.raises(LayoutError, match=r"100 tokens is not divisible by 2 x cp = 16; use 96 or 112"):
        make_layout("zigzag", 100, 8, AttentionMask())
    with pytest.raises(LayoutError, match=r"use 8$"):
        make_layout("zigzag", 3, 4, AttentionMask())
    with pytest.raises(LayoutError, match=r"12 tokens is not divisible by 2 x cp = 8; use 8 or 16, or layout = 'bal"):
        make_layout("auto", 12, 4, AttentionMask())
    assert make_layout("balanced", 12, 4, AttentionMask()).ranks == 4
