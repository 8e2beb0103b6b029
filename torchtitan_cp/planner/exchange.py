"""Context parallelism of one layer from its plans: work, bytes, and the exposed time of its messages.

Bytes are counted from the plan's steps, so windows, packed documents and layouts are included. A test compares them
with what `simulate` sends.
"""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from torchtitan_cp.attention import AttentionMask, Plan, make_plan
from torchtitan_cp.attention.mask import count_rows
from torchtitan_cp.attention.plan import busiest_rank
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.attention.strategies.all_gather import HEAD_GROUPS
from torchtitan_cp.attention.strategies.all_to_all import share_heads
from torchtitan_cp.config import ConfigError
from torchtitan_cp.planner.devices import Cluster

FP32_BYTES = 4  # gradients travel and are summed in fp32
EXCHANGES = ("ring", "all_gather", "all_to_all", "hybrid")  # of attention.strategies, those with formulas here
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # a pair and dim of a head: 2 products forward, 5 backward (scores again)


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
    def kv_row_bytes(self) -> float:
        """Bytes of one row of K and V as they travel."""
        return self.key * 2 * (self.dim + FP32_BYTES if self.float8 else self.dim * self.element_bytes)

    @property
    def gradient_row_bytes(self) -> int:
        """Bytes of one row of dK and dV, which travel in fp32."""
        return self.key * 2 * self.dim * FP32_BYTES


@dataclass(frozen=True)
class LayerCost:
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


def check_exchange(strategy: str) -> str:
    """The name of an exchange that can be estimated.

    Raises:
        ConfigError: there are no formulas for it here.
    """
    if strategy not in EXCHANGES:
        known = ", ".join(name for name in STRATEGIES if name in EXCHANGES)
        raise ConfigError(f"the planner cannot estimate the exchange {strategy!r}", fix=f"use one of {known}")
    return strategy


def sent_bytes(plan: Plan, heads: Heads) -> tuple[float, float]:
    """Bytes that a plan's rank sends for one sequence of one layer, (forward, backward)."""
    if plan.ranks == 1:
        return 0.0, 0.0
    if check_exchange(plan.strategy) == "all_gather":
        others = (plan.ranks - 1) * plan.local_tokens
        keys = others * heads.kv_row_bytes
        return keys, keys + others * heads.gradient_row_bytes
    all_to_all_ranks = plan.all_to_all_ranks
    forward = backward = 0.0
    own = heads
    if all_to_all_ranks > 1:
        own = heads_after_all_to_all(heads, all_to_all_ranks)
        part = (all_to_all_ranks - 1) * plan.local_tokens * heads.element_bytes
        qkv, out = part * (own.query + 2 * own.key) * own.dim, part * own.query * own.dim
        # The fp32 log-sum-exp rides with the output.
        forward, backward = qkv + out + part * own.query * FP32_BYTES / heads.element_bytes, out + qkv
    keys = sum(count_rows(step.send) for step in plan.steps[1:]) * own.kv_row_bytes
    returned = sum(count_rows(step.receive) for step in plan.steps[1:]) * own.gradient_row_bytes
    return forward + keys, backward + keys + returned


def heads_after_all_to_all(heads: Heads, all_to_all_ranks: int) -> Heads:
    """The heads that a rank computes after an all-to-all of so many ranks, with padding and copies."""
    shares = share_heads(heads.query, heads.key, all_to_all_ranks)
    return dataclasses.replace(heads, query=len(shares.queries[0]), key=len(shares.keys[0]))


@lru_cache(maxsize=4096)
def plan_for(
    seq_len: int,
    ranks: int,
    rank: int,
    strategy: str,
    all_to_all_ranks: int,
    window: int,
    layout: str,
    mask: AttentionMask,
) -> Plan:
    """The plan of a layer: `mask` with the layer's window (0 for none), on the layout of the batch."""
    whole = make_plan(
        seq_len, mask=mask, ranks=ranks, rank=rank, strategy=strategy, layout=layout, all_to_all_ranks=all_to_all_ranks
    )
    if not window:
        return whole
    narrow = AttentionMask(mask.causal, (window - 1, -1), mask.document_lengths, mask.used_lengths)
    return make_plan(
        seq_len,
        mask=narrow,
        ranks=ranks,
        rank=rank,
        strategy=strategy,
        like=whole,
        all_to_all_ranks=all_to_all_ranks,
    )


def step_pairs(plan: Plan) -> list[int]:
    """Pairs of each step that a plan's rank computes, for one head."""
    if plan.strategy == "all_gather" and plan.ranks > 1:
        return [sum(tile.pairs for tile in plan.gathered_tiles)]
    return [sum(tile.pairs for tile in step.tiles) for step in plan.steps]


