"""Which local rows make up the chunks of a rank, and which of its documents' segments pass a state on."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.layout import contiguous
from torchtitan_cp.attention.linear.chunks import CHUNK
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.tiles import ALL_ROWS

KEPT = 64  # plans whose rows are kept on the device


@lru_cache(maxsize=KEPT)
def document_offsets(plan: Plan, device: torch.device) -> Tensor:
    """How far each local token is from its document's first, `[1 or B, S/P]` int64; -1 for padding."""
    offsets = torch.full((len(plan.segments), plan.local_tokens), -1)
    for row, documents in enumerate(plan.segments):
        for segments in documents:
            for rank, local, start, stop in segments:
                if rank == plan.rank:
                    first = start - segments[0].start
                    offsets[row, local : local + stop - start] = torch.arange(first, first + stop - start)
    return offsets.to(device)


@dataclass(frozen=True)
class ChunkRows:
    """A rank's rows in chunks. Each run, of consecutive positions, begins a chunk; what is left of its last is filled.

    Attributes:
        rows: `[N * C]` the local row in each place; any where there is none.
        places: `[S/P]` the place of each local row.
        held: `[1 or B, N * C]` bool: whether there is a token.
        begins: `[1 or B, N * C]` bool: whether it is a document's first.
        runs: per run, the first chunk and the one after its last.
    """

    rows: Tensor
    places: Tensor
    held: Tensor
    begins: Tensor
    runs: tuple[tuple[int, int], ...]

    def split(self, x: Tensor, key_heads: int) -> Tensor:
        """`[B, S/P, H, D] -> [N, B, Hk, H/Hk, C, D]`, zeros where there is no token."""
        chunks = torch.where(self.held[:, :, None, None], x.index_select(1, self.rows), 0.0)
        return chunks.unflatten(2, (key_heads, -1)).unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 4, 2, 5).contiguous()

    def chunks_of(self, segment: "Crossing") -> slice:
        """The chunks that hold a segment of this rank."""
        first = self.runs[segment.run][0]
        return slice(first + segment.chunks[0], first + segment.chunks[1])

    def at_starts(self, states: Tensor) -> dict[int, Tensor]:
        """The states of each run, by its first chunk."""
        return {run[0]: state for run, state in zip(self.runs, states, strict=False)}

    def at_ends(self, states: Tensor) -> dict[int, Tensor]:
        """The states of each run, by its last chunk."""
        return {run[1] - 1: state for run, state in zip(self.runs, states, strict=False)}

    def join(self, chunks: Tensor) -> Tensor:
        """The inverse of `split`."""
        return chunks.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2).index_select(1, self.places)


@lru_cache(maxsize=KEPT)
def chunk_rows(plan: Plan, device: torch.device) -> ChunkRows:
    """The chunks of this rank's rows."""
    runs, places, chunk = [], [], 0
    for start, stop in plan.layout.spans[plan.rank]:
        runs.append((chunk, chunk - (start - stop) // CHUNK))
        places.append(torch.arange(chunk * CHUNK, chunk * CHUNK + stop - start))
        chunk = runs[-1][1]
    place = torch.cat(places)
    rows = torch.zeros(chunk * CHUNK, dtype=torch.int64)
    rows[place] = torch.arange(len(place))
    offsets = torch.full((len(plan.segments), len(rows)), -1)
    offsets[:, place] = document_offsets(plan, torch.device("cpu"))
    rows, place, held, begins = (x.to(device) for x in (rows, place, offsets >= 0, offsets == 0))
    return ChunkRows(rows, place, held, begins, tuple(runs))


class Crossing(NamedTuple):
    """A segment of a document that has several of them.

    Attributes:
        rank, run: who holds it, and in which of its runs; a run has at most one that began elsewhere, at its start,
            and one that goes on elsewhere, at its end.
        row: batch row, or ALL_ROWS.
        start: global position of its first token.
        chunks: of the run, those that hold its tokens.
    """

    rank: int
    run: int
    row: int
    start: int
    chunks: tuple[int, int]

    @property
    def rows(self) -> slice:
        """The batch rows."""
        return slice(None) if self.row == ALL_ROWS else slice(self.row, self.row + 1)


@lru_cache(maxsize=KEPT)
def crossings(plan: Plan) -> tuple[tuple[Crossing, ...], ...]:
    """The documents that have several segments, with these in the order of the sequence."""

    def crossing(row: int, rank: int, start: int, stop: int) -> Crossing:
        spans = plan.layout.spans[rank]
        run = bisect_right(spans, (start, plan.sequence_length)) - 1
        first, last = start - spans[run][0], stop - spans[run][0]
        return Crossing(rank, run, row, start, (first // CHUNK, -(-last // CHUNK)))

    return tuple(
        tuple(crossing(ALL_ROWS if len(plan.segments) == 1 else row, s.rank, s.start, s.stop) for s in segments)
        for row, documents in enumerate(plan.segments)
        for segments in documents
        if len(segments) > 1
    )


class OwnSegment(NamedTuple):
    """A rank's segment of a document in one row of the batch.

    Attributes:
        batch_row, run: where it is; local: its first local row; rows: how many it has.
        start: global position of its first token.
        enters, leaves: whether its document began before it, and goes on after it.
    """

    batch_row: int
    run: int
    local: int
    rows: int
    start: int
    enters: bool
    leaves: bool


@lru_cache(maxsize=KEPT)
def own_segments(plan: Plan, batch: int) -> tuple[OwnSegment, ...]:
    """This rank's segments, batch row by batch row."""
    spans, found = plan.layout.spans[plan.rank], []
    for row, documents in enumerate(plan.segments * (batch // len(plan.segments))):
        for segments in documents:
            for s in segments:
                if s.rank == plan.rank:
                    run, ends = bisect_right(spans, (s.start, plan.sequence_length)) - 1, (segments[0], segments[-1])
                    found.append(OwnSegment(row, run, s.local, s.stop - s.start, s.start, s != ends[0], s != ends[1]))
    return tuple(found)


@lru_cache(maxsize=KEPT)
def whole_sequence(plan: Plan) -> Plan:
    """The plan of one rank alone for the same documents."""
    return Plan(plan.sequence_length, plan.mask, contiguous(plan.sequence_length, 1), 0)
