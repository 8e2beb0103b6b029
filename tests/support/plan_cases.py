"""Random cases of a plan: lengths, ranks, masks and layouts."""

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.attention.layouts import LAYOUTS
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.plan import Plan


def draw_lengths(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    cuts = draw(st.sets(st.integers(1, total - 1), max_size=6)) if total > 1 else set()
    edges = [0, *sorted(cuts), total]
    return tuple(stop - start for start, stop in pairwise(edges))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, AttentionMask, str]:
    ranks = draw(st.integers(1, 5))
    seq_len = 2 * ranks * draw(st.integers(1, 8))
    rows = draw(st.integers(0, 2))
    documents = tuple(draw_lengths(draw, seq_len) for _ in range(rows)) or None
    used = documents and tuple(tuple(draw(st.integers(0, length)) for length in row) for row in documents)
    window = draw(st.tuples(st.integers(-1, seq_len), st.integers(-1, seq_len)))
    mask = AttentionMask(
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([(-1, -1), window])),
        document_lengths=documents,
        used_lengths=draw(st.sampled_from([None, used])),
    )
    return seq_len, ranks, mask, draw(st.sampled_from(list(LAYOUTS)))


def plans_of_all_ranks(seq_len: int, ranks: int, mask: AttentionMask, layout: str) -> list[Plan]:
    return [make_plan(seq_len, mask=mask, ranks=ranks, rank=rank, layout=layout) for rank in range(ranks)]


def in_band(queries: int, keys: int, band: Band) -> Tensor:
    """`[queries, keys]` bool, straight from the definition."""
    distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
    low, high = (-queries - keys if band.low is None else band.low), (keys if band.high is None else band.high)
    return (distance >= low) & (distance <= high)


def pairs_of(plan: Plan) -> int:
    return sum(tile.pairs for step in plan.steps for tile in step.tiles)
