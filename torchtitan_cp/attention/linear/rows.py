"""Which local rows make up the chunks of a rank, and which of its documents' segments pass a state on."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.layout import Segment, contiguous
from torchtitan_cp.attention.linear.chunks import CHUNK
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.tiles import ALL_ROWS

KEPT = 64  # plans whose rows are kept on the device


class Stretch(NamedTuple):
    """The rows of a document that lie side by side on one rank.

    Attributes:
        rank, run: who holds it, and in which of its runs; a run has at most one that began elsewhere, at its start,
            and one that goes on elsewhere, at its end.
        row: batch row, or ALL_ROWS.
        local: its first local row; tokens: how many it has.
        start: global position of its first token; offset: how far that is from the document's.
        leaves: whether its document goes on after it.
        chunks: of the run, those that hold its tokens.
    """

    rank: int
    run: int
    row: int
    local: int
    tokens: int
    start: int
    offset: int
    leaves: bool
    chunks: tuple[int, int]

    @property
    def rows(self) -> slice:
        """The batch rows."""
        return slice(None) if self.row == ALL_ROWS else slice(self.row, self.row + 1)


@lru_cache(maxsize=KEPT)
def stretches(plan: Plan) -> tuple[tuple[Stretch, ...], ...]:
    """Those of each document, in the order of the sequence."""

    def stretch(row: int, segment: Segment, first: Segment, last: Segment) -> Stretch:
        rank, local, start, stop = segment
        spans = plan.layout.spans[rank]
        run = bisect_right(spans, (start, plan.sequence_length)) - 1
        chunks = (start - spans[run][0]) // CHUNK, -((spans[run][0] - stop) // CHUNK)
        return Stretch(rank, run, row, local, stop - start, start, start - first.start, segment != last, chunks)

    return tuple(
        tuple(stretch(ALL_ROWS if len(plan.segments) == 1 else row, s, segments[0], segments[-1]) for s in segments)
        for row, documents in enumerate(plan.segments)
        for segments in documents
    )


def own_stretches(plan: Plan) -> list[Stretch]:
    """Those of this rank."""
    return [one for document in stretches(plan) for one in document if one.rank == plan.rank]


@lru_cache(maxsize=KEPT)
def document_offsets(plan: Plan, device: torch.device) -> Tensor:
    """How far each local token is from its document's first, `[1 or B, S/P]` int64; -1 for padding."""
    offsets = torch.full((len(plan.segments), plan.local_tokens), -1)
    for one in own_stretches(plan):
        offsets[one.rows, one.local : one.local + one.tokens] = torch.arange(one.offset, one.offset + one.tokens)
    return offsets.to(device)


@dataclass(frozen=True)
class ChunkRows:
    """A rank's rows in chunks. Each run, of consecutive positions, begins a chunk; what is left of its last is filled.

    Attributes:
        rows: `[N * C]` the local row in each place; any where there is none.
        places: `[S/P]` the place of each local row.
        held: `[1 or B, N * C]` bool: whether there is a token.
        begins: `[1 or B, N * C]` bool: whether it is a document's first.
        firsts, lasts: the first and the last chunk of each run.
    """

    rows: Tensor
    places: Tensor
    held: Tensor
    begins: Tensor
    firsts: list[int]
    lasts: list[int]

    def split(self, x: Tensor, key_heads: int) -> Tensor:
        """`[B, S/P, H, D] -> [N, B, Hk, H/Hk, C, D]`, zeros where there is no token."""
        chunks = torch.where(self.held[:, :, None, None], x.index_select(1, self.rows), 0.0)
        return chunks.unflatten(2, (key_heads, -1)).unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 4, 2, 5).contiguous()

    def chunks_of(self, segment: Stretch) -> slice:
        """The chunks that hold a segment of this rank."""
        first = self.firsts[segment.run]
        return slice(first + segment.chunks[0], first + segment.chunks[1])

    def join(self, chunks: Tensor) -> Tensor:
        """The inverse of `split`."""
        return chunks.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2).index_select(1, self.places)


@lru_cache(maxsize=KEPT)
def chunk_rows(plan: Plan, device: torch.device) -> ChunkRows:
    """The chunks of this rank's rows."""
    lengths = [stop - start for start, stop in plan.layout.spans[plan.rank]]
    *firsts, chunks = accumulate((-(-length // CHUNK) for length in lengths), initial=0)
    place = torch.cat([torch.arange(length) + first * CHUNK for first, length in zip(firsts, lengths, strict=True)])
    rows = torch.zeros(chunks * CHUNK, dtype=torch.int64)
    rows[place] = torch.arange(len(place))
    offsets = torch.full((len(plan.segments), len(rows)), -1)
    offsets[:, place] = document_offsets(plan, torch.device("cpu"))
    rows, place, held, begins = (x.to(device) for x in (rows, place, offsets >= 0, offsets == 0))
    return ChunkRows(rows, place, held, begins, firsts, [*(first - 1 for first in firsts[1:]), chunks - 1])


@lru_cache(maxsize=KEPT)
def whole_sequence(plan: Plan) -> Plan:
    """The plan of one rank alone for the same documents."""
    return Plan(plan.sequence_length, plan.mask, contiguous(plan.sequence_length, 1), 0)
