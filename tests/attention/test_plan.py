"""The plan's index arithmetic, pure and on one process: every allowed pair exactly once, no other."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.oracle import allowed
from torchtitan_cp.attention import AttentionMask, LayoutError, PlanError, make_plan
from torchtitan_cp.attention.layout import make_layout
from torchtitan_cp.attention.plan import ALL_ROWS, Plan


def plans_of_all_ranks(seq_len: int, ranks: int, mask: AttentionMask, layout: str) -> list[Plan]:
    return [make_plan(seq_len, mask=mask, ranks=ranks, rank=rank, layout=layout) for rank in range(ranks)]


def pairs_computed(plans: list[Plan], rows: int) -> Tensor:
    """`[rows, S, S]` int: how often each (query, key) pair is computed by all ranks together."""
    seq_len = plans[0].sequence_length
    computed = torch.zeros(rows, seq_len, seq_len, dtype=torch.int64)
    for plan in plans:
        for step in plan.steps:
            source = plan.layout.positions(step.source)
            arrived = torch.cat([source[start:stop] for start, stop in step.receive] or [source[:0]])
            for tile in step.tiles:
                queries = plan.positions[tile.q_start : tile.q_stop]
                keys = arrived[tile.k_start : tile.k_stop]
                block = torch.ones(len(queries), len(keys), dtype=torch.int64)
                if tile.causal:
                    assert torch.equal(queries, keys), "a causal tile's diagonal is the mask's"
                    block = block.tril()
                for row in range(rows) if tile.row == ALL_ROWS else [tile.row]:
                    computed[row, queries[:, None], keys[None, :]] += block
    return computed


def draw_lengths(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    cuts = draw(st.sets(st.integers(1, total - 1), max_size=6)) if total > 1 else set()
    edges = [0, *sorted(cuts), total]
    return tuple(stop - start for start, stop in pairwise(edges))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, AttentionMask, str]:
    ranks = draw(st.integers(1, 5))
    seq_len = 2 * ranks * draw(st.integers(1, 8))
    rows = draw(st.integers(0, 2))
    documents = tuple(draw_lengths(draw, seq_len) for _ in range(rows)) or None
    mask = AttentionMask(causal=draw(st.booleans()), document_lengths=documents)
    return seq_len, ranks, mask, draw(st.sampled_from(("contiguous", "zigzag")))


@given(cases())
@settings(max_examples=150, deadline=None)
def test_tiles_of_all_ranks_cover_every_allowed_pair_exactly_once(case: tuple[int, int, AttentionMask, str]) -> None:
    seq_len, ranks, mask, layout = case
    expected = allowed(mask, seq_len)
    computed = pairs_computed(plans_of_all_ranks(seq_len, ranks, mask, layout), len(expected))
    assert torch.equal(computed, expected.long())


@given(cases())
@settings(max_examples=100, deadline=None)
def test_what_a_rank_sends_is_what_its_target_expects(case: tuple[int, int, AttentionMask, str]) -> None:
    seq_len, ranks, mask, layout = case
    plans = plans_of_all_ranks(seq_len, ranks, mask, layout)
    for plan in plans:
        for distance, step in enumerate(plan.steps):
            served = plans[step.target].steps[distance]
            assert served.source == plan.rank
            assert served.receive == step.send


@given(cases())
@settings(max_examples=50, deadline=None)
def test_shards_of_all_ranks_hold_every_token_once(case: tuple[int, int, AttentionMask, str]) -> None:
    seq_len, ranks, mask, layout = case
    x = torch.arange(seq_len)[None, :, None].expand(2, seq_len, 3)
    plans = plans_of_all_ranks(seq_len, ranks, mask, layout)
    shards = [plan.shard(x, dim=1) for plan in plans]
    assert all(shard.shape == (2, seq_len // ranks, 3) for shard in shards)
    assert torch.equal(torch.cat([shard[0, :, 0] for shard in shards]).sort().values, torch.arange(seq_len))
    for plan, shard in zip(plans, shards, strict=True):
        assert torch.equal(shard[0, :, 0], plan.positions)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_zigzag_gives_every_rank_the_same_causal_work(ranks: int) -> None:
    def area(plan: Plan) -> int:
        tiles = [tile for step in plan.steps for tile in step.tiles]
        sizes = [(tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, tile.causal) for tile in tiles]
        return sum(rows * (rows + 1) // 2 if causal else rows * keys for rows, keys, causal in sizes)

    areas = {area(plan) for plan in plans_of_all_ranks(2 * ranks * 16, ranks, AttentionMask(), "zigzag")}
    assert len(areas) == 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_causal_is_one_tile_a_step_and_carries_three_quarters(ranks: int) -> None:
    plans = plans_of_all_ranks(2 * ranks * 16, ranks, AttentionMask(), "zigzag")
    assert all(len(step.tiles) == 1 for plan in plans for step in plan.steps)
    carried = sum(stop - start for plan in plans for step in plan.steps[1:] for start, stop in step.receive)
    relayed_ring = ranks * (ranks - 1) * plans[0].local_tokens
    assert carried == relayed_ring * 3 // 4


def test_keys_of_documents_that_do_not_reach_a_rank_do_not_travel() -> None:
    mask = AttentionMask(document_lengths=((32, 32),))
    plan = make_plan(64, mask=mask, ranks=4, rank=0, layout="contiguous")
    assert all(not step.receive for step in plan.steps[2:])
    assert plan.steps[3].send == ()
    assert plan.steps[1].send == ((0, 16),)


def test_plan_is_hashable_plain_data() -> None:
    one, two = (make_plan(64, ranks=4, rank=1) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != make_plan(64, ranks=4, rank=2)


def test_a_length_that_does_not_divide_names_the_nearest_that_do() -> None:
    with pytest.raises(LayoutError, match=r"100 tokens is not divisible by 2 x cp = 16; use 96 or 112"):
        make_layout("zigzag", 100, 8)
    with pytest.raises(LayoutError, match=r"use 8$"):
        make_layout("zigzag", 3, 4)


def test_what_is_not_available_is_refused_by_name_at_plan_time() -> None:
    with pytest.raises(PlanError, match=r"window = \(128, 0\) is not available"):
        make_plan(64, mask=AttentionMask(window=(128, 0)))
    with pytest.raises(PlanError, match=r"strategy 'all_gather' is not available; use one of auto, ring"):
        make_plan(64, strategy="all_gather")
    with pytest.raises(PlanError, match=r"kernel 'flex' is not available; use one of auto, cpu"):
        make_plan(64, kernel="flex")
    with pytest.raises(LayoutError, match=r"layout 'balanced' is not available"):
        make_plan(64, layout="balanced")


@pytest.mark.parametrize("lengths", [(30, 30), (64, 0), (-1, 65), ()])
def test_documents_that_do_not_fill_the_sequence_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="give lengths of at least 1 that sum to seq_len = 64"):
        make_plan(64, mask=AttentionMask(document_lengths=(lengths,)))


def test_shard_and_unshard_name_a_wrong_length() -> None:
    plan = make_plan(64, ranks=4)
    with pytest.raises(PlanError, match="has 60 entries; give the full sequence of 64"):
        plan.shard(torch.zeros(1, 60))
    with pytest.raises(PlanError, match="give this rank's 16 rows"):
        plan.unshard(torch.zeros(1, 64))
    with pytest.raises(PlanError, match="this plan has no process group"):
        plan.unshard(torch.zeros(1, 16))
