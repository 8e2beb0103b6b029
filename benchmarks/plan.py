"""Time to work out one rank's plan, from nothing: `python -m benchmarks.plan`."""

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

import torch

from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.attention.layout import make_layout


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=1 << 20)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()

    print(f"torch {torch.__version__}, {platform.machine()}; {options.seq_len:,} tokens, {options.ranks} ranks,")
    print(f"{options.documents} documents; median and slowest of {options.rounds} plans of other packings and ranks\n")
    print("| documents | layout | strategy | median, ms | slowest, ms |\n|---|---|---|---|---|")
    rows = []
    for kind in ("uniform cuts", "log-normal", "5 % long", "one long"):
        for layout in ("balanced", "zigzag"):
            for strategy in ("ring", "all_gather"):
                times = []
                for number in range(options.rounds):
                    mask = AttentionMask(
                        document_lengths=(draw_lengths(kind, options.seq_len, options.documents, number),)
                    )
                    make_layout.cache_clear()
                    begun = time.perf_counter()
                    rank = number * 7 % options.ranks
                    plan = make_plan(
                        options.seq_len, mask=mask, ranks=options.ranks, rank=rank, layout=layout, strategy=strategy
                    )
                    assert plan.steps if strategy == "ring" else plan.gathered_tiles
                    times.append((time.perf_counter() - begun) * 1e3)
                rows.append((kind, layout, strategy, statistics.median(times), max(times)))
                print("| {} | {} | {} | {:.1f} | {:.1f} |".format(*rows[-1]), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps(
                [
                    dict(zip(("documents", "layout", "strategy", "median_ms", "slowest_ms"), row, strict=True))
                    for row in rows
                ],
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
