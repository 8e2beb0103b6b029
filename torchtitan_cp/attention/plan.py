"""The tiles each rank computes and the KV rows each strategy carries, worked out on the host.

A rank's chunks ascend, so any interval of the sequence is an interval of its local rows. The keys that a
segment of queries sees in a document are an interval too: up to the segment under a causal mask, the whole
document under none, as far as the window reaches. So each (segment of queries, source rank) is at most one
dense tile, and the diagonal is one causal square per document. Only a window needs tiles with a band. Empty
tiles are never made, and a key row travels to a rank only if a tile there reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from torchtitan_cp.attention.caching import hashed_once, keep_newest
from torchtitan_cp.attention.collectives import Group, find_group, gather
from torchtitan_cp.attention.compiling import guarded_by_use
from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.layout import Layout, Segment, cut_by_document, documents_of, rank_areas, rows_sent
from torchtitan_cp.attention.mask import AttentionMask, Band, Span, merge_spans, rows_before
from torchtitan_cp.attention.plan_registry import register_plan
from torchtitan_cp.attention.tiles import CAUSAL, FULL, Tile

KeyRows = Sequence[tuple[int, int, int]]  # (rank that holds them, first, last) local rows


@dataclass(frozen=True)
class RingStep:
    """What one rank does in one step of the ring: computes on `source`'s KV and serves `target`.

    Attributes:
        source: rank whose KV this step computes on.
        target: rank that computes on this rank's KV in the same step.
        receive: spans of `source`'s local rows that arrive; the tiles count keys in their concatenation.
        send: spans of the local rows that `target` reads.
        tiles: the kernel calls of the step.
    """

    source: int
    target: int
    receive: tuple[Span, ...]
    send: tuple[Span, ...]
    tiles: tuple[Tile, ...]

    @property
    def key_rows(self) -> KeyRows:
        """The rows of KV that this step computes on."""
        return tuple((self.source, *span) for span in self.receive)


@guarded_by_use
@hashed_once
@dataclass(frozen=True)
class Plan:
    """What one rank needs to run attention on its shard, as plain, hashable data.

    Attributes:
        sequence_length: S, tokens of the full sequence.
        mask: what may attend to what.
        layout: who holds which chunk.
        rank: this rank's place in the context-parallel group.
        strategy: by name, or "auto": chosen when the heads are known.
        kernel: name of the local kernel, or "auto".
        all_to_all_ranks: size of the inner groups in which hybrid trades heads for sequence; rank
            numbers run through an inner group first.
        kv_transfer: "exact", or "float8": KV travels in 8 bits, with a scale per head and row.
        groups: registered names of the process groups, in order: the ring; all ranks, if layers with a state need it;
            the inner group, if the mesh has two axes. Names, so that a plan stays plain data; none in a plan that is
            only inspected or simulated.
        handle: the plan's number in this process, an int64 CPU tensor: what a compiled graph takes.
        most_runs: most runs (see Layout.runs) on any rank, rounded up to a power of two: the size of what linear
            attention keeps in a compiled graph.
    """

    handle: ClassVar[Tensor]
    most_runs: ClassVar[int]

    sequence_length: int
    mask: AttentionMask
    layout: Layout
    rank: int
    strategy: str = "ring"
    kernel: str = "auto"
    all_to_all_ranks: int = 1
    kv_transfer: str = "exact"
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.__dict__["handle"], first = register_plan(self)
        runs = self.layout.runs(self.mask, self.sequence_length)
        self.__dict__["most_runs"] = 1 << (max(map(len, runs)) - 1).bit_length()
        if first is not self:
            self.__dict__["first"] = first

    @property
    def ranks(self) -> int:
        """P, the size of the context-parallel group."""
        return self.layout.ranks

    @property
    def process_groups(self) -> tuple[Group, Group]:
        """(ring, all-to-all) groups that keys travel in.

        Raises:
            PlanError: the plan was made without groups.
        """
        ring, inner = self.groups[:1], self.groups[-1:]
        return find_group(ring, self.ranks // self.all_to_all_ranks), find_group(inner, self.all_to_all_ranks)

    @property
    def pairs_by_rank(self) -> tuple[int, ...]:
        """(query, key) pairs of each rank of the ring, summed over the mask's rows of `document_lengths`."""
        return tuple(rank_areas(self.ring_layout, self.mask, self.sequence_length))

    @cached_property
    def keys_sent(self) -> float:
        """Rows of keys that a rank of the ring has to send, over its own rows: the mean of the ranks.

        What tiles of other ranks read, an upper bound under a window; all_gather sends every row to every rank.
        """
        sent, _ = rows_sent(self.ring_layout, self.mask, self.sequence_length, 1)
        return sum(sent) / self.sequence_length / len(self.mask.documents(self.sequence_length))

    @property
    def local_tokens(self) -> int:
        """S/P."""
        return self.sequence_length // self.ranks

    @cached_property
    def positions(self) -> Tensor:
        """Global position of each local token, `[S/P]` int64 on CPU."""
        with torch.inference_mode(False):  # it is kept, and autograd cannot save a tensor of inference mode
            return self.layout.positions(self.rank)

    @cached_property
    def segments(self) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
        """The documents' segments on all ranks: `[row][document][segment]`, in the order of the sequence.

        A document begins in its first segment and ends in its last one. Like the mask's `document_lengths`, one row
        stands for a batch of any size. Padding is in no segment.
        """
        return tuple(cut_by_document(self.layout, documents) for documents in self.mask.documents(self.sequence_length))

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Cumulative local lengths of the first batch row's documents, `[documents on this rank + 1]` int32."""
        lengths = [sum(s.stop - s.start for s in segments if s.rank == self.rank) for segments in self.segments[0]]
        return torch.tensor([0, *filter(None, lengths)], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)

    @cached_property
    def steps(self) -> tuple[RingStep, ...]:
        """The ring between groups of `all_to_all_ranks`: own KV first, then the other groups by distance.

        Every rank has a step for every other, even an empty one, so that all post their messages in one order.
        """
        return ring_steps(self.ring_layout, self.mask, self.sequence_length, self.rank // self.all_to_all_ranks)

    @cached_property
    def ring_layout(self) -> Layout:
        """The layout whose members are groups of `all_to_all_ranks`."""
        return self.layout.joined(self.all_to_all_ranks) if self.all_to_all_ranks > 1 else self.layout

    @cached_property
    def gathered_tiles(self) -> tuple[Tile, ...]:
        """The tiles against all keys in global order, for all_gather."""
        tiles: list[Tile] = []
        for row, segments in documents_of(self.layout, self.mask, self.sequence_length):
            start, stop = segments[0].start, segments[-1].stop
            for segment in segments:
                if segment.rank == self.rank:
                    tiles += _banded_tile(row, segment, Segment(0, start, start, stop), self.mask.band)
        return _fuse(tiles)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a full tensor: `[.., S, ..] -> [.., S/P, ..]`. Differentiable.

        Raises:
            PlanError: if `x` does not have S entries along `dim`.
        """
        _check_entries("shard", x, dim, self.sequence_length, f"the full sequence of {self.sequence_length}")
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.layout.spans[self.rank]], dim)

    def unshard(self, x_local: Tensor, dim: int = 1) -> Tensor:
        """The full tensor from every rank's rows: `[.., S/P, ..] -> [.., S, ..]`, on every rank.

        Collective over the plan's group. The gradient of a rank's rows is its own part of the result's
        gradient, which is right if every rank computes the same function of the result.

        Raises:
            PlanError: `x_local` does not have S/P entries along `dim`, or the plan has no group.
        """
        _check_entries("unshard", x_local, dim, self.local_tokens, f"this rank's {self.local_tokens} rows")
        if self.ranks == 1:
            return x_local
        shards = [*gather(x_local.detach(), self.process_groups)]
        shards[self.rank] = x_local  # the only part of the result that has a gradient
        return torch.cat(in_global_order(shards, self.layout, dim), dim)

    def check_batch(self, batch: int) -> None:
        """Raise PlanError unless the mask's documents are of one batch row or of as many as the inputs have.

        Operators call it when they run: torch.compile would trace it once for masks with documents and once without.
        """
        rows = self.mask.document_lengths
        if rows is not None and len(rows) not in (1, batch):
            raise PlanError(f"the mask has documents of {len(rows)} batch rows and the inputs have {batch}")


def _check_entries(action: str, x: Tensor, dim: int, entries: int, wanted: str) -> None:
    if not -x.ndim <= dim < x.ndim or x.shape[dim] != entries:
        raise PlanError(
            f"{action}: a tensor {tuple(x.shape)} does not have {entries} entries along dim {dim}",
            fix=f"give {wanted}, or another dim",
        )


def busiest_rank(plan: Plan) -> int:
    """The lowest rank of a plan's group that has the most (query, key) pairs."""
    return plan.pairs_by_rank.index(max(plan.pairs_by_rank)) * plan.all_to_all_ranks


def in_global_order(shards: Sequence[Tensor], layout: Layout, dim: int) -> list[Tensor]:
    """The rows of all ranks' shards as views, in the order of the sequence."""
    lengths = [[stop - start for start, stop in spans] for spans in layout.spans]
    rows = [iter(shard.split(sizes, dim)) for shard, sizes in zip(shards, lengths, strict=True)]
    return [next(rows[segment.rank]) for segment in layout.segments]


def take_rows(shards: Sequence[Tensor], rows: KeyRows) -> Tensor:
    """Rows of the ranks' shards, one after the other, `[B, rows, h, D]`."""
    parts = [shards[rank][:, start:stop] for rank, start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@keep_newest
def ring_steps(layout: Layout, mask: AttentionMask, sequence_length: int, rank: int) -> tuple[RingStep, ...]:
    """One rank's steps; see Plan.steps."""
    ranks = layout.ranks
    tiles: list[list[Tile]] = [[] for _ in range(ranks)]  # by source, keys in its local rows
    sent: list[list[Span]] = [[] for _ in range(ranks)]  # by target, this rank's local rows
    find_reads = _dense_reads if mask.band in (FULL, CAUSAL) else _banded_reads
    for row, segments in documents_of(layout, mask, sequence_length):
        if ours := [segment for segment in segments if segment.rank == rank]:
            read_here, read_elsewhere = find_reads(layout, mask.band, row, segments, ours)
            for source, tile in read_here:
                tiles[source].append(tile)
            for target, span in read_elsewhere:
                sent[target].append(span)
    everything = ((0, sequence_length // ranks),)
    steps = [RingStep(rank, rank, everything, everything, _fuse(tiles[rank]))]
    for distance in range(1, ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        receive = merge_spans([tile[3:5] for tile in tiles[source]])
        # Their keys as rows of what arrives, instead of rows of the source.
        arrived = [tile.moved(0, rows_before(receive, tile.k_start) - tile.k_start) for tile in _fuse(tiles[source])]
        steps.append(RingStep(source, target, receive, merge_spans(sent[target]), tuple(arrived)))
    return tuple(steps)


# Tiles with the rank whose keys they read, and the spans of this rank's rows with the rank that reads them.
Reads = tuple[list[tuple[int, Tile]], list[tuple[int, Span]]]


def _dense_reads(layout: Layout, band: Band, row: int, segments: tuple[Segment, ...], ours: list[Segment]) -> Reads:
    """Reads of a document without a window: one tile for each (segment of this rank, other rank that holds keys)."""
    rank, run = ours[0].rank, (ours[0].local, ours[-1].rows[1])
    tiles: list[tuple[int, Tile]] = [(rank, Tile(row, *run, *run, band))]
    sent: list[tuple[int, Span]] = []
    # Local rows of queries, and the global position up to which they see keys.
    queries = [(s.rows, s.start) for s in ours] if band == CAUSAL else [(run, segments[-1].stop)]
    last_start = {segment.rank: segment.start for segment in segments if segment.rank != rank}
    for other, start in last_start.items():
        k_start = rows_before(layout.spans[other], segments[0].start)
        for q_rows, end in queries:
            k_stop = rows_before(layout.spans[other], end)
            if k_stop > k_start:
                tiles.append((other, Tile(row, *q_rows, k_start, k_stop)))
        stop = rows_before(layout.spans[rank], start) if band == CAUSAL else run[1]
        if stop > run[0]:
            sent.append((other, (run[0], stop)))
    return tiles, sent


def _banded_reads(layout: Layout, band: Band, row: int, segments: tuple[Segment, ...], ours: list[Segment]) -> Reads:
    """Reads of a document under a window: one tile for each pair of segments that see each other."""
    tiles: list[tuple[int, Tile]] = []
    sent: list[tuple[int, Span]] = []
    for one, other in product(ours, segments):
        tiles += [(other.rank, tile) for tile in _banded_tile(row, one, other, band)]
        if other.rank != one.rank:
            sent += [(other.rank, (t.k_start, t.k_stop)) for t in _banded_tile(row, other, one, band)]
    return tiles, sent


def _banded_tile(row: int, queries: Segment, keys: Segment, band: Band) -> list[Tile]:
    """The tile of two segments, trimmed to the queries and keys that see each other; none if there are none."""
    low, high = band
    q_start = queries.start if high is None else max(queries.start, keys.start - high)
    q_stop = queries.stop if low is None else min(queries.stop, keys.stop - low)
    k_start = keys.start if low is None else max(keys.start, q_start + low)
    k_stop = keys.stop if high is None else min(keys.stop, q_stop + high)
    if q_start >= q_stop or k_start >= k_stop:
        return []
    local_q, local_k = queries.local + q_start - queries.start, keys.local + k_start - keys.start
    rows, columns = q_stop - q_start, k_stop - k_start
    inner = band.shifted(k_start - q_start, rows, columns)
    return [Tile(row, local_q, local_q + rows, local_k, local_k + columns, inner)]


def _fuse(tiles: list[Tile]) -> tuple[Tile, ...]:
    """Join tiles without a band that share their keys and touch in their queries, or the other way."""
    fused: list[Tile] = []
    for tile in tiles:
        last = fused[-1] if fused else None
        if last and last.band == FULL == tile.band and last.row == tile.row:
            if last[3:5] == tile[3:5] and last.q_stop == tile.q_start:
                fused[-1] = last._replace(q_stop=tile.q_stop)
                continue
            if last[1:3] == tile[1:3] and last.k_stop == tile.k_start:
                fused[-1] = last._replace(k_stop=tile.k_stop)
                continue
        fused.append(tile)
    return tuple(fused)
