"""The plan's index arithmetic, pure and on one process: every allowed pair exactly once, no other."""

import pickle
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import is_frozen_dataclass

from tests.support.oracle import allowed
from tests.support.plan_cases import cases
from torchtitan_cp.attention import (
    AttentionMask,
    LayoutError,
    PlanError,
    attend,
    caching,
    causal_conv,
    gated_delta_rule,
    make_plan,
    plan_registry,
)
from torchtitan_cp.attention.caching import ENTRY_BYTES, KEPT_BYTES, KEPT_RESULTS, host_bytes, keep_newest
from torchtitan_cp.attention.layouts import make_layout
from torchtitan_cp.attention.mask import Band, count_rows
from torchtitan_cp.attention.operator import resolve_auto
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.plan_registry import find_plan
from torchtitan_cp.attention.strategies import log_choice
from torchtitan_cp.attention.tiles import ALL_ROWS, CAUSAL, count_pairs, dense_parts


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


def in_band(queries: int, keys: int, band: Band) -> Tensor:
    """`[queries, keys]` bool, straight from the definition."""
    distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
    low, high = (-queries - keys if band.low is None else band.low), (keys if band.high is None else band.high)
    return (distance >= low) & (distance <= high)


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


BOUNDS = st.one_of(st.none(), st.integers(-30, 30))


@given(st.integers(1, 24), st.integers(1, 24), BOUNDS, BOUNDS)
@settings(max_examples=500, deadline=None)
def test_plain_parts_of_a_band_cover_it_exactly_once(
    queries: int, keys: int, low: int | None, high: int | None
) -> None:
    if low is not None and high is not None and low > high:
        low, high = high, low
    band = Band(low, high).shifted(0, queries, keys)
    covered = torch.zeros(queries, keys, dtype=torch.int64)
    for part in dense_parts(queries, keys, band):
        rows, columns = part.q_stop - part.q_start, part.k_stop - part.k_start
        assert rows > 0
        assert columns > 0
        block = torch.ones(rows, columns, dtype=torch.int64)
        if part.band == CAUSAL:
            assert rows == columns, "a kernel's causal call is square"
            block = block.triu() if part.flipped else block.tril()
        covered[part.q_start : part.q_stop, part.k_start : part.k_stop] += block
    expected = in_band(queries, keys, band)
    assert torch.equal(covered, expected.long())
    assert count_pairs(queries, keys, band) == expected.sum()


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


def test_a_window_carries_the_neighbours_rows_inside_it_and_no_more() -> None:
    plan = make_plan(4096, mask=AttentionMask(window=(100, -1)), ranks=8, rank=3, layout="contiguous")
    assert [step.receive for step in plan.steps[1:]] == [((412, 512),)] + [()] * 6
    plans = plans_of_all_ranks(4096, 8, plan.mask, "zigzag")
    assert plans[0].keys_sent == sum(count_rows(step.send) for plan in plans for step in plan.steps[1:]) / 4096


def test_cu_seqlens_become_a_mask_and_each_rank_gets_its_own_back() -> None:
    mask = AttentionMask.from_cu_seqlens(torch.tensor([0, 5, 5, 12]), torch.tensor([0, 8, 8, 16]))
    assert mask.document_lengths == ((8, 8),)
    assert mask.used_lengths == ((5, 7),)
    plans = plans_of_all_ranks(16, 2, mask, "contiguous")
    assert [plan.cu_seqlens.tolist() for plan in plans] == [[0, 5], [0, 7]]
    with pytest.raises(PlanError, match="cu_seqlens does not rise from 0"):
        AttentionMask.from_cu_seqlens([1, 5])
    with pytest.raises(PlanError, match=r"a document of batch row 0 uses 9 of 8 rows"):
        make_plan(8, mask=AttentionMask.from_cu_seqlens([0, 9], [0, 8]))


