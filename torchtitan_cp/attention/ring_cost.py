"""What the messages of a ring cost beside its compute: layouts, the choice of a strategy and the planner ask here."""

from collections.abc import Sequence

from torchtitan_cp.attention.layout import Layout, documents_of, rank_areas, rows_sent
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.tiles import count_pairs

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # a pair and dim of a head: 2 products forward, 5 backward (scores again)
# Of P - 1 shards of K and V a causal ring with zigzag sends this fraction: rows that some query of the reader sees.
CAUSAL_FRACTION = 0.75
# In rings of at most this many ranks `relative_time` counts the messages of each step; in larger ones their total.
STEP_RANKS = 16
# (Query, key) pairs that a rank computes while a row of keys and values travels: within a node, to another one.
RowPairs = tuple[float, float]


def pairs_per_row(row_bytes: float, pair_flops: float, flops: float, bandwidths: tuple[float, float]) -> RowPairs:
    """Pairs that a rank computes while a row of keys and values travels: within a node, to another one.

    Args:
        row_bytes: of the keys and values of one token, all heads.
        pair_flops: of the forward of one pair, all heads.
        flops: FLOP/s of the kernel.
        bandwidths: bytes/s, within a node and to another one.
    """
    within, across = (flops * row_bytes / (bandwidth * pair_flops) for bandwidth in bandwidths)
    return within, across


def assumed_pairs_per_row(query_heads: int, key_heads: int) -> RowPairs:
    """Row pairs where nothing is known of the machine: bf16 at 400 TFLOP/s, and 400 or 50 GB/s. Any head dim."""
    return pairs_per_row(key_heads * 2 * 2, query_heads * FORWARD_FLOPS, 400e12, (400e9, 50e9))


ROW_PAIRS = assumed_pairs_per_row(query_heads=32, key_heads=8)


def waiting_time(messages: Sequence[float], steps: Sequence[float]) -> float:
    """How long a rank waits for messages, in the unit of its arguments.

    Args:
        messages: time of what travels while each step is computed.
        steps: time of the steps.
    """
    return sum(max(0.0, message - step) for message, step in zip(messages, steps, strict=True))


def relative_time(
    layout: Layout, mask: AttentionMask, sequence_length: int, ranks_per_node: int, row_pairs: RowPairs = ROW_PAIRS
) -> float:
    """Time of the busiest rank in a ring, for its pairs and messages, over the time of an even share of the pairs.

    With up to `STEP_RANKS` ranks, `waiting_time` is added. With more ranks, messages are assumed to overlap with any
    step: a rank's time is the longer of both sums.
    """
    areas, (within, across) = rank_areas(layout, mask, sequence_length), row_pairs
    if layout.ranks > STEP_RANKS:
        sent, crossing = rows_sent(layout, mask, sequence_length, ranks_per_node)
        times = [max(area, across * far, within * rows) for area, far, rows in zip(areas, crossing, sent, strict=True)]
    else:
        waits = _message_waits(layout, mask, sequence_length, areas, ranks_per_node, row_pairs)
        times = [area + wait for area, wait in zip(areas, waits, strict=True)]
    return max(times) * layout.ranks / (sum(areas) or 1)


def _message_waits(
    layout: Layout,
    mask: AttentionMask,
    sequence_length: int,
    areas: list[int],
    ranks_per_node: int,
    row_pairs: RowPairs,
) -> list[float]:
    """How long each rank of a ring waits for messages, as the number of pairs that it could compute meanwhile."""
    ranks, band = layout.ranks, mask.band
    pairs = [[0] * ranks for _ in range(ranks)]  # that a reader computes in a step
    costs = [[0.0] * ranks for _ in range(ranks)]  # of the message that a source sends in a step
    for _, segments in documents_of(layout, mask, sequence_length):
        for number, (source, _, start, stop) in enumerate(segments if len(segments) > 1 else ()):
            readers = set()
            for reader, _, first, last in segments[number if band.high == 0 else 0 :]:
                step = (reader - source) % ranks
                if step and (step_pairs := count_pairs(last - first, stop - start, band, start - first)):
                    pairs[reader][step] += step_pairs
                    if reader not in readers:
                        crosses_nodes = reader // ranks_per_node != source // ranks_per_node
                        costs[source][step] += (stop - start) * row_pairs[crosses_nodes]
                        readers.add(reader)
    waits = []
    for rank in range(ranks):
        messages = [max(costs[rank][step], costs[rank - step][step]) for step in range(1, ranks)]
        # The first message travels while the rank computes its own keys, and nothing during the last step.
        steps = [areas[rank] - sum(pairs[rank]), *pairs[rank][1:]]
        waits.append(waiting_time(messages, steps[:-1]))
    return waits
