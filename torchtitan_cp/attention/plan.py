"""The tiles each rank computes and the KV rows each exchange carries, worked out on the host.

A rank's chunks ascend, so any interval of the sequence is an interval of its local rows. What a stretch
of queries sees of a document is an interval too: up to the stretch under a causal mask, the whole document
under none, as far as the window reaches. So each (stretch of queries, source rank) is at most one dense
tile, and the diagonal is one causal square a document. Only a window asks for tiles with a band. Empty
tiles are never made, and a key row travels to a rank only if a tile there reads it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.collectives import Groups, find_groups, gather
from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.layout import Layout, chunk_areas
from torchtitan_cp.attention.mask import AttentionMask, Band, Span
from torchtitan_cp.attention.plan_registry import keep
from torchtitan_cp.attention.tiles import ALL_ROWS, CAUSAL, FULL, Tile


class Piece(NamedTuple):
    """A stretch of one document that lies unbroken on one rank."""

    rank: int
    local: int  # local row
    start: int  # global position
    stop: int


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


@dataclass(frozen=True)
class Plan:
    """All one rank needs to know to run attention on its shard: plain, hashable data.

    Attributes:
        sequence_length: S, tokens of the full sequence.
        mask: what may attend to what.
        layout: who holds which chunk.
        rank: this rank's place in the context-parallel group.
        strategy: name of the exchange, or "auto": chosen when the heads are known.
        kernel: name of the local kernel, or "auto".
        all_to_all_ranks: size of the inner groups in which hybrid trades heads for sequence; rank
            numbers run through an inner group first.
        kv_transfer: "exact", or "float8": KV travels in 8 bits with a scale per block.
        groups: names of the process groups; None in a plan made to be looked at or simulated.
        handle: the plan's number in this process, an int64 CPU tensor: what a compiled graph takes.
    """

    handle: ClassVar[Tensor]

    sequence_length: int
    mask: AttentionMask
    layout: Layout
    rank: int
    strategy: str = "ring"
    kernel: str = "auto"
    all_to_all_ranks: int = 1
    kv_transfer: str = "exact"
    groups: Groups | None = None

    def __post_init__(self) -> None:
        self.__dict__["handle"], first = keep(self)
        if first is not self:
            self.__dict__["first"] = first

    @property
    def ranks(self) -> int:
        """P, the size of the context-parallel group."""
        return len(self.layout.chunks)

    @property
    def areas(self) -> tuple[int, ...]:
        """Pairs that the mask allows to the queries of each rank of the ring, over its rows of `document_lengths`."""
        layout = self.ring_layout
        chunks = chunk_areas(layout.chunk_tokens, len(layout.owners), self.mask, self.sequence_length)
        return tuple(sum(chunks[chunk] for chunk in held) for held in layout.chunks)

    @property
    def local_tokens(self) -> int:
        """S/P."""
        return self.sequence_length // self.ranks

    @cached_property
    def positions(self) -> Tensor:
        """Global position of each local token, `[S/P]` int64 on CPU."""
        return self.layout.positions(self.rank)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Cumulative lengths of the documents' parts on this rank, `[documents here + 1]` int32, first batch row."""
        row = _pieces(self.layout, self.mask.documents(self.sequence_length)[0])
        lengths = [sum(p.stop - p.start for p in held) for held in _held_by(self.rank, row)]
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    @cached_property
    def steps(self) -> tuple[RingStep, ...]:
        """The ring between groups of `all_to_all_ranks`: own KV first, then the other groups by distance.

        Every rank has a step for each other, empty ones too, so that all post their messages in one order.
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
        rows = self.mask.documents(self.sequence_length)
        for number, documents in enumerate(rows):
            row = ALL_ROWS if len(rows) == 1 else number
            for document, pieces in zip(documents, _pieces(self.layout, documents), strict=True):
                for piece in pieces:
                    if piece.rank == self.rank:
                        everything = Piece(0, document[0], *document)
                        tiles += _banded_tile(row, piece, everything, self.mask.band)
        return _fuse(tiles)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a full tensor: `[.., S, ..] -> [.., S/P, ..]`. Differentiable.

        Raises:
            PlanError: if `x` does not have S entries along `dim`.
        """
        if x.shape[dim] != self.sequence_length:
            raise PlanError(
                f"shard: dim {dim} of a tensor {tuple(x.shape)} has {x.shape[dim]} entries",
                fix=f"give the full sequence of {self.sequence_length}, or another dim",
            )
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.layout.spans(self.rank)], dim)

    def unshard(self, x_local: Tensor, dim: int = 1) -> Tensor:
        """The full tensor from every rank's rows: `[.., S/P, ..] -> [.., S, ..]`, on every rank.

        Collective over the plan's group. Differentiable where every rank goes on to compute the same
        function of the result: the gradient of a rank's rows is that rank's own.

        Raises:
            PlanError: `x_local` does not have S/P entries along `dim`, or the plan has no group.
        """
        if x_local.shape[dim] != self.local_tokens:
            raise PlanError(
                f"unshard: dim {dim} of a tensor {tuple(x_local.shape)} has {x_local.shape[dim]} entries",
                fix=f"give this rank's {self.local_tokens} rows, or another dim",
            )
        return x_local if self.ranks == 1 else _Unshard.apply(x_local, self, dim)

    def __getstate__(self) -> dict[str, Any]:
        # The number is this process's own; the steps that a loader's worker has found go with the plan.
        return {name: value for name, value in self.__dict__.items() if name not in ("handle", "first")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, plan: Plan, dim: int) -> Tensor:
        ctx.plan, ctx.dim = plan, dim
        shards = gather(x_local, find_groups(plan.groups, plan.ranks, plan.all_to_all_ranks))
        return torch.cat(in_global_order(shards, plan.layout, dim), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.plan.shard(gradients[0], ctx.dim), None, None


def busiest_rank(plan: Plan) -> int:
    """The rank of a plan's group whose queries see the most keys, told by the layout alone."""
    layout = plan.ring_layout
    areas = chunk_areas(layout.chunk_tokens, len(layout.owners), plan.mask, plan.sequence_length)
    work = [sum(areas[chunk] for chunk in held) for held in layout.chunks]
    return work.index(max(work)) * plan.all_to_all_ranks


def in_global_order(shards: Iterable[Tensor], layout: Layout, dim: int) -> list[Tensor]:
    """The chunks of all ranks' shards as views, in the order of the sequence."""
    held = list(shards)
    return [held[rank].narrow(dim, start, layout.chunk_tokens) for rank, start in layout.owners]


@lru_cache(maxsize=1024)
def ring_steps(layout: Layout, mask: AttentionMask, sequence_length: int, rank: int) -> tuple[RingStep, ...]:
    """One rank's steps; see Plan.steps."""
    ranks = len(layout.chunks)
    tiles: list[list[Tile]] = [[] for _ in range(ranks)]  # by source, keys in its local rows
    served: list[list[Span]] = [[] for _ in range(ranks)]  # by target, this rank's local rows
    rows = mask.documents(sequence_length)
    find = _dense_reads if mask.band in (FULL, CAUSAL) else _banded_reads
    for number, documents in enumerate(rows):
        row = ALL_ROWS if len(rows) == 1 else number
        for document, pieces in zip(documents, _pieces(layout, documents), strict=True):
            if any(piece.rank == rank for piece in pieces):
                find(layout, mask.band, row, document, pieces, rank, tiles, served)
    everything = ((0, layout.chunk_tokens * len(layout.chunks[rank])),)
    steps = [RingStep(rank, rank, everything, everything, _fuse(tiles[rank]))]
    for distance in range(1, ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        receive = _join((tile.k_start, tile.k_stop) for tile in tiles[source])
        arrived = _count_in(_fuse(tiles[source]), receive)
        steps.append(RingStep(source, target, receive, _join(served[target]), arrived))
    return tuple(steps)


def _dense_reads(
    layout: Layout,
    band: Band,
    row: int,
    document: Span,
    pieces: tuple[Piece, ...],
    rank: int,
    tiles: list[list[Tile]],
    served: list[list[Span]],
) -> None:
    """Tiles of a document without a window: one for each (piece of this rank, other rank that holds keys)."""
    first, last = document
    ours = [piece for piece in pieces if piece.rank == rank]
    run = (ours[0].local, ours[-1].local + ours[-1].stop - ours[-1].start)
    tiles[rank].append(Tile(row, *run, *run, band))
    if len(ours) == len(pieces):
        return
    others: dict[int, int] = {}  # rank -> where its last piece begins
    for piece in pieces:
        if piece.rank != rank:
            others[piece.rank] = piece.start
    before = layout.rows_before
    ends = [piece.start for piece in ours] if band == CAUSAL else [last]
    queries = [(p.local, p.local + p.stop - p.start) for p in ours] if band == CAUSAL else [run]
    for other, latest in others.items():
        k_start = before(other, first)
        for (q_start, q_stop), end in zip(queries, ends, strict=True):
            k_stop = before(other, end)
            if k_stop > k_start:
                tiles[other].append(Tile(row, q_start, q_stop, k_start, k_stop))
        seen = (run[0], before(rank, latest) if band == CAUSAL else run[1])
        if seen[1] > seen[0]:
            served[other].append(seen)


def _banded_reads(
    layout: Layout,
    band: Band,
    row: int,
    document: Span,
    pieces: tuple[Piece, ...],
    rank: int,
    tiles: list[list[Tile]],
    served: list[list[Span]],
) -> None:
    """Tiles of a document under a window: one for each pair of pieces that see each other."""
    for ours in pieces:
        if ours.rank != rank:
            continue
        for other in pieces:
            tiles[other.rank] += _banded_tile(row, ours, other, band)
            if other.rank != rank:
                served[other.rank] += [(t.k_start, t.k_stop) for t in _banded_tile(row, other, ours, band)]


def _banded_tile(row: int, queries: Piece, keys: Piece, band: Band) -> list[Tile]:
    """The tile of two pieces, trimmed to the queries and keys that see each other; none if there are none."""
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


@lru_cache(maxsize=64)
def _pieces(layout: Layout, documents: tuple[Span, ...]) -> tuple[tuple[Piece, ...], ...]:
    """Each document's pieces on all ranks, in the order of the sequence; a rank's neighbours are one."""
    tokens, owners = layout.chunk_tokens, layout.owners
    result = []
    for first, last in documents:
        pieces: list[Piece] = []
        for chunk in range(first // tokens, (last - 1) // tokens + 1):
            rank, local = owners[chunk]
            start, stop = max(first, chunk * tokens), min(last, (chunk + 1) * tokens)
            if pieces and pieces[-1].rank == rank:
                pieces[-1] = pieces[-1]._replace(stop=stop)
            else:
                pieces.append(Piece(rank, local + start - chunk * tokens, start, stop))
        result.append(tuple(pieces))
    return tuple(result)


def _held_by(rank: int, documents: tuple[tuple[Piece, ...], ...]) -> Iterator[list[Piece]]:
    """A rank's pieces of each document that it has any of."""
    for pieces in documents:
        ours = [piece for piece in pieces if piece.rank == rank]
        if ours:
            yield ours


def _fuse(tiles: list[Tile]) -> tuple[Tile, ...]:
    """Join tiles without a band that share their keys and are neighbours in their queries, or the other way."""
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


def _join(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Fuse overlapping and touching spans."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def _count_in(tiles: tuple[Tile, ...], received: tuple[Span, ...]) -> tuple[Tile, ...]:
    """Count the tiles' keys in the concatenation of the received spans."""
    if not tiles or (len(received) == 1 and received[0][0] == 0):
        return tiles
    starts, before, shifts = [start for start, _ in received], 0, []
    for start, stop in received:
        shifts.append(before - start)
        before += stop - start
    counted = []
    for tile in tiles:
        shift = shifts[bisect_right(starts, tile.k_start) - 1]
        counted.append(tile._replace(k_start=tile.k_start + shift, k_stop=tile.k_stop + shift))
    return tuple(counted)
