"""Peak memory of an attention, forward and backward, at CP 1, 2 and 4: `python -m benchmarks.memory`.

On a CPU: the growth of the process's largest resident size, counted from a reset after freed memory was
given back. It holds what the attention makes, and not the q, k, v and dout that it is given.
"""

import argparse
import json
import platform
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.ranks import Run, start_ranks
from benchmarks.strategies import HEAD_DIM, HEADS
from torchtitan_cp.attention import ContextParallel
from torchtitan_cp.parallel.device import find_device


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--kv-heads", type=int, default=2, help=f"of {HEADS} query heads")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--strategies", nargs="+", default=["ring", "all_gather", "all_to_all"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()

    print(f"torch {torch.__version__}, {platform.machine()}, {options.seq_len} tokens, H {HEADS}/{options.kv_heads},")
    print(f"D {HEAD_DIM}, fp32, causal; MiB on the rank with most, beyond the q, k, v, dout it is given\n")
    print("| CP | strategy | q, k, v, dout | forward | forward + backward |\n|---|---|---|---|---|")
    rows = []
    for count in options.ranks:
        with start_ranks(count) as ranks:
            for strategy in options.strategies if count > 1 else options.strategies[:1]:
                ranks.make(on_ranks, strategy, options.seq_len, options.kv_heads)
                answers = ranks.answer()
                forward, both = (max(answer[which] for answer in answers) / 2**20 for which in (0, 1))
                given = options.seq_len // count * 2 * (HEADS + options.kv_heads) * HEAD_DIM * 4 / 2**20
                rows.append({"cp": count, "strategy": strategy, "forward_mib": forward, "both_mib": both})
                print(f"| {count} | {strategy} | {given:.0f} | {forward:.0f} | {both:.0f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
