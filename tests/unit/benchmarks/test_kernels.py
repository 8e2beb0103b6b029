"""Which tiles the benchmark of kernels runs."""

from benchmarks.kernels import pairs_of, plans_to_run, steps_of
from torchtitan_cp.attention import make_plan
from torchtitan_cp.planner.strategy_costs import step_pairs


def test_the_kernel_benchmark_runs_the_tiles_of_the_busiest_rank() -> None:
    found = list(plans_to_run([4096], [8], ["causal", "log-normal"], ["ring", "all_gather", "hybrid"]))
    assert [(mask, strategy) for mask, strategy, _, _ in found] == [
        ("causal", "ring"), ("causal", "all_gather"), ("log-normal", "ring"), ("log-normal", "all_gather"),
    ]  # fmt: skip
    for _, strategy, ranks, plan in found:
        others = [make_plan(4096, mask=plan.mask, ranks=ranks, rank=rank, strategy=strategy) for rank in range(ranks)]
        assert pairs_of(steps_of(plan)) == max(sum(step_pairs(other)) for other in others)
