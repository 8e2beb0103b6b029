"""The plan's index arithmetic, pure and on one process: every allowed pair exactly once, no other."""

import pickle
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._dynamo.utils import is_frozen_dataclass

from tests.support.oracle import allowed
from tests.support.plan_cases import cases, in_band, plans_of_all_ranks
from torchtitan_cp.attention import AttentionMask, PlanError, make_plan
from torchtitan_cp.attention.mask import count_rows
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.plan_registry import find_plan
from torchtitan_cp.attention.tiles import ALL_ROWS


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
                block = in_band(len(queries), len(keys), tile.band).long()
                assert block.any(1).all(), "a kernel is never given a row that sees nothing"
                assert block.sum() == tile.pairs
                for row in range(rows) if tile.row == ALL_ROWS else [tile.row]:
                    computed[row, queries[:, None], keys[None, :]] += block
    return computed


@given(cases())
@settings(max_examples=60, deadline=None)
def test_segments_hold_each_token_of_each_document_once_in_order(case: tuple[int, int, AttentionMask, str]) -> None:
    seq_len, ranks, mask, layout = case
    plan = plans_of_all_ranks(seq_len, ranks, mask, layout)[0]
    positions = [plan.layout.positions(rank) for rank in range(ranks)]
    for documents, spans in zip(plan.segments, mask.documents(seq_len), strict=True):
        for segments, span in zip(documents, spans, strict=True):
            held = torch.cat([positions[segment.rank][slice(*segment.rows)] for segment in segments])
            assert held.tolist() == list(range(*span))
            assert all(one.rank != other.rank for one, other in pairwise(segments))


@given(cases())
@settings(max_examples=150, deadline=None)
def test_tiles_of_all_ranks_cover_every_allowed_pair_exactly_once(case: tuple[int, int, AttentionMask, str]) -> None:
    seq_len, ranks, mask, layout = case
    expected = allowed(mask, seq_len)
    computed = pairs_computed(plans_of_all_ranks(seq_len, ranks, mask, layout), len(expected))
    assert torch.equal(computed, expected.long())


@given(cases())
@settings(max_examples=100, deadline=None)
def test_gathered_tiles_of_all_ranks_cover_every_allowed_pair_exactly_once(
    case: tuple[int, int, AttentionMask, str],
) -> None:
    seq_len, ranks, mask, layout = case
    expected = allowed(mask, seq_len)
    computed = torch.zeros_like(expected, dtype=torch.int64)
    for plan in plans_of_all_ranks(seq_len, ranks, mask, layout):
        for tile in plan.gathered_tiles:
            queries, keys = plan.positions[tile.q_start : tile.q_stop], torch.arange(tile.k_start, tile.k_stop)
            block = in_band(len(queries), len(keys), tile.band).long()
            for row in range(len(expected)) if tile.row == ALL_ROWS else [tile.row]:
                computed[row, queries[:, None], keys[None, :]] += block
    assert torch.equal(computed, expected.long())


def test_a_window_carries_the_neighbours_rows_inside_it_and_no_more() -> None:
    plan = make_plan(4096, mask=AttentionMask(window=(100, -1)), ranks=8, rank=3, layout="contiguous")
    assert [step.receive for step in plan.steps[1:]] == [((412, 512),)] + [()] * 6
    plans = plans_of_all_ranks(4096, 8, plan.mask, "zigzag")
    assert plans[0].keys_sent == sum(count_rows(step.send) for plan in plans for step in plan.steps[1:]) / 4096


def test_a_plan_that_was_pickled_is_equal_and_has_the_same_steps() -> None:
    plan = make_plan(64, ranks=4, rank=1)
    steps, handle = plan.steps, plan.handle
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert copy.steps is steps, "steps are worked out once in a process"
    assert int(copy.handle) == int(handle)
    assert find_plan(handle) == plan
    for one in (copy, copy.mask, copy.layout):
        one.__dict__["hash"] = 1  # as where strings have other hashes
        assert hash(pickle.loads(pickle.dumps(one))) != 1


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


def test_shard_and_unshard_name_a_wrong_length() -> None:
    plan = make_plan(64, ranks=4)
    with pytest.raises(PlanError, match="have 64 entries along dim 1; give the full sequence of 64, or another dim"):
        plan.shard(torch.zeros(1, 60))
    with pytest.raises(PlanError, match=r"a tensor \(64,\) does not have 64 entries along dim 1"):
        plan.shard(torch.zeros(64))
    with pytest.raises(PlanError, match="give this rank's 16 rows"):
        plan.unshard(torch.zeros(1, 64))
    with pytest.raises(PlanError, match="this plan has no process group"):
        plan.unshard(torch.zeros(1, 16))


def test_a_plan_stays_as_it_was_made_and_torch_reads_no_field_ahead_of_its_use() -> None:
    plan = make_plan(8, mask=AttentionMask(), ranks=1, rank=0)
    with pytest.raises(FrozenInstanceError):
        plan.rank = 1  # type: ignore[misc]
    assert not is_frozen_dataclass(plan), "torch 2.11 would guard every field of one"
