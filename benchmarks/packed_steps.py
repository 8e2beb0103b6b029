"""Predicted step time of a model on packed documents, by layout and strategy, on a cluster (nothing runs)."""

import dataclasses
import itertools
from collections.abc import Iterator

from benchmarks.benchmark import Benchmark, Row
from benchmarks.budget import config_of
from benchmarks.plan import draw_lengths
from models import ARCHITECTURES
from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.attention.layouts import LAYOUTS
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.training.registry import register

MIXTURES = {
    "log-normal, mean 2K": ("log-normal", 2048),
    "log-normal, mean 8K": ("log-normal", 8192),
    "5 % long, mean 2K": ("5 % long", 2048),
}


def measure(flavor: str, lengths: list[int], nodes: int, strategies: list[str], layouts: list[str]) -> Iterator[Row]:
    """On nodes of 8 H100, one sequence over all ranks; cp_wait_ms is of messages that compute does not hide."""
    register(ARCHITECTURES)
    cluster = make_cluster("h100-80g", nodes)
    for seq_len, (name, (kind, mean)), strategy in itertools.product(lengths, MIXTURES.items(), strategies):
        mask = AttentionMask(document_lengths=(draw_lengths(kind, seq_len, seq_len // mean, seed=1),))
        for layout in layouts:
            keys = {
                "model.flavor": flavor,
                "curriculum.stages[0].seq_len": seq_len,
                "curriculum.stages[0].global_batch_tokens": seq_len,
                "curriculum.stages[0].cp": cluster.ranks,
                "context_parallel.layout": layout,
                "context_parallel.strategy": strategy,
                "context_parallel.all_to_all_ranks": 8 if strategy == "hybrid" else 1,
                "activation.checkpoint": "full",
                "data.document_mask": "true",
            }
            (plain,) = plan_config(config_of([f"--{key}={value}" for key, value in keys.items()]), cluster)
            packed = dataclasses.replace(plain, mask=mask)
            yield {
                "tokens": seq_len,
                "documents": name,
                "longest": max(mask.document_lengths[0]) if mask.document_lengths else 0,
                "strategy": strategy,
                "layout": layout,
                "step_ms": packed.step_seconds * 1e3,
                "cp_wait_ms": packed.seconds["context-parallel messages"] * 1e3,
            }


BENCHMARK = Benchmark(
    measure,
    {
        "flavor": "8B",
        "lengths": [1 << 17, 1 << 20],
        "nodes": 8,
        "strategies": ["ring", "hybrid"],
        "layouts": ["balanced", "documents"],
    },
    {"lengths": [1 << 17], "strategies": ["ring"]},
    {"layouts": list(LAYOUTS)},
)
