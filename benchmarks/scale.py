"""Where each exchange of attention wins, from its plans: time, what of it is exposed, and balance, at any size.

Nothing runs: work is what the plans' tiles hold, at a stated rate of the kernel; messages are the rows that the plans
send, at stated bandwidths. docs/scale.md says which of these were measured.
"""

import itertools
from collections.abc import Iterator

from benchmarks.benchmark import Benchmark, Row
from benchmarks.plan import draw_lengths
from models.llama import FLAVORS
from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.attention.plan import ring_steps
from torchtitan_cp.attention.ring_cost import BACKWARD_FLOPS, FORWARD_FLOPS
from torchtitan_cp.attention.tiles import count_pairs
from torchtitan_cp.planner.devices import ACCELERATORS, Cluster, make_cluster
from torchtitan_cp.planner.strategy_costs import Heads, Rates, busiest_layer

STRATEGIES = ("ring", "all_gather", "all_to_all", "hybrid")


def draw_mask(kind: str, seq_len: int, mean_tokens: int) -> AttentionMask:
    """Causal over the whole sequence, or over packed documents of log-normal lengths."""
    if kind == "causal":
        return AttentionMask()
    lengths = draw_lengths("log-normal", seq_len, max(1, seq_len // mean_tokens), seed=1)
    return AttentionMask(document_lengths=(lengths,))


def mask_pairs(seq_len: int, mask: AttentionMask) -> int:
    """Allowed (query, key) pairs of a sequence: the mask's first batch row."""
    return sum(count_pairs(stop - start, stop - start, mask.band) for start, stop in mask.documents(seq_len)[0])


def figures(strategy: str, seq_len: int, ranks: int, mask: AttentionMask, heads: Heads, rates: Rates) -> Row:
    """One layer and sequence, forward and backward, on the slowest rank.

    Returns:
        milliseconds; the share of them in which the rank waits for messages; its work over the ranks' mean.
    """
    all_to_all_ranks = {"all_to_all": ranks, "hybrid": rates.cluster.accelerator.ranks_per_node}.get(strategy, 1)
    group = {"seq_len": seq_len, "ranks": ranks, "strategy": strategy, "all_to_all_ranks": all_to_all_ranks}
    layer = busiest_layer(mask, 0, heads, rates, **group)
    work = layer.pairs * heads.dim * (FORWARD_FLOPS / rates.forward + BACKWARD_FLOPS / rates.backward)
    exposed = layer.forward_exposed + layer.backward_exposed
    mean_pairs = mask_pairs(seq_len, mask) * heads.query / ranks
    return {
        "ms": (work + exposed) * 1e3,
        "exposed_share": exposed / (work + exposed),
        "over_mean_work": layer.pairs / mean_pairs,
        "sent_mib": (layer.forward_bytes + layer.backward_bytes) / 2**20,
    }


def measure(
    device: str,
    flavor: str,
    lengths: list[int],
    ranks: list[int],
    masks: list[str],
    strategies: list[str],
    mean_tokens: int,
    forward_tflops: float,
    backward_tflops: float,
    dtype: str,
) -> Iterator[Row]:
    """One layer of a flavor and one sequence, forward and backward, on the slowest rank; each rank is one device.

    mean_tokens: of packed documents, whose lengths are log-normal; forward_tflops, backward_tflops: of the attention
    kernel, 0 for the planner's table.
    """
    shape, accelerator = FLAVORS[flavor], ACCELERATORS[device]
    heads = Heads(shape.n_heads, shape.n_kv_heads, shape.head_dim, 2 if dtype == "bfloat16" else 4)
    for kind, seq_len, count in itertools.product(masks, lengths, ranks):
        node = min(count, accelerator.ranks_per_node)
        cluster: Cluster = make_cluster(device, count // node, ranks_per_node=node)
        rates = Rates(
            cluster,
            forward_tflops * 1e12 or cluster.rate(dtype, accelerator.attention_forward),
            backward_tflops * 1e12 or cluster.rate(dtype, accelerator.attention_backward),
            1,
        )
        mask = draw_mask(kind, seq_len, mean_tokens)
        for strategy in strategies:
            if strategy == "hybrid" and count <= node:
                continue
            names = {"mask": kind, "tokens": seq_len, "ranks": count, "strategy": strategy}
            yield names | figures(strategy, seq_len, count, mask, heads, rates)
        # Thousands of plans of thousands of steps would fill the memory.
        for cache in (busiest_layer, ring_steps):
            cache.cache_clear()


BENCHMARK = Benchmark(
    measure,
    {
        "device": "h100-80g",
        "flavor": "8B",
        "lengths": [1 << exponent for exponent in range(17, 25)],
        "ranks": [1 << exponent for exponent in range(3, 13)],
        "masks": ["causal", "packed"],
        "strategies": list(STRATEGIES),
        "mean_tokens": 8192,
        "forward_tflops": 0.0,
        "backward_tflops": 0.0,
        "dtype": "bfloat16",
    },
    {"lengths": [1 << 20], "ranks": [8, 64, 512]},
    {
        "device": list(ACCELERATORS),
        "flavor": list(FLAVORS),
        "masks": ["causal", "packed"],
        "strategies": STRATEGIES,
        "dtype": ["bfloat16", "float32"],
    },
)
