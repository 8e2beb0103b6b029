"""A document's segments on the ranks, and the states that cross between them.

Over its rows of a document a rank maps the state S that enters to A S + B. Every rank computes A and B of its segments.
Those of one head all go to one rank, which takes the state of every document from segment to segment and gives each
rank the states that enter its segments. Backward, G, the gradient of the entering state from the segment's own outputs,
goes the same way in the opposite order: dS <- A^T dS + G. A document's first segment needs no A, and its last neither
A nor B.
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

ROWS = BoundedCache(256 << 20)  # of rows that are read or written in linear layers, for the newest steps


class Inputs(NamedTuple):
    """What the rule takes: rows, or these in chunks.

    Attributes:
        q, k: `[N, B, Hk, 1, C, K]`, or `[B, s, Hk, K]`.
        v: `[N, B, Hk, R, C, V]`, or `[B, s, Hv, V]`.
        g: `[N, B, Hk, R, C, 1]`, or `[.., C, K]` for KDA; `[B, s, Hv, 1 or K]`; at most 0.
        beta: `[N, B, Hk, R, C, 1]`, or `[B, s, Hv, 1]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class DocumentSegment(NamedTuple):
    """The rows of a document that lie side by side on one rank.

    Attributes:
        rank, run: who holds it, and in which of its runs; a run has at most one that began elsewhere, at its start,
            and one that goes on elsewhere, at its end.
        row: batch row, or ALL_ROWS.
        local: its first local row; tokens: how many it has.
        begin: how far its first token is from the run's; offset: from the document's.
        continues: whether its document goes on after it.
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
    """Those of each document, in the order of the sequence."""
    runs, result = plan.layout.runs(plan.mask, plan.sequence_length), []
    for row, segments in documents_of(plan.layout, plan.mask, plan.sequence_length):
        document, first, last = [], segments[0].start, segments[-1].stop
        for rank, local, start, stop in segments:
            run = bisect_right(runs[rank], local) - 1
            begin = local - runs[rank][run]
            document.append(DocumentSegment(rank, run, row, local, stop - start, begin, start - first, stop < last))
        result.append(tuple(document))
    return tuple(result)


def own_segments(plan: Plan) -> list[DocumentSegment]:
    """Those of this rank."""
    return [one for document in document_segments(plan) for one in document if one.rank == plan.rank]


def document_offsets(plan: Plan, like: Tensor) -> Tensor:
    """`offsets_on_host` on the device of `like`."""
    return ROWS.get(("offsets", plan), like, lambda: to_device(offsets_on_host(plan), like))


def offsets_on_host(plan: Plan) -> Tensor:
    """How far each local token is from its document's first, `[1 or B, S/P]` int64; -1 for padding."""
    offsets = torch.full((len(plan.segments), plan.local_tokens), -1)
    for one in own_segments(plan):
        offsets[one.rows, one.local : one.local + one.tokens] = torch.arange(one.offset, one.offset + one.tokens)
    return offsets


@keep_newest
def whole_sequence(plan: Plan) -> Plan:
    """The plan of one rank alone for the same documents."""
    return Plan(plan.sequence_length, plan.mask, contiguous(plan.sequence_length, 1), 0)


States = dict[DocumentSegment, Tensor]  # `[b, h, K, columns]` each
Summarize = Callable[[list[DocumentSegment]], list[Tensor]]


def most_maps(ranks: int, most_runs: int, heads: int) -> int:
    """Maps A that a rank composes for one batch row at most: none for the first and last run of the sequence."""
    return max(0, ranks * most_runs - 2) * -(-heads // ranks)


def map_columns(key_dim: int, rule: str) -> int:
    """Columns of a map A: a scan's is diagonal."""
    return 1 if rule == "scan" else key_dim


class StateExchange:
    """The states that cross ranks in one call of an operator.

    Args:
        inputs: this rank's rows.
        plan: this rank's.
        rule: see `make_factors`.
    """

    def __init__(self, inputs: Inputs, plan: Plan, rule: str) -> None:
        self.plan, self.group = plan, find_group(plan.groups, plan.ranks)
        self.documents = [document for document in document_segments(plan) if len(document) > 1]
        self.inner = [segment for document in self.documents for segment in document[1:-1]]
        self.batch, _, self.heads, self.value_dim = inputs.v.shape
        self.rows = self.batch if len(plan.segments) == 1 else 1  # of a segment
        self.key_dim = inputs.q.shape[-1]
        self.map_dim = map_columns(self.key_dim, rule)
        self.empty = inputs.q.new_empty(0, dtype=accumulation_dtype(inputs.q.dtype))
        bounds = [rank * self.heads // plan.ranks for rank in range(plan.ranks + 1)]
        self.shares = [stop - first for first, stop in pairwise(bounds)]  # of the heads, what each rank composes

    def enter(self, summarize: Summarize) -> tuple[Tensor, Tensor]:
        """(the states that enter this rank's runs, the maps A of the heads that this rank composed).

        Args:
            summarize: gives A and B of segments side by side, or B alone of one in which its document begins.

        Returns:
            `[runs, B, H, K, V]`, zeros where a document begins; and a flat tensor for `leave`. Their sizes depend on
            the documents by `plan.most_runs` alone.
        """
        added, maps = self._to_composers([document[:-1] for document in self.documents], summarize, self.map_dim), {}
        for segment in self.inner:
            maps[segment], added[segment] = added[segment].split([self.map_dim, self.value_dim], -1)
        kept = self._flat(maps.values())
        most = self.batch * most_maps(self.plan.ranks, self.plan.most_runs, self.heads) * self.key_dim * self.map_dim
        return self._to_runs(self._compose(self.documents, maps, added)), F.pad(kept, (0, most - len(kept)))

    def leave(self, gradients_inside: Summarize, maps: Tensor) -> Tensor:
        """The gradients of the states that leave this rank's runs, `[runs, B, H, K, V]`, zeros where a document ends.

        Args:
            gradients_inside: gives G of segments.
            maps: of `enter`.
        """
        backward = [document[::-1] for document in self.documents]
        added = self._to_composers([document[:-1] for document in backward], gradients_inside)
        transposed = [x.mT for x in unpack(maps, [self._shape(self.plan.rank, self.map_dim)] * len(self.inner))]
        return self._to_runs(self._compose(backward, dict(zip(self.inner, transposed, strict=True)), added))

    def _compose(self, documents: Sequence[Sequence[DocumentSegment]], maps: States, added: States) -> States:
        """What reaches the segments of each document from those before them in this order."""
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
        """Make this rank's states, and get from all ranks those of the heads that this rank composes.

        Args:
            senders: the segments that give a state, of each document.
            map_dim: columns that those of them have on top whose document neither begins nor ends in them.
        """
        ranks, me = range(self.plan.ranks), self.plan.rank
        by_rank = [[s for document in senders for s in document if s.rank == rank] for rank in ranks]
        made = [x.split(self.shares, 1) for x in (make(by_rank[me]) if by_rank[me] else [])]
        columns = [[self.value_dim + map_dim * (s.offset > 0 and s.continues) for s in held] for held in by_rank]
        shapes = [[self._shape(me, number) for number in of_rank] for of_rank in columns]
        received = self.group.uneven_all_to_all([self._flat(x[rank] for x in made) for rank in ranks], shapes)
        return dict(zip(chain(*by_rank), chain(*received), strict=True))

    def _to_runs(self, states: States) -> Tensor:
        """Give each rank the states of its segments, and put those of this rank, of all heads, at their runs."""
        parts = [self._flat(x for s, x in states.items() if s.rank == rank) for rank in range(self.plan.ranks)]
        own = [s for s in states if s.rank == self.plan.rank]
        shapes = [[self._shape(owner, self.value_dim)] * len(own) for owner in range(self.plan.ranks)]
        runs = self.empty.new_zeros(self.plan.most_runs, self.batch, self.heads, self.key_dim, self.value_dim)
        for segment, *pieces in zip(own, *self.group.uneven_all_to_all(parts, shapes), strict=True):
            runs[segment.run, segment.rows] = torch.cat(pieces, 1)
        return runs

    def _shape(self, owner: int, columns: int) -> Shape:
        """Of a segment's state, the heads that `owner` composes."""
        return self.rows, self.shares[owner], self.key_dim, columns

    def _flat(self, pieces: Iterable[Tensor]) -> Tensor:
        return torch.cat([self.empty, *(x.flatten() for x in pieces)])
