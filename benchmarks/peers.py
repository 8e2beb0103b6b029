"""Other libraries' context parallelism beside ours, on the same ranks in one run: `python -m benchmarks.peers`.

A peer that is not installed, or does not run on CPU and gloo, is named with its reason and left out.
"""

import argparse
import importlib
import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ranks import Ranks, Run, compare, start_ranks
from benchmarks.strategies import HEADS, RANKS, inputs, on_ranks, one_process
from torchtitan_cp.attention import make_plan


def local_inputs(seq_len: int, kv_heads: int, layout: str) -> list[Tensor]:
    """This rank's q, k, v, dout in a layout, leaves."""
    plan = make_plan(seq_len, ranks=dist.get_world_size(), rank=dist.get_rank(), layout=layout)
    q, k, v, dout = (plan.shard(x) for x in inputs(seq_len, kv_heads, torch.float32))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def torch_ring(seq_len: int, kv_heads: int) -> Run:
    """PyTorch's own ring, handed the CPU flash ops, for which it has no sharding rule."""
    cp: Any = importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    cp._cp_options.enable_load_balance = True
    group = dist.group.WORLD
    tensors = [x.detach().transpose(1, 2).contiguous() for x in local_inputs(seq_len, kv_heads, "zigzag")]
    q, k, v, dout = tensors
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **_: Any) -> Any:
        return flash(query, key, value, 0.0, is_causal)

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool
    ) -> Any:
        return flash_backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    def run() -> Tensor:
        out, lse = cp._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
        cp._templated_ring_attention_backward(group, 2, backward, dout, "grad_out", q, k, v, out, lse, True)
        return out

    return run


def ring_attention_pytorch(seq_len: int, kv_heads: int) -> Run:
    """lucidrains' ring in plain torch, striped so that its causal work is even."""
    peer: Any = importlib.import_module("ring_attention_pytorch")
    q, k, v, dout = local_inputs(seq_len, kv_heads, "contiguous")
    size = dist.get_world_size()

    def run() -> Tensor:
        out = peer.ring_flash_attn(q, k, v, causal=True, ring_reduce_col=True, striped_ring_attn=True, ring_size=size)
        torch.autograd.grad(out, (q, k, v), dout)
        return out.detach()

    return run


def yunchang(seq_len: int, kv_heads: int) -> Run:
    """The Ulysses exchange of yunchang (USP) around torch's SDPA."""
    exchange: Any = importlib.import_module("yunchang.comm.all_to_all").SeqAllToAll4D
    q, k, v, dout = local_inputs(seq_len, kv_heads, "contiguous")
    group = dist.group.WORLD

    def run() -> Tensor:
        rows = (exchange.apply(group, x, 2, 1).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=kv_heads != HEADS)  # type: ignore[misc]
        local = exchange.apply(group, out.transpose(1, 2).contiguous(), 1, 2)
        torch.autograd.grad(local, (q, k, v), dout)
        return local.detach()

    return run


PEERS: dict[str, Callable[..., Run]] = {
    "torch ring + CPU shim": torch_ring,
    "ring-attention-pytorch": ring_attention_pytorch,
    "yunchang all-to-all + SDPA": yunchang,
}


def guarded(name: str, seq_len: int, kv_heads: int) -> Run:
    """A peer's run, or one that answers with why there is none."""
    try:
        run = PEERS[name](seq_len, kv_heads)
        run()
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return lambda: reason
    return lambda: run() is None


def measure(ranks: Ranks, name: str, seq_len: int, kv_heads: int, rounds: int) -> dict[str, float] | str:
    """Figures of a peer or of ours, or why there are none."""
    if name in PEERS:
        ranks.make(guarded, name, seq_len, kv_heads)
        reasons = [answer for answer in ranks.answer() if isinstance(answer, str)]
        if reasons:
            return reasons[0]
    else:
        ranks.make(on_ranks, name, seq_len, kv_heads, torch.float32)
    return compare(one_process(seq_len, kv_heads, torch.float32), ranks, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8], help=f"of {HEADS} query heads")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(RANKS)
    print(f"torch {torch.__version__}, {platform.machine()}, fp32, causal, forward + backward, {RANKS} ranks\n")
    print("| length | KV heads | library | one process, ms | 2 ranks, ms | ratio | ratio of the fastest |")
    print("|---|---|---|---|---|---|---|")
    with start_ranks(RANKS) as ranks:
        for seq_len in options.lengths:
            for kv_heads in options.kv_heads:
                for name in ("ring", "all_to_all", *options.peers):
                    figures = measure(ranks, name, seq_len, kv_heads, options.rounds)
                    label = name if name in PEERS else f"torchtitan_cp {name}"
                    if isinstance(figures, str):
                        print(f"| {seq_len} | {kv_heads} | {label} | - | {figures} | - | - |", flush=True)
                        continue
                    times = f"{figures['single_ms']:.0f} | {figures['ranks_ms']:.0f}"
                    ratios = f"{figures['ratio']:.2f} | {figures['ratio_of_fastest']:.2f}"
                    print(f"| {seq_len} | {kv_heads} | {label} | {times} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
