"""Work of the busiest rank, told by its layout, beside the plans of all ranks."""

import pytest

from benchmarks.scale import draw_mask, figures, mask_pairs
from torchtitan_cp.attention import make_plan
from torchtitan_cp.attention.plan import busiest_rank
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.strategy_costs import Heads, Rates, step_pairs


@pytest.mark.parametrize("strategy", ["ring", "hybrid"])
@pytest.mark.parametrize("kind", ["causal", "packed"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_the_busiest_rank_told_by_the_layout_has_the_most_pairs_of_all_plans(
    strategy: str, kind: str, layout: str
) -> None:
    mask, inner = draw_mask(kind, 4096, 300), 2 if strategy == "hybrid" else 1
    plans = [
        make_plan(4096, mask=mask, ranks=8, rank=rank, strategy=strategy, layout=layout, all_to_all_ranks=inner)
        for rank in range(8)
    ]
    pairs = [sum(step_pairs(plan)) for plan in plans]
    assert pairs[busiest_rank(plans[0])] == max(pairs)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all", "hybrid"])
@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_work_over_the_mean_is_that_of_all_ranks_plans(strategy: str, kind: str) -> None:
    mask, ranks, heads = draw_mask(kind, 8192, 400), 16, Heads(8, 4, 64)
    rates = Rates(make_cluster("h100-80g", 4, ranks_per_node=4), 1e9, 1e9, 1)
    row = figures(strategy, 8192, ranks, mask, heads, rates)
    inner = {"all_to_all": ranks, "hybrid": 4}.get(strategy, 1)
    cluster = {"ranks": ranks, "ranks_per_node": 4, "row_pairs": rates.row_pairs(heads)}
    plans = [
        make_plan(8192, mask=mask, rank=rank, strategy=strategy, all_to_all_ranks=inner, **cluster)
        for rank in range(ranks)
    ]
    shares = {1: 8, 4: 2, 16: 1}  # query heads of a rank: 16 ranks share 8, so that half of them have only zeros
    work = [sum(step_pairs(plan)) * shares[inner] for plan in plans]
    assert row["over_mean_work"] == pytest.approx(max(work) / (mask_pairs(8192, mask) * 8 / ranks))
    # At a gigaflop a second nothing but the work takes time.
    assert row["ms"] * (1 - row["exposed_share"]) == pytest.approx(max(work) * 14 * 64 / 1e9 * 1e3)
