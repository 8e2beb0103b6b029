"""Packed documents on two one-thread ranks against the ideal time for their mask.

The ideal is the mask's true area (allowed query-key pairs) at the rate of one process with two threads on a
single causal sequence of 8K tokens, forward and backward: no overhead, no imbalance, no messages.
"""

import itertools
import statistics
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.benchmark import Benchmark, Row
from benchmarks.plan import draw_lengths
from benchmarks.ranks import Ranks, Run, seconds, start_ranks
from benchmarks.strategies import RANKS, inputs, one_process
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


def time_both(ranks: Ranks, single: Run, area: int, rounds: int) -> tuple[float, float, float]:
    """(ideal, measured) milliseconds of the fastest rounds, and the median of the rounds' own ratios."""
    ideal_pairs = IDEAL_LENGTH * (IDEAL_LENGTH + 1) // 2
    pairs = [(seconds(single) * area / ideal_pairs, ranks.time()) for _ in range(rounds)]
    ideal, measured = (min(pair[side] for pair in pairs) * 1e3 for side in (0, 1))
    return ideal, measured, statistics.median(measured / ideal for ideal, measured in pairs)


def measure(seq_len: int, kv_heads: int, strategies: list[str], layouts: list[str], rounds: int) -> Iterator[Row]:
    """fp32, H 8, D 64, causal, forward and backward; medians of rounds in turn, and of the fastest rounds."""
    torch.set_num_threads(RANKS)
    single = one_process(IDEAL_LENGTH, kv_heads, torch.float32)
    single()
    with start_ranks(RANKS) as ranks:
        for (kind, count), strategy, layout in itertools.product(PACKINGS.items(), strategies, layouts):
            lengths = draw_lengths(kind, seq_len, count, seed=1)
            ranks.make(on_ranks, strategy, layout, lengths, kv_heads)
            area = sum(length * (length + 1) // 2 for length in lengths)
            ideal, measured, ratio = time_both(ranks, single, area, rounds)
            names = {"documents": f"{count} {kind}", "longest": max(lengths), "strategy": strategy, "layout": layout}
            times = {"ideal_ms": ideal, "ranks_ms": measured}
            yield names | times | {"over_ideal": ratio, "over_ideal_of_fastest": measured / ideal}


BENCHMARK = Benchmark(
    measure,
    {
        "seq_len": 32768,
        "kv_heads": 2,
        "strategies": ["ring", "all_gather", "all_to_all"],
        "layouts": ["balanced", "zigzag"],
        "rounds": 5,
    },
    {"seq_len": 8192, "strategies": ["ring", "all_gather"], "layouts": ["balanced"], "rounds": 1},
)
