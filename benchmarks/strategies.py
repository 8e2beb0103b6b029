"""Every exchange on two one-thread ranks against one process with two threads: `python -m benchmarks.strategies`."""

import argparse
import json
import platform
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="sequence lengths, in tokens")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 2], help=f"of {HEADS} query heads")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side, in turn")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(RANKS)

    print(f"torch {torch.__version__}, {platform.machine()}, H {HEADS}, D {HEAD_DIM}, B 1, causal, forward + backward;")
    print(f"median of {options.rounds} alternating rounds; one process: SDPA with {RANKS} threads\n")
    print("| length | dtype | KV heads | strategy | one process, ms | 2 ranks, ms | ratio | ratio of the fastest |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    with start_ranks(RANKS) as ranks:
        for seq_len in options.lengths:
            for dtype in options.dtypes:
                for kv_heads in options.kv_heads:
                    for strategy in options.strategies:
                        case = (seq_len, kv_heads, getattr(torch, dtype))
                        ranks.make(on_ranks, strategy, *case)
                        figures = compare(one_process(*case), ranks, options.rounds)
                        names = {"length": seq_len, "dtype": dtype, "kv_heads": kv_heads, "strategy": strategy}
                        rows.append(names | figures)
                        print(
                            f"| {seq_len} | {dtype} | {kv_heads} | {strategy} | {figures['single_ms']:.0f} | "
                            f"{figures['ranks_ms']:.0f} | {figures['ratio']:.2f} | {figures['ratio_of_fastest']:.2f} |",
                            flush=True,
                        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
