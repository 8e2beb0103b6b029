"""Context parallelism of one layer from its plans: work, bytes, and the exposed time of its messages.

Bytes are counted from the plan's steps, so windows, packed documents and layouts are included. A test compares them
with what `simulate` sends. What each strategy costs is in STRATEGY_COSTS.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torchtitan_cp.attention import AttentionMask, Plan, make_plan
from torchtitan_cp.attention.codec import CODECS
from torchtitan_cp.attention.mask import count_rows
from torchtitan_cp.attention.plan import busiest_rank
from torchtitan_cp.attention.ring_cost import BACKWARD_FLOPS, FORWARD_FLOPS, RowPairs, pairs_per_row, waiting_time
from torchtitan_cp.attention.strategies.all_gather import HEAD_GROUPS
from torchtitan_cp.attention.strategies.all_to_all import share_heads
from torchtitan_cp.planner.devices import BANDWIDTH, Cluster

FP32_BYTES = 4  # gradients travel and are summed in fp32


@dataclass(frozen=True)
class Heads:
    """Heads of one rank, and how their keys and values travel.

    Attributes:
        query, key, dim: Hq/tp, Hkv/tp, D.
        element_bytes: of the compute dtype.
        float8: keys and values travel in 8 bits, with an fp32 scale a head and row.
    """

    query: int
    key: int
    dim: int
    element_bytes: int = 2
    float8: bool = False

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one row of K and V as they travel."""
        return self.key * CODECS["float8" if self.float8 else "exact"].row_bytes(2 * self.dim, self.element_bytes)

    @property
    def gradient_row_bytes(self) -> int:
        """Bytes of one row of dK and dV, which travel in fp32."""
        return self.key * CODECS["exact"].row_bytes(2 * self.dim, FP32_BYTES)

    def after_all_to_all(self, ranks: int) -> "Heads":
        """The heads that a rank computes after an all-to-all of so many ranks, with padding and copies."""
        shares = share_heads(self.query, self.key, ranks)
        return dataclasses.replace(self, query=len(shares.queries[0]), key=len(shares.keys[0]))


class LayerCost(NamedTuple):
    """Attention of one layer on one rank, for one sequence.

    Attributes:
        pairs: (query, key) pairs times query heads that the rank computes.
        forward_bytes, backward_bytes: that it sends.
        forward_exposed, backward_exposed: seconds it waits for messages.
    """

    pairs: int
    forward_bytes: float
    backward_bytes: float
    forward_exposed: float
    backward_exposed: float


@dataclass(frozen=True)
class Rates:
    """FLOP/s of the attention kernel on a cluster, and the distance of context-parallel neighbours: tp."""

    cluster: Cluster
    forward: float
    backward: float
    stride: int

    def row_pairs(self, heads: Heads) -> RowPairs:
        """Pairs that a rank computes while a row of keys and values travels: within a node, and to another one."""
        device, pair_flops = self.cluster.accelerator, FORWARD_FLOPS * heads.query * heads.dim
        bandwidths = BANDWIDTH * device.link_bandwidth, BANDWIDTH * device.network_bandwidth
        return pairs_per_row(heads.kv_row_bytes, pair_flops, self.forward, bandwidths)


Messages = tuple[float, float, float, float]  # the last four of a LayerCost


class StrategyCosts(NamedTuple):
    """Formulas for the costs of a strategy.

    Attributes:
        messages: (plan, heads, rates, seconds of the plan's steps forward, and backward) -> Messages.
        working_bytes: (tokens of a rank, ranks, ranks that trade heads, heads) -> bytes that a backward needs besides
            q, k, v, out and their gradients.
    """

    messages: Callable[[Plan, Heads, Rates, list[float], list[float]], Messages]
    working_bytes: Callable[[int, int, int, Heads], float]


def step_pairs(plan: Plan) -> list[int]:
    """Pairs that a plan's rank computes in each step, for one head."""
    return [sum(tile.pairs for tile in step.tiles) for step in plan.steps]


def layer_of(plan: Plan, heads: Heads, rates: Rates) -> LayerCost:
    """Cost of one layer for one sequence, on a plan's rank."""
    pairs = step_pairs(plan)
    traded = heads.after_all_to_all(plan.all_to_all_ranks)
    flops = [count * traded.query * traded.dim for count in pairs]
    forward = [FORWARD_FLOPS * count / rates.forward for count in flops]
    backward = [BACKWARD_FLOPS * count / rates.backward for count in flops]
    messages = STRATEGY_COSTS[plan.strategy].messages(plan, traded, rates, forward, backward)
    return LayerCost(sum(pairs) * traded.query, *messages)


