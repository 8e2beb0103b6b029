"""Ring attention on two one-thread ranks against one process with two threads: `python -m benchmarks.ring`.

Both sides run in turn on the same two cores, so that a noisy machine slows both; the ratio is what counts.
"""

import argparse
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from torchtitan_cp.attention import ContextParallel

RANKS = 2
HEADS, HEAD_DIM = 8, 64


def inputs(seq_len: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout, `[1, S, H, D]`."""
    torch.manual_seed(0)
    return [torch.randn(1, seq_len, heads, HEAD_DIM, dtype=dtype) for heads in (HEADS, kv_heads, kv_heads, HEADS)]


def seconds(run: Callable[[], None]) -> float:
    """Wall time of one forward and backward."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def one_process(seq_len: int, kv_heads: int, dtype: torch.dtype) -> Callable[[], None]:
    """SDPA over the whole sequence, forward and backward."""
    q, k, v, dout = (x.transpose(1, 2) for x in inputs(seq_len, kv_heads, dtype))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != HEADS)
        torch.autograd.grad(out, (q, k, v), dout)

    return run


def ring(seq_len: int, kv_heads: int, dtype: torch.dtype) -> Callable[[], None]:
    """This rank's part of the same work."""
    cp = ContextParallel(init_device_mesh("cpu", (RANKS,)), strategy="ring")
    plan = cp.plan(seq_len)
    q, k, v, dout = (plan.shard(x) for x in inputs(seq_len, kv_heads, dtype))
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def run() -> None:
        dist.barrier()
        torch.autograd.grad(cp.attention(q, k, v, plan), (q, k, v), dout)

    return run


def serve(rank: int, store: str, pipe: Connection) -> None:
    """A rank: make what it is told to, and time it as often as asked."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    run: Callable[[], None] | None = None
    while True:
        case = pipe.recv()
        if case == "stop":
            return
        if case == "time":
            assert run is not None
            pipe.send(seconds(run))
        else:
            run = ring(*case)
            run()
            pipe.send(0.0)


def ask(pipes: list[Connection], what: Any) -> float:
    """Tell every rank, and return the slowest one's seconds."""
    for pipe in pipes:
        pipe.send(what)
    return max(pipe.recv() for pipe in pipes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="sequence lengths, in tokens")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 2], help=f"of {HEADS} query heads")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each side, in turn")
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    store = tempfile.mktemp()
    pipes, processes = [], []
    for rank in range(RANKS):
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(rank, store, there), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    torch.set_num_threads(RANKS)

    print(f"torch {torch.__version__}, {platform.machine()}, H {HEADS}, D {HEAD_DIM}, B 1, causal, forward + backward;")
    print(f"median of {options.rounds} alternating rounds; one process: SDPA with {RANKS} threads\n")
    print("| length | dtype | KV heads | one process, ms | ring on 2 ranks, ms | ratio | ratio of the fastest |")
    print("|---|---|---|---|---|---|---|")
    for seq_len in options.lengths:
        for dtype in options.dtypes:
            for kv_heads in options.kv_heads:
                case = (seq_len, kv_heads, getattr(torch, dtype))
                single = one_process(*case)
                single()
                ask(pipes, case)
                rounds = [(seconds(single), ask(pipes, "time")) for _ in range(options.rounds)]
                alone, split = ([pair[side] * 1e3 for pair in rounds] for side in (0, 1))
                ratio = statistics.median(split) / statistics.median(alone)
                print(
                    f"| {seq_len} | {dtype} | {kv_heads} | {statistics.median(alone):.0f} | "
                    f"{statistics.median(split):.0f} | {ratio:.2f} | {min(split) / min(alone):.2f} |",
                    flush=True,
                )
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("stop")
        process.join()


if __name__ == "__main__":
    main()
