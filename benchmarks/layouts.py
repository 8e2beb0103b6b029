"""Keys sent and imbalance of each layout of packed documents, counted from the plans: nothing runs."""

import statistics
import time
from collections.abc import Iterator

from benchmarks.benchmark import Benchmark, Row
from benchmarks.plan import draw_lengths
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.attention.layout import cut_by_document, rows_sent
from torchtitan_cp.attention.layouts import LAYOUTS, make_layout
from torchtitan_cp.attention.mask import count_rows

K = 1024
# (kind, tokens, ranks, documents, tokens of the longest)
CASES = (
    ("log-normal", 128 * K, 8, 75, 26 * K),
    ("log-normal", 128 * K, 8, 18, 54 * K),
    ("log-normal", 1024 * K, 16, 580, 41 * K),
    ("log-normal", 1024 * K, 16, 108, 124 * K),
    ("log-normal", 1024 * K, 64, 527, 41 * K),
    ("log-normal", 1024 * K, 64, 158, 178 * K),
    ("5 % long", 128 * K, 8, 75, 0),
    ("5 % long", 512 * K, 16, 300, 0),
    ("5 % long", 1024 * K, 64, 527, 0),
)
DRAWS, RANKS_PER_NODE = 400, 8


def find_lengths(kind: str, tokens: int, documents: int, longest: int, draw: int) -> tuple[int, ...]:
    """Of `DRAWS` packings, the one whose longest document is nearest to `longest`, shuffled by another seed."""
    seeds = range(draw * DRAWS, (draw + 1) * DRAWS) if longest else [draw]
    packings = (draw_lengths(kind, tokens, documents, seed) for seed in seeds)
    return min(packings, key=lambda lengths: abs(max(lengths) - longest))


def measure(draws: int, layouts: list[str]) -> Iterator[Row]:
    """Per rank of a ring, on average: rows of keys sent over its own; the busiest rank's pairs over the mean.

    Nodes are of 8 ranks. Medians of the packings drawn; planning is of one rank's plan, from nothing.
    """
    for kind, tokens, ranks, documents, longest in CASES:
        packings = [find_lengths(kind, tokens, documents, longest, draw) for draw in range(draws)]
        for layout in layouts:
            found = [count(tokens, ranks, AttentionMask(document_lengths=(lengths,)), layout) for lengths in packings]
            sent, across, imbalance, cuts, milliseconds = (
                statistics.median(column) for column in zip(*found, strict=True)
            )
            yield {
                "documents": f"{documents} {kind}",
                "tokens": tokens,
                "ranks": ranks,
                "longest": int(statistics.median(map(max, packings))),
                "layout": layout,
                "keys_sent": sent,
                "to_other_nodes": across,
                "imbalance": imbalance,
                "cuts_per_rank": cuts,
                "planning_ms": milliseconds,
            }


def count(tokens: int, ranks: int, mask: AttentionMask, layout: str) -> tuple[float, ...]:
    """Keys sent, those to other nodes, imbalance, cuts of documents a rank, milliseconds of planning."""
    make_layout.cache_clear()
    cut_by_document.cache_clear()
    begun = time.perf_counter()
    plan = make_plan(tokens, mask=mask, ranks=ranks, rank=ranks // 2, layout=layout, strategy="ring")
    assert plan.steps
    milliseconds = (time.perf_counter() - begun) * 1e3
    plans = [
        make_plan(tokens, mask=mask, ranks=ranks, rank=rank, layout=layout, strategy="ring") for rank in range(ranks)
    ]
    sent = sum(count_rows(step.send) for each in plans for step in each.steps[1:])
    across = sum(rows_sent(plan.layout, mask, tokens, RANKS_PER_NODE)[1])
    cuts = sum(len(segments) - 1 for segments in cut_by_document(plan.layout, mask.documents(tokens)[0]))
    return (
        sent / tokens,
        across / tokens,
        max(plan.pairs_by_rank) * ranks / sum(plan.pairs_by_rank),
        cuts / ranks,
        milliseconds,
    )


BENCHMARK = Benchmark(
    measure,
    {"draws": 5, "layouts": ["documents", "balanced", "zigzag", "contiguous"]},
    {"draws": 1, "layouts": ["documents"]},
    {"layouts": list(LAYOUTS)},
)
