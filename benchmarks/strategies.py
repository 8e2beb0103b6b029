"""Every exchange on two one-thread ranks against one process with two threads."""

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.benchmark import Benchmark, Row
from benchmarks.ranks import Run, compare, start_ranks
from torchtitan_cp.attention import ContextParallel

RANKS = 2
HEADS, HEAD_DIM = 8, 64
MESHES = {"hybrid 1 x 2": (1, 2), "hybrid 2 x 1": (2, 1)}
STRATEGIES = ("ring", "all_gather", "all_to_all", *MESHES)


def inputs(seq_len: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout, `[1, S, H, D]`."""
    torch.manual_seed(0)
    return [torch.randn(1, seq_len, heads, HEAD_DIM, dtype=dtype) for heads in (HEADS, kv_heads, kv_heads, HEADS)]


def one_process(seq_len: int, kv_heads: int, dtype: torch.dtype) -> Run:
    """SDPA over the whole sequence, forward and backward."""
    q, k, v, dout = (x.transpose(1, 2) for x in inputs(seq_len, kv_heads, dtype))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != HEADS)
        torch.autograd.grad(out, (q, k, v), dout)

    return run


def on_ranks(strategy: str, seq_len: int, kv_heads: int, dtype: torch.dtype) -> Run:
    """This rank's part of the same work."""
    mesh = init_device_mesh("cpu", MESHES.get(strategy, (dist.get_world_size(),)))
    cp = ContextParallel(mesh, strategy.split()[0])
    plan = cp.plan(seq_len)
    q, k, v, dout = (plan.shard(x) for x in inputs(seq_len, kv_heads, dtype))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    return lambda: torch.autograd.grad(cp.attention(q, k, v, plan), (q, k, v), dout)


def measure(
    lengths: list[int], dtypes: list[str], kv_heads: list[int], strategies: list[str], rounds: int
) -> Iterator[Row]:
    """Forward and backward, causal, B 1, H 8, D 64, the sides in turn: medians, their ratio, that of the fastest.

    One process: SDPA with two threads.
    """
    torch.set_num_threads(RANKS)
    with start_ranks(RANKS) as ranks:
        for length, dtype, keys, strategy in itertools.product(lengths, dtypes, kv_heads, strategies):
            case = (length, keys, getattr(torch, dtype))
            ranks.make(on_ranks, strategy, *case)
            names = {"length": length, "dtype": dtype, "kv_heads": keys, "strategy": strategy}
            yield names | compare(one_process(*case), ranks, rounds)


BENCHMARK = Benchmark(
    measure,
    {
        "lengths": [4096, 16384],
        "dtypes": ["float32"],
        "kv_heads": [8, 2],
        "strategies": list(STRATEGIES),
        "rounds": 5,
    },
    {"lengths": [2048], "kv_heads": [2], "rounds": 3},
    {"dtypes": ["float32", "bfloat16"], "strategies": STRATEGIES},
)
