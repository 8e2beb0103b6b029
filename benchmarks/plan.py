"""Time to work out one rank's plan, from nothing, and flash's calls for it in a layer and direction."""

import itertools
import random
import statistics
import time
from collections.abc import Iterator

from benchmarks.benchmark import Benchmark, Row
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.attention.kernels import KERNELS
from torchtitan_cp.attention.layout import cut_by_document
from torchtitan_cp.attention.layouts import make_layout

KINDS = ("uniform cuts", "log-normal", "5 % long", "one long")


def draw_lengths(kind: str, total: int, documents: int, seed: int) -> tuple[int, ...]:
    """Document lengths that sum to `total`."""
    generator = random.Random(seed)
    weights = {
        "uniform cuts": [generator.expovariate(1) for _ in range(documents)],
        "log-normal": [generator.lognormvariate(0, 1.5) for _ in range(documents)],
        "5 % long": [20.0 if number % 20 == 0 else 1.0 for number in range(documents)],
        "one long": [1e6 if number == documents // 2 else 1.0 for number in range(documents)],
    }[kind]
    scale = (total - documents) / sum(weights)
    lengths = [1 + int(weight * scale) for weight in weights]
    lengths[0] += total - sum(lengths)
    return tuple(lengths)


def measure(seq_len: int, ranks: int, documents: int, kinds: list[str], rounds: int) -> Iterator[Row]:
    """Median and slowest of as many plans as rounds, each of another packing and rank.

    calls: mean of the plans, each call is merged once; a step of the ring has most_calls_a_step at most, and all_gather
    makes its calls for each group of heads. tiles: the same where each tile is a call.
    """
    flash = KERNELS["flash"]
    for kind, layout, strategy in itertools.product(kinds, ("documents", "balanced", "zigzag"), ("ring", "all_gather")):
        times, tiles, calls = [], [], []
        for number in range(rounds):
            mask = AttentionMask(document_lengths=(draw_lengths(kind, seq_len, documents, number),))
            make_layout.cache_clear()
            cut_by_document.cache_clear()
            begun = time.perf_counter()
            rank = number * 7 % ranks
            plan = make_plan(seq_len, mask=mask, ranks=ranks, rank=rank, layout=layout, strategy=strategy)
            assert plan.steps if strategy == "ring" else plan.gathered_tiles
            times.append((time.perf_counter() - begun) * 1e3)
            steps = [step.tiles for step in plan.steps] if strategy == "ring" else [plan.gathered_tiles]
            tiles.append([len(flash.plain_tiles(step)) for step in steps])
            calls.append([len(flash.calls(step)) for step in steps])
        names = {"documents": kind, "layout": layout, "strategy": strategy}
        yield names | {
            "median_ms": statistics.median(times),
            "slowest_ms": max(times),
            "tiles": statistics.mean(map(sum, tiles)),
            "most_tiles_a_step": max(map(max, tiles)),
            "calls": statistics.mean(map(sum, calls)),
            "most_calls_a_step": max(map(max, calls)),
        }


BENCHMARK = Benchmark(
    measure,
    {"seq_len": 1 << 20, "ranks": 64, "documents": 200, "kinds": list(KINDS), "rounds": 15},
    {"kinds": ["log-normal"], "rounds": 5},
    {"kinds": KINDS},
)
