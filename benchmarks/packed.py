"""Packed documents on one-thread ranks, layouts in turn, against the ideal time for their mask.

The ideal is the mask's true area (allowed query-key pairs) at the rate of one process with two threads on a
single causal sequence of 8K tokens, forward and backward: no overhead, no imbalance, no messages.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.benchmark import Benchmark, Row
from benchmarks.plan import draw_lengths
from benchmarks.ranks import Run, seconds, start_ranks
from benchmarks.strategies import RANKS, inputs, one_process
from torchtitan_cp.attention import AttentionMask, ContextParallel
from torchtitan_cp.attention.collectives import Group, Message, Pending

PACKINGS = {"log-normal": 24, "5 % long": 40}
IDEAL_LENGTH = 8192


@dataclass
class SlowLink:
    """A link on which a rank's messages arrive one after the other, at so many bytes a second."""

    bytes_per_second: float
    post: Callable[..., Pending[Any]] = Group._post
    free_at: float = 0.0

    def install(self) -> None:
        """Have all messages of this process pass through it."""
        link = self

        def post(
            group: Group, sends: list[Message], receives: list[Message], finish: Callable[[], Any]
        ) -> Pending[Any]:
            pending = link.post(group, sends, receives, finish)
            received = sum(x.nbytes for _, x in receives)
            link.free_at = max(link.free_at, time.perf_counter()) + received / link.bytes_per_second
            if pending.works:
                pending.works = [*pending.works, Arrival(link.free_at)]  # type: ignore[list-item]
            return pending

        Group._post = post  # type: ignore[method-assign, assignment]


@dataclass
class Arrival:
    """Waits, as a message does, until a moment."""

    at: float

    def wait(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))


def on_ranks(
    strategy: str, layouts: Sequence[str], lengths: tuple[int, ...], kv_heads: int, gigabytes_per_second: float
) -> Run:
    """This rank's part under each layout, forward and backward: seconds of each, all ranks starting together."""
    Group._post = SlowLink.post  # type: ignore[method-assign]
    if gigabytes_per_second:
        SlowLink(gigabytes_per_second * 1e9).install()
    mesh, runs = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for layout in layouts:
        cp = ContextParallel(mesh, strategy, layout=layout)
        plan = cp.plan(sum(lengths), AttentionMask(document_lengths=(lengths,)))
        q, k, v, dout = (plan.shard(x) for x in inputs(sum(lengths), kv_heads, torch.float32))
        leaves = tuple(x.requires_grad_() for x in (q, k, v))
        runs.append(
            lambda cp=cp, plan=plan, leaves=leaves, dout=dout: torch.autograd.grad(
                cp.attention(*leaves, plan), leaves, dout
            )
        )

    def run() -> list[float]:
        times = []
        for one in runs:
            dist.barrier()
            times.append(seconds(one))
        return times

    return run


def measure(
    seq_len: int,
    kv_heads: int,
    ranks: list[int],
    strategies: list[str],
    layouts: list[str],
    gigabytes_per_second: list[float],
    rounds: int,
) -> Iterator[Row]:
    """fp32, H 8, D 64, causal, forward and backward; medians of rounds in turn, and of the fastest rounds.

    A link of so many GB/s delays the messages that a rank receives; 0 leaves them as fast as they are.
    """
    torch.set_num_threads(RANKS)
    ideal_length = min(IDEAL_LENGTH, seq_len)
    single = one_process(ideal_length, kv_heads, torch.float32)
    single()
    ideal_pairs = ideal_length * (ideal_length + 1) // 2
    for count in ranks:
        with start_ranks(count) as running:
            cases = itertools.product(PACKINGS.items(), strategies, gigabytes_per_second)
            for (kind, number), strategy, link in cases:
                lengths = draw_lengths(kind, seq_len, number, seed=1)
                running.make(on_ranks, strategy, layouts, lengths, kv_heads, link)
                area = sum(length * (length + 1) // 2 for length in lengths)
                ideals, measured = [], []
                for _ in range(rounds):
                    ideals.append(seconds(single) * area / ideal_pairs)
                    measured.append([max(times) for times in zip(*running.answer(), strict=True)])
                for layout, times in zip(layouts, zip(*measured, strict=True), strict=True):
                    yield {
                        "documents": f"{number} {kind}",
                        "longest": max(lengths),
                        "ranks": count,
                        "strategy": strategy,
                        "link_gb_per_s": link or "-",
                        "layout": layout,
                        "ideal_ms": statistics.median(ideals) * 1e3,
                        "ranks_ms": statistics.median(times) * 1e3,
                        "over_ideal": statistics.median(t / i for t, i in zip(times, ideals, strict=True)),
                        "over_ideal_of_fastest": min(times) / min(ideals),
                    }


BENCHMARK = Benchmark(
    measure,
    {
        "seq_len": 32768,
        "kv_heads": 2,
        "ranks": [2],
        "strategies": ["ring", "all_gather", "all_to_all"],
        "layouts": ["documents", "balanced", "zigzag", "contiguous"],
        "gigabytes_per_second": [0.0],
        "rounds": 5,
    },
    {"seq_len": 8192, "strategies": ["ring", "all_gather"], "layouts": ["documents", "balanced"], "rounds": 1},
)
