"""The gated delta rule and its convolution on two one-thread ranks against one process with two threads."""

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.benchmark import Benchmark, Row
from benchmarks.ranks import Run, compare, start_ranks
from torchtitan_cp.attention import ContextParallel, Plan, causal_conv, gated_delta_rule, make_plan

RANKS = 2
KEY_HEADS, VALUE_HEADS, HEAD_DIM, WIDTH = 4, 8, 64, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD_DIM
RULES = ("gdn", "kda")
STRATEGIES = ("state", "all_to_all")


def inputs(seq_len: int, rule: str, dtype: torch.dtype) -> list[Tensor]:
    """x of the convolution, its weight, g, beta and dout."""
    torch.manual_seed(0)
    gates = (VALUE_HEADS, HEAD_DIM) if rule == "kda" else (VALUE_HEADS,)
    x, weight = torch.randn(1, seq_len, CHANNELS, dtype=dtype), torch.randn(CHANNELS, WIDTH, dtype=dtype)
    g, beta = -0.1 * torch.rand(1, seq_len, *gates), torch.rand(1, seq_len, VALUE_HEADS)
    return [x, weight, g, beta, torch.randn(1, seq_len, VALUE_HEADS, HEAD_DIM, dtype=dtype)]


def make_run(plan: Plan, strategy: str, tensors: list[Tensor]) -> Run:
    """Forward and backward of a rank's rows."""
    x, weight, g, beta, dout = tensors
    leaves = [y.requires_grad_() for y in (x, weight, g, beta)]

    def run() -> None:
        heads = causal_conv(leaves[0], leaves[1], plan, activation="silu").unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([KEY_HEADS, KEY_HEADS, VALUE_HEADS], 2)
        out = gated_delta_rule(q, k, v, leaves[2], leaves[3], plan, qk_l2norm=True, strategy=strategy)
        torch.autograd.grad(out, leaves, dout)

    return run


def on_ranks(strategy: str, layout: str, seq_len: int, rule: str, dtype: torch.dtype) -> Run:
    """This rank's part of the same work."""
    plan = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), layout=layout).plan(seq_len)
    x, weight, *rest = inputs(seq_len, rule, dtype)
    return make_run(plan, strategy, [plan.shard(x), weight, *(plan.shard(y) for y in rest)])


def measure(
    lengths: list[int], dtypes: list[str], rules: list[str], layouts: list[str], strategies: list[str], rounds: int
) -> Iterator[Row]:
    """Forward and backward, one document, Hk 4, Hv 8, K = V = 64, W 4, the sides in turn: medians and their ratio."""
    torch.set_num_threads(RANKS)
    with start_ranks(RANKS) as ranks:
        for length, dtype, rule, layout, strategy in itertools.product(lengths, dtypes, rules, layouts, strategies):
            case = (length, rule, getattr(torch, dtype))
            ranks.make(on_ranks, strategy, layout, *case)
            names = {"length": length, "dtype": dtype, "rule": rule, "layout": layout, "strategy": strategy}
            yield names | compare(make_run(make_plan(length), "state", inputs(*case)), ranks, rounds)


BENCHMARK = Benchmark(
    measure,
    {
        "lengths": [4096, 16384],
        "dtypes": ["float32"],
        "rules": list(RULES),
        "layouts": ["zigzag"],
        "strategies": list(STRATEGIES),
        "rounds": 5,
    },
    {"lengths": [1024], "rounds": 2},
    {"dtypes": ["float32", "bfloat16"], "rules": RULES, "strategies": STRATEGIES},
)
