"""Packed documents on two one-thread ranks against the ideal time for their mask: `python -m benchmarks.packed`.

The ideal is the mask's true area (allowed query-key pairs) at the rate of one process with two threads on a
single causal sequence of 8K tokens, forward and backward: no overhead, no imbalance, no messages.
"""

import argparse
import json
import platform
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.plan import draw_lengths
from benchmarks.ranks import Ranks, Run, seconds, start_ranks
from benchmarks.strategies import HEAD_DIM, HEADS, RANKS, inputs, one_process
from torchtitan_cp.attention import AttentionMask, ContextParallel

PACKINGS = {"log-normal": 24, "5 % long": 40}
IDEAL_LENGTH = 8192


def on_ranks(strategy: str, layout: str, lengths: tuple[int, ...], kv_heads: int) -> Run:
    """This rank's part, forward and backward."""
    cp = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), strategy, layout=layout)
    plan = cp.plan(sum(lengths), AttentionMask(document_lengths=(lengths,)))
    q, k, v, dout = (plan.shard(x) for x in inputs(sum(lengths), kv_heads, torch.float32))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    return lambda: torch.autograd.grad(cp.attention(q, k, v, plan), (q, k, v), dout)


def measure(ranks: Ranks, single: Run, area: int, rounds: int) -> tuple[float, float, float]:
    """(ideal, measured) milliseconds of the fastest rounds, and the median of the rounds' own ratios."""
    ideal_pairs = IDEAL_LENGTH * (IDEAL_LENGTH + 1) // 2
    pairs = [(seconds(single) * area / ideal_pairs, ranks.time()) for _ in range(rounds)]
    ideal, measured = (min(pair[side] for pair in pairs) * 1e3 for side in (0, 1))
    return ideal, measured, statistics.median(measured / ideal for ideal, measured in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--kv-heads", type=int, default=2, help=f"of {HEADS} query heads")
    parser.add_argument("--strategies", nargs="+", default=["ring", "all_gather", "all_to_all"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(RANKS)

    print(f"torch {torch.__version__}, {platform.machine()}, {options.seq_len} tokens, H {HEADS}/{options.kv_heads},")
    print(f"D {HEAD_DIM}, fp32, causal, forward + backward on {RANKS} ranks; median of {options.rounds} rounds\n")
    print("| documents | longest | strategy | layout | ideal, ms | 2 ranks, ms | time over ideal | of the fastest |")
    print("|---|---|---|---|---|---|---|---|")
    single = one_process(IDEAL_LENGTH, options.kv_heads, torch.float32)
    single()
    rows = []
    with start_ranks(RANKS) as ranks:
        for kind, count in PACKINGS.items():
            lengths = draw_lengths(kind, options.seq_len, count, seed=1)
            area = sum(length * (length + 1) // 2 for length in lengths)
            for strategy in options.strategies:
                for layout in ("balanced", "zigzag"):
                    ranks.make(on_ranks, strategy, layout, lengths, options.kv_heads)
                    ideal, measured, ratio = measure(ranks, single, area, options.rounds)
                    row = {
                        "documents": f"{count} {kind}",
                        "longest": max(lengths),
                        "strategy": strategy,
                        "layout": layout,
                        "ideal_ms": ideal,
                        "ranks_ms": measured,
                        "over_ideal": ratio,
                        "over_ideal_of_fastest": measured / ideal,
                    }
                    rows.append(row)
                    print(
                        f"| {count} {kind} | {max(lengths)} | {strategy} | {layout} | {ideal:.0f} | {measured:.0f} | "
                        f"{ratio:.2f} | {measured / ideal:.2f} |",
                        flush=True,
                    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