def layer_of(plan: Plan, heads: Heads, rates: Rates) -> LayerCost:
    """Cost of one sequence of one layer for a plan's rank."""
    pairs = step_pairs(plan)
    own = heads_after_all_to_all(heads, plan.all_to_all_ranks) if plan.all_to_all_ranks > 1 else heads
    flops = [count * own.query * own.dim for count in pairs]
    forward = [FORWARD_FLOPS * count / rates.forward for count in flops]
    backward = [BACKWARD_FLOPS * count / rates.backward for count in flops]
    if plan.ranks == 1:
        exposed = (0.0, 0.0)
    elif plan.strategy == "all_gather":
        exposed = _gather_exposed(plan, heads, rates, forward[0], backward[0])
    else:
        exposed = _ring_exposed(plan, own, rates, forward, backward)
        traded_seconds = _trade_seconds(plan, own, rates)
        exposed = (exposed[0] + traded_seconds[0], exposed[1] + traded_seconds[1])
    return LayerCost(sum(pairs) * own.query, *sent_bytes(plan, heads), *exposed)


@lru_cache(maxsize=16384)
def busiest_layer(
    seq_len: int,
    ranks: int,
    strategy: str,
    all_to_all_ranks: int,
    window: int,
    layout: str,
    mask: AttentionMask,
    heads: Heads,
    rates: Rates,
) -> LayerCost:
    """The largest of each number over four ranks: the one with the most pairs, the first, the middle and the last.

    Args:
        all_to_all_ranks: that trade heads; window: of the layer, 0 for none.
    """
    first = plan_for(seq_len, ranks, 0, strategy, all_to_all_ranks, window, layout, mask)
    others = sorted({busiest_rank(first), ranks // 2, ranks - 1} - {0})
    plans = [
        first,
        *(plan_for(seq_len, ranks, rank, strategy, all_to_all_ranks, window, layout, mask) for rank in others),
    ]
    layers = [layer_of(plan, heads, rates) for plan in plans]
    return LayerCost(*(max(getattr(layer, field.name) for layer in layers) for field in dataclasses.fields(LayerCost)))


def _ring_exposed(
    plan: Plan, own: Heads, rates: Rates, forward: list[float], backward: list[float]
) -> tuple[float, float]:
    """The next keys travel while these are computed; in backward the last step's gradients travel back beside them."""
    ring, stride = plan.ranks // plan.all_to_all_ranks, rates.stride * plan.all_to_all_ranks
    key_row, gradient_row = own.kv_row_bytes, own.gradient_row_bytes
    steps = plan.steps
    waits = [0.0, 0.0]
    for index, following in enumerate([*steps[1:], None]):
        here = steps[index]
        keys = max(count_rows(following.send), count_rows(following.receive)) * key_row if following else 0.0
        # The first step's gradients are the rank's own; those of a step travel while the next one is computed.
        back = (
            max(count_rows(steps[index - 1].receive), count_rows(steps[index - 1].send)) * gradient_row
            if index > 1
            else 0.0
        )
        waits[0] += max(0.0, rates.cluster.message_seconds(keys, ring, stride) - forward[index])
        waits[1] += max(0.0, rates.cluster.message_seconds(keys + back, ring, stride) - backward[index])
        if following is None and index:
            last = max(count_rows(here.receive), count_rows(here.send)) * gradient_row
            waits[1] += rates.cluster.message_seconds(last, ring, stride)
    return waits[0], waits[1]


def _gather_exposed(plan: Plan, heads: Heads, rates: Rates, forward: float, backward: float) -> tuple[float, float]:
    """Groups of heads: the first gather waits, the next ones travel behind the group before them."""
    groups = min(HEAD_GROUPS, heads.key)
    whole_rows = plan.sequence_length / groups
    keys = whole_rows * heads.kv_row_bytes
    sums = whole_rows * heads.gradient_row_bytes
    gather = rates.cluster.collective_seconds(keys, plan.ranks, rates.stride)
    scatter = rates.cluster.collective_seconds(sums, plan.ranks, rates.stride)
    behind = max(0.0, gather - forward / groups)
    behind_both = max(0.0, gather + scatter - backward / groups)
    return gather + (groups - 1) * behind, gather + (groups - 1) * behind_both + scatter


def _trade_seconds(plan: Plan, own: Heads, rates: Rates) -> tuple[float, float]:
    """Messages of the all-to-all, which nothing hides."""
    all_to_all_ranks = plan.all_to_all_ranks
    part = (all_to_all_ranks - 1) * plan.local_tokens * own.element_bytes * own.dim
    qkv, out = part * (own.query + 2 * own.key), part * own.query
    both = sum(rates.cluster.trade_seconds(message, all_to_all_ranks, rates.stride) for message in (qkv, out))
    return both, both