def test_a_plan_is_found_by_its_number_as_long_as_it_or_its_equal_lives() -> None:
    def masked(number: int) -> Plan:
        return make_plan(8192, mask=AttentionMask(document_lengths=((number, 8192 - number),)))

    plans = [masked(number) for number in range(1, KEPT_RESULTS + 100)]
    assert all(find_plan(plan.handle) is plan for plan in plans)
    others = [masked(number) for number in range(1, 50)]
    assert [int(plan.handle) for plan in others] == [int(plan.handle) for plan in plans[:49]]
    handles = [plan.handle for plan in plans]
    del plans
    assert all(find_plan(plan.handle) == plan for plan in others)
    assert find_plan(handles[-1]) == masked(KEPT_RESULTS + 99)
    for number in range(3000, 3000 + KEPT_RESULTS):
        masked(number)
    with pytest.raises(PlanError, match=f"plan {int(handles[60])} is no longer kept"):
        find_plan(handles[60])
    assert all(find_plan(plan.handle) == plan for plan in others)


def test_the_last_plans_are_kept_by_their_size_and_none_is_forgotten_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles = []
    for number in range(1, 20):
        plan = make_plan(8192, mask=AttentionMask(document_lengths=((number, *[1] * 4000, 4192 - number),)))
        monkeypatch.setattr(plan_registry._kept, "budget_bytes", 5 * host_bytes((plan,)) // 2)
        handles.append(plan.handle)
        del plan
        assert [find_plan(handle).local_tokens for handle in handles[-2:]] == [8192] * len(handles[-2:])
    with pytest.raises(PlanError, match="is no longer kept"):
        find_plan(handles[0])


def test_results_are_kept_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand plans were kept, of 45 MB each for 100,000 documents: memory grew with every step."""
    made, quarter = list[int](), KEPT_BYTES // ENTRY_BYTES // 4

    @keep_newest
    def draw(number: int) -> tuple[tuple[int, ...], ...]:
        made.append(number)
        return ((0,) * quarter,)

    for number in (1, 2, 3, 4, 1, 5, 1, 2):
        draw(number)
    assert made == [1, 2, 3, 4, 5, 1, 2]

    sizes = []
    for tokens in (64, 128):
        plan = make_plan(tokens, mask=AttentionMask(document_lengths=((1,) * tokens,)))
        sizes.append(host_bytes((plan,)))
    assert sizes[1] - sizes[0] >= 64 * ENTRY_BYTES, "of a plan they go by its documents"
    counted: list[Any] = []
    monkeypatch.setattr(caching, "host_bytes", lambda *given: counted.append(given) or host_bytes(*given))
    assert host_bytes((plan.segments[0],)) == 128 * ENTRY_BYTES
    assert len(counted) == 1, "a call for each document would take half as long as its plan"


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


def test_a_plan_made_where_the_model_is_initialized_without_data_is_as_any_other() -> None:
    """Its number told the dispatcher to run attention without data, on inputs that have some."""
    with torch.device("meta"):
        plan = make_plan(64, mask=AttentionMask(document_lengths=((24, 40),)))
        assert plan.positions.tolist() == list(range(64))
    q = torch.randn(1, 64, 2, 8)
    same = make_plan(64, mask=AttentionMask(document_lengths=((24, 40),)), kernel="cpu")
    torch.testing.assert_close(attend(q, q, q, plan), attend(q, q, q, same))


def test_a_forward_mode_derivative_is_refused_where_it_would_be_zero() -> None:
    plan, x = make_plan(8), torch.randn(1, 8, 1, 4)
    for function in (
        lambda x: attend(x, x, x, plan),
        lambda x: gated_delta_rule(x, x, x, -x[..., 0].abs(), x[..., 1], plan),
        lambda x: causal_conv(x[:, :, 0], torch.ones(4, 2), plan),
    ):
        with pytest.raises(PlanError, match="has no forward-mode derivative; use reverse mode"):
            torch.func.jvp(function, (x,), (x,))


def test_a_plan_whose_strategy_is_chosen_later_keeps_the_steps_that_still_hold() -> None:
    mask = AttentionMask(document_lengths=((9, 23, 32),))
    plan = make_plan(64, mask=mask, ranks=8, rank=1)
    steps = plan.steps
    ring, traded = (resolve_auto(plan, *heads) for heads in ((6, 3), (8, 8)))
    assert (ring.strategy, traded.strategy) == ("ring", "all_to_all")
    assert ring.steps is steps
    assert len(traded.steps) == 1  # whose ring is of one member
    assert traded.all_to_all_ranks == 8
    assert ring == make_plan(64, mask=mask, ranks=8, rank=1, strategy="ring")


def test_auto_keeps_keys_in_8_bits_on_the_ring_where_heads_could_be_traded() -> None:
    plan = make_plan(64, ranks=8, kv_transfer="float8")
    assert (resolve_auto(plan, 8, 8).strategy, resolve_auto(plan, 8, 8).kv_transfer) == ("ring", "float8")


def test_a_plan_of_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        plan = make_plan(64)
        positions = plan.positions
    x = torch.randn(1, 64, 2, 8, requires_grad=True)
    gates = torch.zeros(1, 64, 2)
    attend(x, x, x, plan).sum().backward()
    gated_delta_rule(x, x, x, gates, gates, plan).sum().backward()
    torch.nn.functional.embedding(positions, torch.randn(64, 8, requires_grad=True)).sum().backward()
    assert not positions.is_inference()


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


def pairs_of(plan: Plan) -> int:
    return sum(tile.pairs for step in plan.steps for tile in step.tiles)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_zigzag_gives_every_rank_the_same_causal_work(ranks: int) -> None:
    areas = {pairs_of(plan) for plan in plans_of_all_ranks(2 * ranks * 16, ranks, AttentionMask(), "zigzag")}
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


def test_documents_are_hashed_once_and_not_at_each_attention() -> None:
    hashed = list[int]()

    class Lengths(tuple[int, ...]):
        def __hash__(self) -> int:
            hashed.append(len(self))
            return super().__hash__()

    plan = make_plan(64, mask=AttentionMask(document_lengths=(Lengths((24, 40)),)), ranks=4)
    resolve_auto(plan, 4, 2)
    resolve_auto(replace(plan, strategy="all_gather"), 4, 2)
    assert hashed == [2]


def test_a_length_that_does_not_divide_names_the_nearest_that_do() -> None:
    with pytest.raises(LayoutError, match=r"100 tokens is not divisible by 2 x cp = 16; use 96 or 112"):
        make_layout("zigzag", 100, 8, AttentionMask())
    with pytest.raises(LayoutError, match=r"use 8$"):
        make_layout("zigzag", 3, 4, AttentionMask())


def test_names_that_are_not_known_are_refused_with_those_that_are() -> None:
    with pytest.raises(PlanError, match=r"strategy 'relay' is not available; use one of auto, ring, all_gather"):
        make_plan(64, strategy="relay")
    with pytest.raises(PlanError, match=r"kernel 'metal' is not available; use one of auto, "):
        make_plan(64, kernel="metal")
    with pytest.raises(LayoutError, match=r"layout 'striped' is not available; use one of auto, contiguous"):
        make_plan(64, layout="striped")
    with pytest.raises(PlanError, match=r"kv_transfer 'int4' is not available; use one of exact, float8"):
        make_plan(64, kv_transfer="int4")


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(PlanError, match="use ring, all_gather or hybrid"):
        make_plan(64, ranks=2, strategy="all_to_all", kv_transfer="float8")
    with pytest.raises(PlanError, match="all_to_all_ranks = 3 does not fit strategy 'hybrid' on 4 ranks"):
        make_plan(64, ranks=4, strategy="hybrid", all_to_all_ranks=3)
    with pytest.raises(PlanError, match="rank -1 is not one of 2 ranks; give its number in the context-parallel group"):
        make_plan(64, ranks=2, rank=-1)  # as torch numbers a rank in a group that it is not in
    with pytest.raises(PlanError, match=r"window = .* has a side below -1"):
        make_plan(64, mask=AttentionMask(window=(-2, 0)))


@pytest.mark.parametrize(
    "tuples", [{"window": 31}, {"window": (31,)}, {"document_lengths": (10, 54)}, {"document_lengths": [[10, 54]]}]
)
def test_a_mask_says_what_its_tuples_are(tuples: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"made of tuples: .*; give window \(left, right\), .* a tuple for each row"):
        AttentionMask(**tuples)


@pytest.mark.parametrize("lengths", [(30, 30), (64, 0), (-1, 65), ()])
def test_documents_that_do_not_fill_the_sequence_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="give lengths of at least 1 that sum to seq_len = 64"):
        make_plan(64, mask=AttentionMask(document_lengths=(lengths,)))


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


def test_the_log_names_a_window_by_its_keys_as_the_config_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_choice(4, 2, 3, AttentionMask().windowed(64).band)
    assert "4 query and 2 key heads, a window of 64 tokens;" in caplog.text
