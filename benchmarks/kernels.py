"""How much of a kernel's single-call rate the tiles of a plan reach: `python -m benchmarks.kernels`.

The busiest rank's tiles of a ring, all-gather or hybrid plan run one after another on one device, forward
and backward, without a network; the single call is one full rectangle of the rank's own queries and as many
keys, by the same kernel. Rates count the mask's true pairs.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.plan import draw_lengths
from torchtitan_cp.attention import AttentionMask, Plan, PlanError, make_plan
from torchtitan_cp.attention.kernels import KERNELS, Kernel
from torchtitan_cp.attention.kernels.kernel import Case
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax
from torchtitan_cp.attention.strategies.local import add_gradients, add_outputs
from torchtitan_cp.attention.tiles import ALL_ROWS, FULL, Tile

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # per pair, query head and dim: two products forward, five backward
Steps = list[tuple[int, tuple[Tile, ...]]]  # (rows of K and V, tiles)


def steps_of(plan: Plan) -> Steps:
    """What a rank computes, by step."""
    if plan.strategy == "all_gather":
        return [(plan.sequence_length, plan.gathered_tiles)]
    return [(sum(stop - start for start, stop in step.receive), step.tiles) for step in plan.steps if step.tiles]


def pairs_of(steps: Steps) -> int:
    return sum(tile.pairs for _, tiles in steps for tile in tiles)


def timed(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Seconds of the fastest of some calls, after one to warm up."""
    best = float("inf")
    for number in range(rounds + 1):
        _wait(device)
        begun = time.perf_counter()
        run()
        _wait(device)
        if number:
            best = min(best, time.perf_counter() - begun)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def rates(
    steps: Steps, kernel: Kernel, queries: int, heads: tuple[int, int], dim: int, device: torch.device, rounds: int
) -> tuple[float, float]:
    """FLOP/s of all steps, forward and backward."""
    dtype = torch.bfloat16
    rows = max(count for count, _ in steps)

    def draw(count: int, heads: int) -> Tensor:
        return torch.randn(1, count, heads, dim, device=device, dtype=dtype)

    q, dout, k, v = draw(queries, heads[0]), draw(queries, heads[0]), draw(rows, heads[1]), draw(rows, heads[1])
    merged: list[tuple[Tensor, Tensor]] = []

    def forward() -> None:
        softmax = RunningSoftmax(tuple(q.shape), dtype, device)
        for count, tiles in steps:
            add_outputs(softmax, tiles, q, k[:, :count], v[:, :count], kernel, dim**-0.5)
        merged[:] = [softmax.result()]

    def backward() -> None:
        out, lse = merged[0]
        dq = GradientSum(tuple(q.shape), dtype, device)
        for count, tiles in steps:
            dk, dv = (GradientSum((1, count, heads[1], dim), dtype, device) for _ in range(2))
            residuals = (dout, q, out, lse)
            add_gradients((dq, dk, dv), tiles, k[:, :count], v[:, :count], residuals, kernel, dim**-0.5)

    work = pairs_of(steps) * heads[0] * dim
    forward_seconds = timed(forward, device, rounds)
    return work * FORWARD_FLOPS / forward_seconds, work * BACKWARD_FLOPS / timed(backward, device, rounds)


def plans_to_run(lengths: list[int], ranks: list[int], masks: list[str], strategies: list[str]) -> Any:
    """(name of mask, strategy, ranks, plan of the busiest rank) of each combination."""
    for seq_len in lengths:
        for count in ranks:
            for name in masks:
                mask = AttentionMask()
                if name != "causal":
                    mask = AttentionMask(document_lengths=(draw_lengths(name, seq_len, max(8, seq_len // 4096), 1),))
                for strategy in strategies:
                    inner = min(8, count) if strategy == "hybrid" else 1
                    if inner == count > 1:
                        continue
                    plans = [
                        make_plan(seq_len, mask=mask, ranks=count, rank=rank, strategy=strategy, all_to_all_ranks=inner)
                        for rank in range(count)
                    ]
                    yield name, strategy, count, max(plans, key=lambda plan: pairs_of(steps_of(plan)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", nargs="+", default=["flash", "cudnn", "flex"], choices=KERNELS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 262144, 1048576], help="full sequences")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--masks", nargs="+", default=["causal"], help="causal, log-normal, '5 %% long'")
    parser.add_argument("--strategies", nargs="+", default=["ring", "all_gather", "hybrid"])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="of queries, of keys")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    versions = {"device": name, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    print(f"{versions}, H {options.heads[0]}/{options.heads[1]}, D {options.dim}, bf16\n")
    print(
        "| tokens | ranks | mask | strategy | kernel | tiles | forward, TFLOP/s | share | backward, TFLOP/s | share |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows, single = [], {}
    for mask, strategy, count, plan in plans_to_run(options.lengths, options.ranks, options.masks, options.strategies):
        inner = plan.all_to_all_ranks
        heads, queries = (
            (max(1, options.heads[0] // inner), max(1, options.heads[1] // inner)),
            plan.local_tokens * inner,
        )
        for kernel_name in options.kernels:
            kernel = KERNELS[kernel_name]
            if (why := kernel.refusal(Case(device.type, torch.bfloat16, options.dim, options.dim))) is not None:
                raise PlanError(
                    f"kernel {kernel_name} cannot run here: {why}", fix="choose with --kernels and --device"
                )
            key = (kernel_name, queries, heads)
            if key not in single:
                whole: Steps = [(queries, (Tile(ALL_ROWS, 0, queries, 0, queries, FULL),))]
                single[key] = rates(whole, kernel, queries, heads, options.dim, device, options.rounds)
            steps = steps_of(plan)
            reached = rates(steps, kernel, queries, heads, options.dim, device, options.rounds)
            shares = [rate / alone for rate, alone in zip(reached, single[key], strict=True)]
            tiles = sum(len(tiles) for _, tiles in steps)
            rows.append(
                {
                    "tokens": plan.sequence_length,
                    "ranks": count,
                    "mask": mask,
                    "strategy": strategy,
                    "kernel": kernel_name,
                }
                | {"tiles": tiles, "forward_flops": reached[0], "backward_flops": reached[1]}
                | {"forward_share": shares[0], "backward_share": shares[1]}
            )
            print(
                f"| {plan.sequence_length} | {count} | {mask} | {strategy} | {kernel_name} | {tiles} | "
                f"{reached[0] / 1e12:.3g} | {shares[0]:.0%} | {reached[1] / 1e12:.3g} | {shares[1]:.0%} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
