"""Random cases of a plan: lengths, ranks, masks and layouts."""

from itertools import pairwise

from hypothesis import strategies as st

from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.attention.layouts import LAYOUTS


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
