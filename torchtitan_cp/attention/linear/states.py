"""States across ranks. Over its rows of a document a rank maps the state S that enters to A S + B.

Every rank computes A and B of its segments. Those of one head all go to one rank, which takes the state of every
document from segment to segment and gives each rank the states that enter its segments. Backward, what a segment's
own outputs ask of the state that enters, G, goes the same way in the opposite order: dS <- A^T dS + G. A document's
first segment needs no A, and its last neither A nor B.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.collectives import find_group
from torchtitan_cp.attention.linear.chunks import Inputs
from torchtitan_cp.attention.linear.rows import Stretch, stretches
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.tiles import ALL_ROWS

Shape = tuple[int, ...]
States = dict[Stretch, Tensor]  # `[b, H, K, columns]` each
Segments = list[tuple[Stretch, bool]]  # with whether A is wanted


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
        self.documents = [document for document in stretches(plan) if len(document) > 1]
        self.batch, _, self.heads, self.value_dim = inputs.v.shape
        self.key_dim = inputs.q.shape[-1]
        self.map_dim = map_columns(self.key_dim, rule)
        self.empty = inputs.q.new_empty(0, dtype=accumulation_dtype(inputs.q.dtype))
        self.bounds = [rank * self.heads // self.group.ranks for rank in range(self.group.ranks + 1)]

    def enter(self, summarize: Callable[[Segments], list[list[Tensor]]]) -> tuple[Tensor, Tensor]:
        """(the states that enter this rank's runs, the maps A of the heads that this rank composed).

        Args:
            summarize: gives A and B of segments side by side, or B alone; per part of the heads, per segment.

        Returns:
            `[runs, B, H, K, V]`, zeros where a document begins; and a flat tensor for `leave`. Their sizes do not
            depend on the documents.
        """
        columns: dict[Stretch, int] = {}
        for document in self.documents:
            columns[document[0]] = self.value_dim
            columns |= dict.fromkeys(document[1:-1], self.map_dim + self.value_dim)
        maps = [self.empty]

        def compose(received: States) -> States:
            entering = {}
            for first, *inner, last in self.documents:
                state = received[first]
                for segment in inner:
                    entering[segment] = state
                    transition, added = received[segment].split([self.map_dim, self.value_dim], -1)
                    maps.append(transition.flatten())
                    state = self._apply(transition, state) + added
                entering[last] = state
            return entering

        entering = self._by_heads(columns, summarize, compose)
        kept, most = torch.cat(maps), self.batch * most_maps(self.group.ranks, self.plan.most_runs, self.heads)
        return entering, F.pad(kept, (0, most * self.key_dim * self.map_dim - len(kept)))

    def leave(self, gradients_inside: Callable[[Segments], list[list[Tensor]]], maps: Tensor) -> Tensor:
        """The gradients of the states that leave this rank's runs, `[runs, B, H, K, V]`, zeros where a document ends.

        Args:
            gradients_inside: gives G of segments; per part of the heads, per segment.
            maps: of `enter`.
        """
        columns = {segment: self.value_dim for document in self.documents for segment in document[1:]}

        def compose(received: States) -> States:
            leaving, all_inner = {}, [segment for document in self.documents for segment in document[1:-1]]
            shapes = [self._shape(segment, self.map_dim, self.plan.rank) for segment in all_inner]
            transitions = dict(zip(all_inner, _unpack(maps, shapes), strict=True))
            for first, *inner, last in self.documents:
                gradient = received[last]
                for segment in reversed(inner):
                    leaving[segment] = gradient
                    gradient = self._apply(transitions[segment].mT, gradient) + received[segment]
                leaving[first] = gradient
            return leaving

        return self._by_heads(columns, gradients_inside, compose)

    def _apply(self, transition: Tensor, state: Tensor) -> Tensor:
        return transition @ state if self.map_dim == self.key_dim else transition.view_as(state[..., :1]) * state

    def _by_heads(
        self,
        columns: dict[Stretch, int],
        make: Callable[[Segments], list[list[Tensor]]],
        compose: Callable[[States], States],
    ) -> Tensor:
        """Make this rank's states, compose those of this rank's heads, and return what that gives for its runs.

        Args:
            columns: of the states of every rank.
        """
        ranks, me = range(self.group.ranks), self.plan.rank
        own = [(segment, columns[segment] > self.value_dim) for segment in columns if segment.rank == me]
        made = [torch.cat(x, 1) for x in zip(*make(own), strict=True)]
        parts = [[x[:, first:stop] for x in made] for first, stop in pairwise(self.bounds)]
        by_rank = [[segment for segment in columns if segment.rank == rank] for rank in ranks]
        shapes = [[self._shape(segment, columns[segment], me) for segment in segments] for segments in by_rank]
        received = zip(by_rank, self._trade(parts, shapes), strict=True)
        composed = compose({key: x for keys, tensors in received for key, x in zip(keys, tensors, strict=True)})
        by_rank = [[segment for segment in composed if segment.rank == rank] for rank in ranks]
        parts = [[composed[segment] for segment in segments] for segments in by_rank]
        shapes = [[self._shape(segment, self.value_dim, owner) for segment in by_rank[me]] for owner in ranks]
        runs = self.empty.new_zeros(self.plan.most_runs, self.batch, self.heads, self.key_dim, self.value_dim)
        for segment, *pieces in zip(by_rank[me], *self._trade(parts, shapes), strict=True):
            runs[segment.run, segment.rows] = torch.cat(pieces, 1)
        return runs

    def _shape(self, segment: Stretch, columns: int, owner: int) -> Shape:
        """Of a segment's state, the heads that `owner` composes."""
        batch = self.batch if segment.row == ALL_ROWS else 1
        return batch, self.bounds[owner + 1] - self.bounds[owner], self.key_dim, columns

    def _trade(self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]]) -> list[list[Tensor]]:
        """Give the tensors of part i to rank i, and get those of `shapes[i]` from it."""
        flat = [torch.cat([self.empty, *(x.flatten() for x in part)]) for part in parts]
        received = self.group.exchange(flat, [sum(map(math.prod, of_rank)) for of_rank in shapes])
        return [_unpack(x, of_rank) for x, of_rank in zip(received, shapes, strict=True)]


def _unpack(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The tensors that begin a flat one."""
    sizes = [math.prod(shape) for shape in shapes]
    return [x.view(shape) for x, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)] if sizes else []
