"""Peak memory of an attention, forward and backward, at CP 1, 2 and 4.

On a CPU: the growth of the process's largest resident size, counted from a reset after freed memory was
given back. It holds what the attention makes, and not the q, k, v and dout that it is given.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.benchmark import Benchmark, Row
from benchmarks.ranks import Run, start_ranks
from benchmarks.strategies import HEAD_DIM, HEADS
from torchtitan_cp.attention import ContextParallel
from torchtitan_cp.runtime.device import find_device


def on_ranks(strategy: str, seq_len: int, kv_heads: int) -> Run:
    """A run that answers with the bytes its forward, and its forward and backward, took at most."""
    ranks = dist.get_world_size()
    cp = ContextParallel(init_device_mesh("cpu", (ranks,)), strategy)
    plan, device = cp.plan(seq_len), find_device()
    counts = (HEADS, kv_heads, kv_heads, HEADS)
    q, k, v, dout = (torch.randn(1, seq_len // ranks, heads, HEAD_DIM) for heads in counts)
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def run() -> tuple[int, int]:
        device.reset_peak_memory()
        before = device.peak_memory_bytes()
        out = cp.attention(q, k, v, plan)
        forward = device.peak_memory_bytes() - before
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        del gradients
        return forward, device.peak_memory_bytes() - before

    return run


def measure(seq_len: int, kv_heads: int, ranks: list[int], strategies: list[str]) -> Iterator[Row]:
    """fp32, H 8, D 64, causal; MiB of the rank with most, beyond the q, k, v, dout it is given."""
    for count in ranks:
        with start_ranks(count) as group:
            for strategy in strategies if count > 1 else strategies[:1]:
                group.make(on_ranks, strategy, seq_len, kv_heads)
                answers = group.answer()
                forward, both = (max(answer[which] for answer in answers) / 2**20 for which in (0, 1))
                given = seq_len // count * 2 * (HEADS + kv_heads) * HEAD_DIM * 4 / 2**20
                names = {"cp": count, "strategy": strategy, "given_mib": given}
                yield names | {"forward_mib": forward, "forward_and_backward_mib": both}


BENCHMARK = Benchmark(
    measure,
    {"seq_len": 32768, "kv_heads": 2, "ranks": [1, 2, 4], "strategies": ["ring", "all_gather", "all_to_all"]},
    {"seq_len": 4096, "ranks": [1, 2]},
)
