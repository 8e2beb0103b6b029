"""The tiles each rank computes and the KV rows each exchange carries, worked out on the host.

Between two pieces of one document, i before j, everything in j attends everything in i: a dense
rectangle. A piece with itself is a causal square. So a causal, bidirectional or packed mask becomes a
short list of tiles for plain dense kernels. Neighbouring tiles are fused, empty ones never made, and a
key row travels to a rank only if a tile there reads it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.layout import Layout
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.transfer import gather

Span = tuple[int, int]
ALL_ROWS = -1


class Tile(NamedTuple):
    """One dense kernel call: local query rows [q_start, q_stop) against key rows [k_start, k_stop).

    Key rows count in the KV that the step holds (the local shard, or the rows received). A causal tile
    is square and its diagonal is the diagonal of the mask. `row` is the batch row, or ALL_ROWS.
    """

    row: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool


class Piece(NamedTuple):
    """A stretch of one document that lies unbroken on one rank."""

    document: int
    start: int  # global position
    local: int  # local row
    length: int

    @property
    def span(self) -> Span:
        """Local rows (start, stop)."""
        return (self.local, self.local + self.length)


@dataclass(frozen=True)
class RingStep:
    """What one rank does in one step of the exchange: computes on `source`'s KV and serves `target`.

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
        strategy: name of the exchange.
        kernel: name of the local kernel, or "auto".
        group_name: the process group's registered name; None in a plan made to be looked at or simulated.
    """

    sequence_length: int
    mask: AttentionMask
    layout: Layout
    rank: int
    strategy: str = "ring"
    kernel: str = "auto"
    group_name: str | None = field(default=None, compare=False)

    @property
    def ranks(self) -> int:
        """P, the size of the context-parallel group."""
        return len(self.layout.chunks)

    @property
    def local_tokens(self) -> int:
        """S/P."""
        return self.sequence_length // self.ranks

    @cached_property
    def positions(self) -> Tensor:
        """Global position of each local token, `[S/P]` int64 on CPU."""
        return self.layout.positions(self.rank)

    @cached_property
    def steps(self) -> tuple[RingStep, ...]:
        """The exchange, own KV first, then the other ranks by distance.

        Every rank has all P steps, empty ones too, so that all post their messages in one order.
        """
        return tuple(self._ring_steps())

    def _ring_steps(self) -> Iterator[RingStep]:
        for distance in range(self.ranks):
            source, target = (self.rank - distance) % self.ranks, (self.rank + distance) % self.ranks
            tiles = tiles_between(self.layout, self.mask, self.sequence_length, self.rank, source)
            if distance == 0:
                everything = ((0, self.local_tokens),)
                yield RingStep(source, target, everything, everything, tiles)
                continue
            receive = key_rows(tiles)
            send = key_rows(tiles_between(self.layout, self.mask, self.sequence_length, target, self.rank))
            yield RingStep(source, target, receive, send, tuple(_shift(tile, receive) for tile in tiles))

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


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, plan: Plan, dim: int) -> Tensor:
        ctx.plan, ctx.dim = plan, dim
        shards = gather(x_local, plan.ranks, plan.group_name)
        order = torch.cat([plan.layout.positions(rank) for rank in range(plan.ranks)]).argsort()
        return torch.cat(shards, dim).index_select(dim, order.to(x_local.device))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.plan.shard(gradients[0], ctx.dim), None, None


@lru_cache(maxsize=4096)
def tiles_between(
    layout: Layout, mask: AttentionMask, sequence_length: int, query_rank: int, key_rank: int
) -> tuple[Tile, ...]:
    """The fused tiles of `query_rank`'s queries against `key_rank`'s keys, in local rows of each."""
    rows = mask.documents(sequence_length)
    tiles: list[Tile] = []
    for row, documents in enumerate(rows):
        queries = _pieces(layout.spans(query_rank), documents)
        keys = queries if key_rank == query_rank else _pieces(layout.spans(key_rank), documents)
        tiles += _row_tiles(ALL_ROWS if len(rows) == 1 else row, queries, keys, mask.causal, query_rank == key_rank)
    return tuple(tiles)


def _pieces(spans: list[Span], documents: tuple[Span, ...]) -> list[Piece]:
    """Cut a rank's chunks at document boundaries, in local order."""
    pieces, local = [], 0
    for start, stop in spans:
        for number, (first, last) in enumerate(documents):
            low, high = max(start, first), min(stop, last)
            if low < high:
                pieces.append(Piece(number, low, local + low - start, high - low))
        local += stop - start
    return pieces


def _row_tiles(row: int, queries: list[Piece], keys: list[Piece], causal: bool, same_rank: bool) -> Iterator[Tile]:
    if causal and same_rank:
        queries = keys = list(_runs(queries))
        for run in queries:
            yield Tile(row, *run.span, *run.span, True)
    by_document: dict[int, list[Piece]] = {}
    for piece in keys:
        by_document.setdefault(piece.document, []).append(piece)
    reads = [
        (piece, _join(k.span for k in by_document.get(piece.document, ()) if not causal or k.start < piece.start))
        for piece in queries
    ]
    for (_, key_spans), group in groupby(reads, key=lambda read: (read[0].document, read[1])):
        for q_start, q_stop in _join(piece.span for piece, _ in group):
            for k_start, k_stop in key_spans:
                yield Tile(row, q_start, q_stop, k_start, k_stop, False)


def _runs(pieces: list[Piece]) -> Iterator[Piece]:
    """Join pieces of one document that are neighbours in local rows.

    A rank's chunks ascend, so such a run is causal in its local rows and one causal square covers it.
    """
    run: Piece | None = None
    for piece in pieces:
        if run and piece.document == run.document and piece.local == run.local + run.length:
            run = run._replace(length=run.length + piece.length)
            continue
        if run:
            yield run
        run = piece
    if run:
        yield run


def _join(spans: Iterator[Span]) -> tuple[Span, ...]:
    """Fuse overlapping and touching spans."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def key_rows(tiles: tuple[Tile, ...]) -> tuple[Span, ...]:
    """The key rows that tiles read, fused: what is worth carrying."""
    return _join((tile.k_start, tile.k_stop) for tile in tiles)


def _shift(tile: Tile, received: tuple[Span, ...]) -> Tile:
    """Count a tile's keys in the concatenation of the received spans."""
    before = 0
    for start, stop in received:
        if start <= tile.k_start and tile.k_stop <= stop:
            return tile._replace(k_start=tile.k_start - start + before, k_stop=tile.k_stop - start + before)
        before += stop - start
    raise AssertionError(f"{tile} reads rows that do not arrive: {received}")
