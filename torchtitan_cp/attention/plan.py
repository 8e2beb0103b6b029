"""The tiles that each rank computes and the KV rows that travel, worked out on the host.

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
from torchtitan_cp.attention.compiling import guard_only_read_fields
from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.layout import Layout, Segment, cut_by_document, documents_of, rank_areas, rows_sent
from torchtitan_cp.attention.mask import AttentionMask, Band, Span, merge_spans, rows_before
from torchtitan_cp.attention.plan_registry import register_plan
from torchtitan_cp.attention.tiles import CAUSAL, FULL, Tile

KeyRows = Sequence[tuple[int, int, int]]  # (rank that holds them, start, stop) of local rows


@dataclass(frozen=True)
class RingStep:
    """What one rank does in one step of the ring: it computes on the KV of `source`, and sends its own to `target`.

    Attributes:
        source: rank whose KV this step computes on.
        target: rank that computes on this rank's KV in the same step.
        receive: spans of `source`'s local rows that arrive; key rows of the tiles index their concatenation.
        send: spans of this rank's local rows that `target` reads.
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


@guard_only_read_fields
@hashed_once
@dataclass(frozen=True)
class Plan:
    """What one rank needs to run attention on its shard, as plain, hashable data.

    Attributes:
        sequence_length: S, tokens of the full sequence.
        mask: what may attend to what.
        layout: which rank holds which rows.
        rank: this rank's number in the context-parallel group.
        strategy: by name, or "auto": each attention chooses by its heads.
        kernel: name of the local kernel, or "auto".
        all_to_all_ranks: size of the inner groups in which hybrid trades heads for sequence; rank
            numbers run through an inner group first.
        kv_transfer: "exact", or "float8": KV travels in 8 bits, with a scale per head and row.
        groups: registered names of the process groups, in this order: the ring; all ranks, if linear attention needs
            such a group; the inner group, if the mesh has two axes. Names keep the plan plain data. A plan that is only
            inspected or simulated has none.
        handle: the plan's number in this process, an int64 CPU tensor, which a compiled graph takes as an input.
        most_runs: most runs (see Layout.runs) on any rank, rounded up to a power of two; it sizes the states that
            linear attention keeps in a compiled graph.
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
        # The plan that is registered must live as long as this one: an equal plan, or this plan itself.
        self.__dict__["handle"], registered = register_plan(self)
        if registered is not self:
            self.__dict__["registered"] = registered
        runs = self.layout.runs(self.mask, self.sequence_length)
        self.__dict__["most_runs"] = 1 << (max(map(len, runs)) - 1).bit_length()

    @property
    def ranks(self) -> int:
        """P, the size of the context-parallel group."""
        return self.layout.ranks

    @property
    def process_groups(self) -> tuple[Group, Group]:
        """The (ring, all-to-all) groups in which keys travel.

        Raises:
            PlanError: the plan was made without groups.
        """
        ring, inner = self.groups[:1], self.groups[-1:]
        return find_group(ring, self.ranks // self.all_to_all_ranks), find_group(inner, self.all_to_all_ranks)

    @property
    def pairs_by_rank(self) -> tuple[int, ...]:
        """Allowed (query, key) pairs of each rank of the ring, summed over the mask's batch rows."""
        return tuple(rank_areas(self.ring_layout, self.mask, self.sequence_length))

    @cached_property
    def keys_sent(self) -> float:
        """Rows of keys that a rank of the ring sends, divided by the rows it holds: the mean over the ranks.

        It counts what tiles of other ranks read, and is an upper bound under a window. all_gather sends all rows.
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
        with torch.inference_mode(False):  # the tensor is cached, and autograd cannot save one of inference mode
            return self.layout.positions(self.rank)

    @cached_property
    def segments(self) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
        """The documents' segments on all ranks: `[row][document][segment]`, in the order of the sequence.

        A document begins in its first segment and ends in its last one. As in the mask's `document_lengths`, a single
        row applies to every row of a batch. Padding is in no segment.
        """
        return tuple(cut_by_document(self.layout, documents) for documents in self.mask.documents(self.sequence_length))

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Cumulative local lengths of the first batch row's documents, `[documents on this rank + 1]` int32."""
        lengths = [sum(s.stop - s.start for s in segments if s.rank == self.rank) for segments in self.segments[0]]
        with torch.inference_mode(False):  # as for positions
            lengths_from_0 = torch.tensor([0, *filter(None, lengths)], dtype=torch.int32, device="cpu")
            return lengths_from_0.cumsum(0, dtype=torch.int32)

    @cached_property
    def steps(self) -> tuple[RingStep, ...]:
        """The ring between groups of `all_to_all_ranks`: the rank's own KV first, then the other groups by distance.

        Every rank has a step for every other rank, even if it is empty, so that all post their messages in one order.
        """
        return ring_steps(self.ring_layout, self.mask, self.sequence_length, self.rank // self.all_to_all_ranks)

    @cached_property
    def ring_layout(self) -> Layout:
        """The layout in which each group of `all_to_all_ranks` is one rank."""
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
            PlanError: `x` does not have S entries along `dim`.
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
        """Raise PlanError unless the mask's documents have one batch row, or as many as the inputs.

        Operators call it when they run. torch.compile would trace it once for masks with documents and once without.
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
    tiles: list[list[Tile]] = [[] for _ in range(ranks)]  # by source; keys are numbered by the source's local rows
    sent: list[list[Span]] = [[] for _ in range(ranks)]  # by target; spans of this rank's local rows
    find_reads = _dense_reads if mask.band in (FULL, CAUSAL) else _banded_reads
    for row, segments in documents_of(layout, mask, sequence_length):
        if local := [segment for segment in segments if segment.rank == rank]:
            read_here, read_elsewhere = find_reads(layout, mask.band, row, segments, local)
            for source, tile in read_here:
                tiles[source].append(tile)
            for target, span in read_elsewhere:
                sent[target].append(span)
    all_rows = ((0, sequence_length // ranks),)
    steps = [RingStep(rank, rank, all_rows, all_rows, _fuse(tiles[rank]))]
    for distance in range(1, ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        receive = merge_spans([tile[3:5] for tile in tiles[source]])
        # From here on keys are numbered by the rows that arrive, no longer by the rows of the source.
        arrived = [tile.moved(0, rows_before(receive, tile.k_start) - tile.k_start) for tile in _fuse(tiles[source])]
        steps.append(RingStep(source, target, receive, merge_spans(sent[target]), tuple(arrived)))
    return tuple(steps)


# (source rank, tile that reads its keys) of this rank, and (target rank, span of this rank's rows that it reads).
Reads = tuple[list[tuple[int, Tile]], list[tuple[int, Span]]]


def _dense_reads(layout: Layout, band: Band, row: int, segments: tuple[Segment, ...], local: list[Segment]) -> Reads:
    """Reads of a document without a window: one tile for each (segment of this rank, other rank that holds keys)."""
    rank, first_row, stop_row = local[0].rank, local[0].local, local[-1].rows[1]
    tiles: list[tuple[int, Tile]] = [(rank, Tile(row, first_row, stop_row, first_row, stop_row, band))]
    sent: list[tuple[int, Span]] = []
    # Local rows of queries, and the global position up to which they see keys.
    queries = [(s.rows, s.start) for s in local] if band == CAUSAL else [((first_row, stop_row), segments[-1].stop)]
    last_start = {segment.rank: segment.start for segment in segments if segment.rank != rank}
    for other, start in last_start.items():
        k_start = rows_before(layout.spans[other], segments[0].start)
        for q_rows, end in queries:
            k_stop = rows_before(layout.spans[other], end)
            if k_stop > k_start:
                tiles.append((other, Tile(row, *q_rows, k_start, k_stop)))
        read_stop = rows_before(layout.spans[rank], start) if band == CAUSAL else stop_row
        if read_stop > first_row:
            sent.append((other, (first_row, read_stop)))
    return tiles, sent


def _banded_reads(layout: Layout, band: Band, row: int, segments: tuple[Segment, ...], local: list[Segment]) -> Reads:
    """Reads of a document under a window: one tile for each pair of segments that see each other."""
    tiles: list[tuple[int, Tile]] = []
    sent: list[tuple[int, Span]] = []
    for mine, other in product(local, segments):
        tiles += [(other.rank, tile) for tile in _banded_tile(row, mine, other, band)]
        if other.rank != mine.rank:
            sent += [(other.rank, (tile.k_start, tile.k_stop)) for tile in _banded_tile(row, other, mine, band)]
    return tiles, sent


def _banded_tile(row: int, queries: Segment, keys: Segment, band: Band) -> list[Tile]:
    """The tile of two segments, trimmed to the queries and keys that see each other; an empty list if none do."""
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
    """Join neighbouring tiles without a band that have the same keys and adjacent queries, or the other way round."""
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
