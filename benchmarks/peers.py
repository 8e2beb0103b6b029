"""Other libraries' context parallelism beside ours, on the same ranks in one run.

A peer that is not installed, or does not run on CPU and gloo, is named with its reason and left out.
"""

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.benchmark import Benchmark, Row
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


def time_peer(ranks: Ranks, name: str, seq_len: int, kv_heads: int, rounds: int) -> dict[str, float] | str:
    """Figures of a peer or of ours, or why there are none."""
    if name in PEERS:
        ranks.make(guarded, name, seq_len, kv_heads)
        reasons = [answer for answer in ranks.answer() if isinstance(answer, str)]
        if reasons:
            return reasons[0]
    else:
        ranks.make(on_ranks, name, seq_len, kv_heads, torch.float32)
    return compare(one_process(seq_len, kv_heads, torch.float32), ranks, rounds)


def measure(lengths: list[int], kv_heads: list[int], peers: list[str], rounds: int) -> Iterator[Row]:
    """fp32, causal, H 8, D 64, forward and backward on two ranks, beside SDPA in one process with two threads."""
    torch.set_num_threads(RANKS)
    with start_ranks(RANKS) as ranks:
        for length, keys, name in itertools.product(lengths, kv_heads, ["ring", "all_to_all", *peers]):
            figures = time_peer(ranks, name, length, keys, rounds)
            label = name if name in PEERS else f"torchtitan_cp {name}"
            row = {"length": length, "kv_heads": keys, "library": label}
            yield row | (figures if isinstance(figures, dict) else {"does_not_run": figures})


BENCHMARK = Benchmark(
    measure,
    {"lengths": [4096], "kv_heads": [8], "peers": list(PEERS), "rounds": 5},
    {"lengths": [1024], "rounds": 2},
    {"peers": list(PEERS)},
)
