"""Work and bytes of a layer, against the plans of all ranks and what simulated ranks really send."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scale import mask_pairs
from benchmarks.simulation import simulate
from tests.support.plan_cases import cases
from torchtitan_cp.attention import AttentionMask, Plan, make_plan
from torchtitan_cp.attention.ring_cost import ROW_PAIRS
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.attention.strategies.all_gather import HEAD_GROUPS
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.strategy_costs import STRATEGY_COSTS, Heads, Rates, layer_of, step_pairs

SLOW, FAST = 1e6, 1e30  # FLOP/s beside which messages are free, and beside which work is


def rates(kernel: float) -> Rates:
    return Rates(make_cluster("h100-80g"), kernel, kernel, 1)


def sent_bytes(plan: Plan, heads: Heads) -> tuple[float, float]:
    layer = layer_of(plan, heads, rates(FAST))
    return layer.forward_bytes, layer.backward_bytes


@given(cases(), st.sampled_from(["ring", "all_gather", "all_to_all", "hybrid"]))
@settings(max_examples=150, deadline=None)
def test_bytes_of_every_rank_are_those_that_simulated_ranks_send(
    case: tuple[int, int, AttentionMask, str], strategy: str
) -> None:
    seq_len, ranks, mask, layout = case
    batch = len(mask.document_lengths or [()])
    q, k = (torch.zeros(batch, seq_len, heads, 4, dtype=torch.bfloat16) for heads in (4, 2))
    option = {"all_to_all_ranks": 2 if ranks % 2 == 0 else 1} if strategy == "hybrid" else {}
    result = simulate(
        q, k, k, ranks=ranks, mask=mask, strategy=strategy, kernel="reference", layout=layout, dout=q, **option
    )
    for plan, forward, backward in zip(result.plans, result.forward_bytes, result.backward_bytes, strict=True):
        counted = sent_bytes(plan, Heads(4, 2, 4))
        # A plan is of one sequence, and a message carries every row of the batch.
        assert (sum(forward), sum(backward)) == (batch * counted[0], batch * counted[1])


def test_keys_in_8_bits_are_counted_as_they_are_sent() -> None:
    q, k = (torch.randn(1, 128, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    result = simulate(q, k, k, ranks=4, strategy="ring", kv_transfer="float8", dout=q)
    for plan, forward, backward in zip(result.plans, result.forward_bytes, result.backward_bytes, strict=True):
        assert (sum(forward), sum(backward)) == sent_bytes(plan, Heads(4, 2, 64, float8=True))


@given(cases(), st.sampled_from(["ring", "all_gather"]))
@settings(max_examples=150, deadline=None)
def test_pairs_of_all_ranks_are_those_of_the_mask(case: tuple[int, int, AttentionMask, str], strategy: str) -> None:
    seq_len, ranks, mask, layout = case
    if mask.document_lengths and len(mask.document_lengths) > 1:
        used = mask.used_lengths and mask.used_lengths[:1]
        mask = AttentionMask(mask.causal, mask.window, mask.document_lengths[:1], used)
    plans = [
        make_plan(seq_len, mask=mask, ranks=ranks, rank=rank, strategy=strategy, layout=layout) for rank in range(ranks)
    ]
    assert sum(sum(step_pairs(plan)) for plan in plans) == mask_pairs(seq_len, mask)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])
def test_heads_and_pairs_of_all_ranks_make_up_the_attention(strategy: str) -> None:
    layers = [
        layer_of(make_plan(1024, ranks=4, rank=rank, strategy=strategy), Heads(8, 4, 16), rates(FAST))
        for rank in range(4)
    ]
    assert sum(layer.pairs for layer in layers) == 8 * 1024 * 1025 // 2


def test_slow_work_hides_the_rings_messages_but_the_last_gradients() -> None:
    cluster, plan = make_cluster("h100-80g"), make_plan(4096, ranks=4, strategy="ring")
    layer = layer_of(plan, Heads(8, 4, 64), rates(SLOW))
    last = plan.steps[-1]
    returned = max(sum(b - a for a, b in spans) for spans in (last.send, last.receive)) * 4 * 2 * 64 * 4
    assert layer.forward_exposed == 0
    assert layer.backward_exposed == pytest.approx(cluster.message_seconds(returned, 4, 1))


def test_a_ring_that_has_nothing_to_compute_waits_for_every_message() -> None:
    cluster, plan = make_cluster("h100-80g"), make_plan(4096, ranks=4, strategy="ring")
    layer = layer_of(plan, Heads(8, 4, 64), rates(FAST))
    rows = [max(sum(b - a for a, b in spans) for spans in (step.send, step.receive)) for step in plan.steps[1:]]
    expected = sum(cluster.message_seconds(count * 4 * 2 * 64 * 2, 4, 1) for count in rows)
    assert layer.forward_exposed == pytest.approx(expected, rel=1e-6)


def test_slow_work_hides_all_gathers_of_keys_but_the_first_groups_and_the_last_gradients() -> None:
    cluster, plan = make_cluster("h100-80g"), make_plan(4096, ranks=4, strategy="all_gather")
    slow, fast = (layer_of(plan, Heads(8, 4, 64), rates(rate)) for rate in (SLOW, FAST))
    row = 4 * 2 * 64 / HEAD_GROUPS
    gather, scatter = (cluster.collective_seconds(4096 * row * size, 4, 1) for size in (2, 4))
    assert (slow.forward_exposed, slow.backward_exposed) == pytest.approx((gather, gather + scatter))
    everything = HEAD_GROUPS * gather, HEAD_GROUPS * (gather + scatter)
    assert (fast.forward_exposed, fast.backward_exposed) == pytest.approx(everything, rel=1e-6)


def test_an_all_to_all_waits_for_its_messages_however_slow_the_work() -> None:
    plan = make_plan(4096, ranks=4, strategy="all_to_all")
    waits = [layer_of(plan, Heads(8, 4, 64), rates(rate)).forward_exposed for rate in (SLOW, FAST)]
    assert waits[0] == waits[1] > 0


def test_a_row_of_keys_and_values_costs_the_pairs_that_are_computed_while_it_travels() -> None:
    """32 query and 8 key heads of 128 in bf16 at 400 TFLOP/s: within a factor of two what a layout takes by default."""
    heads, device = Heads(32, 8, 128), make_cluster("h100-80g").accelerator
    within, across = rates(400e12).row_pairs(heads)
    seconds = within * 4 * 32 * 128 / 400e12  # products of a query with a key, and of its weight with a value
    sent = seconds * device.link_bandwidth
    assert 2 * 8 * 128 * 2 <= sent <= 2 * 2 * 8 * 128 * 2, "the bytes of a row, at less than the link's full rate"
    assert across / within == pytest.approx(device.link_bandwidth / device.network_bandwidth)
    for found, default in zip((within, across), ROW_PAIRS, strict=True):
        assert default / 2 < found < default * 2


def test_the_planner_has_formulas_for_every_exchange() -> None:
    assert set(STRATEGY_COSTS) == set(STRATEGIES)
