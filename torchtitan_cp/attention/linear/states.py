"""A document's segments on the ranks, and the states that cross between them.

A segment maps the state S that enters it to A S + B. Every rank computes A and B of its segments, and sends those of
each head to one rank. That rank composes the maps from segment to segment, and sends each rank the states that enter
its segments. In backward, the same happens in reverse order with G, the gradient of the entering state from the
segment's own outputs: dS <- A^T dS + G. A document's first segment needs no A, and its last neither A nor B.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.caching import BoundedCache, keep_newest, to_device
from torchtitan_cp.attention.collectives import Shape, find_group, unpack
from torchtitan_cp.attention.layout import documents_of
from torchtitan_cp.attention.layouts import contiguous
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.tiles import ALL_ROWS

INDEX_CACHE = BoundedCache(256 << 20)  # indices of the rows that linear layers read or write, for the newest plans


class Inputs(NamedTuple):
    """Inputs of the rule, by rows or by chunks.

    Attributes:
        q, k: `[B, s, Hk, K]`; in chunks `[N, B, Hk, 1, C, K]`.
        v: `[B, s, Hv, V]`; in chunks `[N, B, Hk, R, C, V]`.
        g: `[B, s, Hv, 1]`, or K in place of 1 for KDA; in chunks `[N, B, Hk, R, C, 1 or K]`; at most 0.
        beta: `[B, s, Hv, 1]`; in chunks `[N, B, Hk, R, C, 1]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class DocumentSegment(NamedTuple):
    """Consecutive rows of one document on one rank.

    Attributes:
        rank, run: the rank that holds it, and the run (see `Layout.runs`). In a run, only the first segment can have
            begun on another rank, and only the last can continue on another.
        row: batch row, or ALL_ROWS.
        local: its first local row; tokens: how many it has.
        begin: tokens from the start of the run to its first; offset: from the start of the document.
        continues: whether its document continues after it.
    """

    rank: int
    run: int
    row: int
    local: int
    tokens: int
    begin: int
    offset: int
    continues: bool

    @property
    def rows(self) -> slice:
        """The batch rows."""
        return slice(None) if self.row == ALL_ROWS else slice(self.row, self.row + 1)


@keep_newest
def document_segments(plan: Plan) -> tuple[tuple[DocumentSegment, ...], ...]:
    """The segments of each document, in the order of the sequence."""
    runs, result = plan.layout.runs(plan.mask, plan.sequence_length), []
    for row, segments in documents_of(plan.layout, plan.mask, plan.sequence_length):
        document, first, last = [], segments[0].start, segments[-1].stop
        for rank, local, start, stop in segments:
            run = bisect_right(runs[rank], local) - 1
            begin = local - runs[rank][run]
            document.append(DocumentSegment(rank, run, row, local, stop - start, begin, start - first, stop < last))
        result.append(tuple(document))
    return tuple(result)


def local_segments(plan: Plan) -> list[DocumentSegment]:
    """The segments on this rank."""
    return [segment for document in document_segments(plan) for segment in document if segment.rank == plan.rank]


def document_offsets(plan: Plan, like: Tensor) -> Tensor:
    """How far each local token is from its document's first, `[1 or B, S/P]` int64; -1 for padding."""

    def make() -> Tensor:
        offsets = torch.full((len(plan.segments), plan.local_tokens), -1)
        for s in local_segments(plan):
            offsets[s.rows, s.local : s.local + s.tokens] = torch.arange(s.offset, s.offset + s.tokens)
        return to_device(offsets, like)

    return INDEX_CACHE.get(("offsets", plan), like, make)


@keep_newest
def whole_sequence(plan: Plan) -> Plan:
    """A plan of the same documents on one rank."""
    return Plan(plan.sequence_length, plan.mask, contiguous(plan.sequence_length, 1), 0)


States = dict[DocumentSegment, Tensor]  # `[b, h, K, columns]` each
Summarize = Callable[[list[DocumentSegment]], list[Tensor]]


def most_maps(ranks: int, most_runs: int, heads: int) -> int:
    """Most maps A that a rank composes for one batch row; the first and last run of the sequence need none."""
    return max(0, ranks * most_runs - 2) * -(-heads // ranks)


def map_columns(key_dim: int, rule: str) -> int:
    """Columns of a map A, which is diagonal for a scan."""
    return 1 if rule == "scan" else key_dim


class StateExchange:
    """Passes states between ranks, in one call of an operator.

    Args:
        inputs: this rank's rows.
        rule: of a "scan" the maps A are diagonal and have one column, of the delta rules K columns.
    """

    def __init__(self, inputs: Inputs, plan: Plan, rule: str) -> None:
        self.plan, self.group = plan, find_group(plan.groups, plan.ranks)
        self.documents = [document for document in document_segments(plan) if len(document) > 1]
        self.inner = [segment for document in self.documents for segment in document[1:-1]]
        self.batch, _, self.heads, self.value_dim = inputs.v.shape
        self.segment_rows = self.batch if len(plan.segments) == 1 else 1  # batch rows of a segment
        self.key_dim = inputs.q.shape[-1]
        self.map_dim = map_columns(self.key_dim, rule)
        self.empty = inputs.q.new_empty(0, dtype=accumulation_dtype(inputs.q.dtype))
        bounds = [rank * self.heads // plan.ranks for rank in range(plan.ranks + 1)]
        self.shares = [stop - first for first, stop in pairwise(bounds)]  # how many heads each rank composes

    def enter(self, summarize: Summarize) -> tuple[Tensor, Tensor]:
        """The states that enter this rank's runs, and the maps A of the heads that this rank composed.

        Args:
            summarize: computes A and B of segments side by side, or only B if the segment begins its document.

        Returns:
            (`[runs, B, H, K, V]`, zeros where a document begins; a flat tensor for `leave`). Of the documents, only
            `plan.most_runs` affects their sizes.
        """
        added, maps = self._to_composers([document[:-1] for document in self.documents], summarize, self.map_dim), {}
        for segment in self.inner:
            maps[segment], added[segment] = added[segment].split([self.map_dim, self.value_dim], -1)
        flat_maps = self._flatten(maps.values())
        most = self.batch * most_maps(self.plan.ranks, self.plan.most_runs, self.heads) * self.key_dim * self.map_dim
        return self._to_runs(self._compose(self.documents, maps, added)), F.pad(flat_maps, (0, most - len(flat_maps)))

    def leave(self, gradients_inside: Summarize, maps: Tensor) -> Tensor:
        """The gradients of the states that leave this rank's runs, `[runs, B, H, K, V]`, zeros where a document ends.

        Args:
            gradients_inside: computes G of segments.
            maps: from `enter`.
        """
        backward = [document[::-1] for document in self.documents]
        added = self._to_composers([document[:-1] for document in backward], gradients_inside)
        transposed = [x.mT for x in unpack(maps, [self._shape(self.plan.rank, self.map_dim)] * len(self.inner))]
        return self._to_runs(self._compose(backward, dict(zip(self.inner, transposed, strict=True)), added))

    def _compose(self, documents: Sequence[Sequence[DocumentSegment]], maps: States, added: States) -> States:
        """The state that reaches each segment from those before it in this order."""
        reaching = {}
        for first, *inner, last in documents:
            state = added[first]
            for segment in inner:
                reaching[segment] = state
                state = self._apply(maps[segment], state) + added[segment]
            reaching[last] = state
        return reaching

    def _apply(self, transition: Tensor, state: Tensor) -> Tensor:
        return transition @ state if self.map_dim == self.key_dim else transition.view_as(state[..., :1]) * state

    def _to_composers(self, senders: Sequence[Sequence[DocumentSegment]], make: Summarize, map_dim: int = 0) -> States:
        """Compute this rank's states, and get from all ranks those of the heads that this rank composes.

        Args:
            senders: the segments of each document whose state is sent.
            map_dim: extra columns of segments in the middle of their document.
        """
        ranks, this_rank = range(self.plan.ranks), self.plan.rank
        by_rank = [[s for document in senders for s in document if s.rank == rank] for rank in ranks]
        states = [x.split(self.shares, 1) for x in (make(by_rank[this_rank]) if by_rank[this_rank] else [])]
        shapes = [
            [self._shape(this_rank, self.value_dim + map_dim * (s.offset > 0 and s.continues)) for s in segments]
            for segments in by_rank
        ]
        received = self.group.uneven_all_to_all([self._flatten(x[rank] for x in states) for rank in ranks], shapes)
        return dict(zip(chain(*by_rank), chain(*received), strict=True))

    def _to_runs(self, states: States) -> Tensor:
        """Send each rank the states of its segments; this rank's, with all heads, by run."""
        parts = [self._flatten(x for s, x in states.items() if s.rank == rank) for rank in range(self.plan.ranks)]
        local = [s for s in states if s.rank == self.plan.rank]
        shapes = [[self._shape(composer, self.value_dim)] * len(local) for composer in range(self.plan.ranks)]
        runs = self.empty.new_zeros(self.plan.most_runs, self.batch, self.heads, self.key_dim, self.value_dim)
        for segment, *pieces in zip(local, *self.group.uneven_all_to_all(parts, shapes), strict=True):
            runs[segment.run, segment.rows] = torch.cat(pieces, 1)
        return runs

    def _shape(self, composer: int, columns: int) -> Shape:
        """The shape of those heads of a segment's state that a rank composes."""
        return self.segment_rows, self.shares[composer], self.key_dim, columns

    def _flatten(self, pieces: Iterable[Tensor]) -> Tensor:
        return torch.cat([self.empty, *(x.flatten() for x in pieces)])
