"""How much of a kernel's single-call rate the tiles of a plan reach.

The busiest rank's tiles of a ring, all-gather or hybrid plan run one after another on one device, forward
and backward, without a network; the single call is one full rectangle of the rank's own queries and as many
keys, by the same kernel and, where it is among them, by cuDNN's. Rates count the mask's true pairs.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.benchmark import Benchmark, Row
from benchmarks.plan import KINDS, draw_lengths
from torchtitan_cp.attention import AttentionMask, Plan, PlanError, make_plan
from torchtitan_cp.attention.kernels import KERNELS, Kernel, ScoreMod
from torchtitan_cp.attention.kernels.kernel import Case
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax
from torchtitan_cp.attention.plan import busiest_rank
from torchtitan_cp.attention.ring_cost import BACKWARD_FLOPS, FORWARD_FLOPS
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.attention.strategies.strategy import KeyBlock, add_gradients, add_outputs
from torchtitan_cp.attention.tiles import ALL_ROWS, FULL, Tile

Steps = list[tuple[int, tuple[Tile, ...]]]  # (rows of K and V, tiles)


def steps_of(plan: Plan) -> Steps:
    """What a rank computes, by step."""
    if STRATEGIES[plan.strategy].gathers_keys:
        return [(plan.sequence_length, plan.gathered_tiles)]
    return [(sum(stop - start for start, stop in step.receive), step.tiles) for step in plan.steps if step.tiles]


def pairs_of(steps: Steps) -> int:
    return sum(tile.pairs for _, tiles in steps for tile in tiles)


def timed(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Seconds of the fastest of some calls, after one to warm up; on a CPU those it was at work, on all its cores."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    best = float("inf")
    for number in range(rounds + 1):
        _wait(device)
        begun = clock()
        run()
        _wait(device)
        if number:
            best = min(best, clock() - begun)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def rates(
    steps: Steps,
    kernel: Kernel,
    queries: int,
    heads: tuple[int, int],
    dim: int,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
) -> tuple[float, float]:
    """FLOP/s of all steps, forward and backward."""
    rows = max(count for count, _ in steps)

    def draw(count: int, heads: int) -> Tensor:
        return torch.randn(1, count, heads, dim, device=device, dtype=dtype)

    q, dout, k, v = draw(queries, heads[0]), draw(queries, heads[0]), draw(rows, heads[1]), draw(rows, heads[1])
    merged: list[tuple[Tensor, Tensor]] = []

    def forward() -> None:
        softmax = RunningSoftmax(q, dim)
        for count, tiles in steps:
            add_outputs(softmax, q, KeyBlock(k[:, :count], v[:, :count], tiles, ScoreMod(dim**-0.5)), kernel)
        merged[:] = [softmax.result()]

    def backward() -> None:
        out, lse = merged[0]
        dq = GradientSum(q)
        for count, tiles in steps:
            block = KeyBlock(k[:, :count], v[:, :count], tiles, ScoreMod(dim**-0.5))
            add_gradients((dq, GradientSum(block.k), GradientSum(block.v)), (dout, q, out, lse), block, kernel)

    work = pairs_of(steps) * heads[0] * dim
    forward_seconds = timed(forward, device, rounds)
    return work * FORWARD_FLOPS / forward_seconds, work * BACKWARD_FLOPS / timed(backward, device, rounds)


def plans_to_run(
    lengths: list[int], ranks: list[int], masks: list[str], strategies: list[str]
) -> Iterator[tuple[str, str, int, Plan]]:
    """(name of mask, strategy, ranks, plan of the busiest rank) of each combination."""
    for seq_len in lengths:
        for count in ranks:
            for name in masks:
                mask = AttentionMask()
                if name != "causal":
                    mask = AttentionMask(document_lengths=(draw_lengths(name, seq_len, max(8, seq_len // 4096), 1),))
                for strategy in strategies:
                    all_to_all_ranks = min(8, count) if strategy == "hybrid" else 1
                    if all_to_all_ranks == count > 1:
                        continue
                    plan = partial(
                        make_plan, seq_len, mask=mask, ranks=count, strategy=strategy, all_to_all_ranks=all_to_all_ranks
                    )
                    yield name, strategy, count, plan(rank=busiest_rank(plan()))


def measure(
    device: str,
    kernels: list[str],
    lengths: list[int],
    ranks: list[int],
    masks: list[str],
    strategies: list[str],
    heads: list[int],
    dim: int,
    dtype: str,
    rounds: int,
) -> Iterator[Row]:
    """FLOP/s of each (on a CPU: a second of one core), and its share of the single call's.

    heads: of queries, of keys; lengths: full sequences. Name cudnn first to have
    each kernel's share of cuDNN's single call.
    """
    on, of_type = torch.device(device), getattr(torch, dtype)
    for name in kernels:
        if (why := KERNELS[name].refusal(Case(on.type, of_type, dim, dim))) is not None:
            raise PlanError(f"kernel {name} cannot run here: {why}", fix="choose with --kernels, --dtype and --device")
    single = {}
    for mask, strategy, count, plan in plans_to_run(lengths, ranks, masks, strategies):
        all_to_all_ranks = plan.all_to_all_ranks
        own = max(1, heads[0] // all_to_all_ranks), max(1, heads[1] // all_to_all_ranks)
        queries, steps = plan.local_tokens * all_to_all_ranks, steps_of(plan)
        for name in kernels:
            key = (name, queries, own)
            if key not in single:
                whole: Steps = [(queries, (Tile(ALL_ROWS, 0, queries, 0, queries, FULL),))]
                single[key] = rates(whole, KERNELS[name], queries, own, dim, on, of_type, rounds)
            reached = rates(steps, KERNELS[name], queries, own, dim, on, of_type, rounds)
            names = {"tokens": plan.sequence_length, "ranks": count, "mask": mask, "strategy": strategy, "kernel": name}
            row = names | {
                "tiles": sum(len(tiles) for _, tiles in steps),
                "forward_tflops": reached[0] / 1e12,
                "forward_share": reached[0] / single[key][0],
                "backward_tflops": reached[1] / 1e12,
                "backward_share": reached[1] / single[key][1],
            }
            if cudnn := single.get(("cudnn", queries, own)):
                row |= {"forward_of_cudnn": reached[0] / cudnn[0], "backward_of_cudnn": reached[1] / cudnn[1]}
            yield row


CUDA = torch.cuda.is_available()
BENCHMARK = Benchmark(
    measure,
    {
        "device": "cuda" if CUDA else "cpu",
        "kernels": ["flash", "cudnn", "flex"] if CUDA else ["cpu"],
        "lengths": [65536, 262144, 1048576],
        "ranks": [8, 64],
        "masks": ["causal"],
        "strategies": ["ring", "all_gather", "hybrid"],
        "heads": [32, 8],
        "dim": 128,
        "dtype": "bfloat16",
        "rounds": 3,
    },
    {"lengths": [16384], "ranks": [16], "heads": [2, 1], "dim": 64, "rounds": 1, "dtype": "float32"},
    {"kernels": list(KERNELS), "masks": ["causal", *KINDS], "strategies": ["ring", "all_gather", "hybrid"]},
)