@lru_cache(maxsize=16384)
def busiest_layer(
    mask: AttentionMask,
    window: int,
    heads: Heads,
    rates: Rates,
    *,
    seq_len: int,
    ranks: int,
    strategy: str,
    layout: str = "auto",
    all_to_all_ranks: int,
) -> LayerCost:
    """The largest of each number over four ranks: the one with the most pairs, the first, the middle and the last.

    Args:
        window: of the layer, 0 for none.
        seq_len, ranks, strategy, layout, all_to_all_ranks: as of `make_plan`.
    """
    node_ranks = max(1, rates.cluster.accelerator.ranks_per_node // rates.stride)
    plan = make_plan(
        seq_len,
        mask=mask,
        ranks=ranks,
        strategy=strategy,
        layout=layout,
        all_to_all_ranks=all_to_all_ranks,
        ranks_per_node=node_ranks,
        row_pairs=rates.row_pairs(heads),
    )
    plan = dataclasses.replace(plan, mask=mask.windowed(window))  # on the layout of the batch
    chosen = sorted({0, busiest_rank(plan), plan.ranks // 2, plan.ranks - 1})
    layers = [layer_of(dataclasses.replace(plan, rank=rank), heads, rates) for rank in chosen]
    return LayerCost(*map(max, zip(*layers, strict=True)))


def _ring_messages(plan: Plan, heads: Heads, rates: Rates, forward: list[float], backward: list[float]) -> Messages:
    """An all-to-all, which nothing hides, around a ring; either may have only one rank.

    The next keys travel while a step is computed; in the backward, the previous step's gradients travel back with them.
    """
    traded, steps = plan.all_to_all_ranks, plan.steps
    part = (traded - 1) * plan.local_tokens
    qkv, out = (part * heads.element_bytes * heads.dim * count for count in (heads.query + 2 * heads.key, heads.query))
    log_sum_exp = part * heads.query * FP32_BYTES  # sent with the output
    keys = sum(count_rows(step.send) for step in steps[1:]) * heads.kv_row_bytes
    returned = sum(count_rows(step.receive) for step in steps[1:]) * heads.gradient_row_bytes
    all_to_all_seconds = sum(rates.cluster.all_to_all_seconds(message, traded, rates.stride) for message in (qkv, out))

    def seconds(message: float) -> float:
        return rates.cluster.message_seconds(message, plan.ranks // traded, rates.stride * traded)

    # The keys and gradients of the first step do not travel.
    rows = [0, *(max(count_rows(step.send), count_rows(step.receive)) for step in steps[1:])]
    arriving = [following * heads.kv_row_bytes for following in [*rows[1:], 0]]
    leaving = [previous * heads.gradient_row_bytes for previous in [0, *rows]]
    forward_wait = waiting_time([*map(seconds, arriving)], forward)
    both = [seconds(keys + gradients) for keys, gradients in zip(arriving, leaving[:-1], strict=True)]
    backward_wait = waiting_time(both, backward) + seconds(leaving[-1])
    waits = all_to_all_seconds + forward_wait, all_to_all_seconds + backward_wait
    return qkv + out + log_sum_exp + keys, out + qkv + keys + returned, *waits


def _ring_working_bytes(tokens: int, ranks: int, traded: int, heads: Heads) -> float:
    traded_heads, rows, c = heads.after_all_to_all(traded), tokens * traded, heads.element_bytes
    q, kv = traded_heads.query * traded_heads.dim, traded_heads.key * 2 * traded_heads.dim
    message = rows * (q + kv) * c if traded > 1 else 0.0
    if ranks == traded:
        sums = FP32_BYTES if c < FP32_BYTES else 0  # in which a kernel adds up dq, tile by tile
        return message + rows * ((q + kv) * c + q * sums)
    return message + rows * (2 * kv * c + (q + 3 * kv) * FP32_BYTES)


def _gather_messages(plan: Plan, heads: Heads, rates: Rates, forward: list[float], backward: list[float]) -> Messages:
    """Heads travel in groups: nothing hides the first gather; the computation of each group hides the next one."""
    others, groups = (plan.ranks - 1) * plan.local_tokens, min(HEAD_GROUPS, heads.key)
    keys, sums = others * heads.kv_row_bytes, others * heads.gradient_row_bytes
    gather, scatter = (
        rates.cluster.collective_seconds(plan.sequence_length / groups * row, plan.ranks, rates.stride)
        for row in (heads.kv_row_bytes, heads.gradient_row_bytes)
    )
    behind = max(0.0, gather - sum(forward) / groups)
    behind_both = max(0.0, gather + scatter - sum(backward) / groups)
    return keys, keys + sums, gather + (groups - 1) * behind, gather + (groups - 1) * behind_both + scatter


def _gather_working_bytes(tokens: int, ranks: int, traded: int, heads: Heads) -> float:
    q, kv, c = heads.query * heads.dim, heads.key * 2 * heads.dim, heads.element_bytes
    gathered = ranks * tokens * kv / min(HEAD_GROUPS, heads.key)
    return gathered * (2 * c + 3 * FP32_BYTES) + tokens * (q + kv) * c


RING = StrategyCosts(_ring_messages, _ring_working_bytes)
STRATEGY_COSTS = {
    "ring": RING,
    "all_gather": StrategyCosts(_gather_messages, _gather_working_bytes),
    "all_to_all": RING,
    "hybrid": RING,
}
