"""Messages between the ranks of a group: the only place of the library that touches torch.distributed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torchtitan_cp.attention.errors import PlanError

# Renamed in torch 2.13; 2.11 knows the old names only.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Watch = Callable[[], AbstractContextManager[None]]
_watches: tuple[Watch, Watch] = (nullcontext, nullcontext)


def watch_messages(waiting: Watch = nullcontext, flying: Watch = nullcontext) -> None:
    """Enter these around the messages of this process from now on, as to time them.

    Args:
        waiting: around every wait for a message. On CUDA it is the stream that waits, and a stream's clock that tells
            how long.
        flying: from a message's posting until the wait for it is over.
    """
    global _watches
    _watches = (waiting, flying)


@dataclass(frozen=True)
class Groups:
    """Registered names of the process groups of one context-parallel group.

    A plan carries names and not groups, so that it stays plain data.

    Attributes:
        ring: the ranks across which keys travel.
        all_to_all: the ranks with which this one trades heads for sequence.
    """

    ring: str | None = None
    all_to_all: str | None = None


class Pending(Protocol):
    """A message in flight."""

    def wait(self) -> Tensor | None:
        """What arrived, once it has (on CUDA: once the stream may use it)."""
        ...


class Group(Protocol):
    """A way to exchange messages with the other ranks; all ranks call the same in the same order.

    Attributes:
        rank: this rank within the group.
        ranks: its size.
    """

    rank: int
    ranks: int

    def exchange(self, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Pending:
        """Start a send of a contiguous tensor to one rank and a receive from another; either may be None."""
        ...

    def all_gather(self, x: Tensor) -> Pending:
        """Start gathering tensors of one shape: `[..] -> [P, ..]`."""
        ...

    def reduce_scatter(self, x: Tensor) -> Pending:
        """Start summing over the ranks and keeping one's own part: `[P, ..] -> [..]`."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """Give part i to rank i, and get one part from each: `[P, ..] -> [P, ..]`."""
        ...

    def maximum(self, x: Tensor) -> Tensor:
        """The largest over the ranks, element by element."""
        ...


class Work:
    """Works of torch.distributed, the tensors they read and write, and the one to hand out."""

    def __init__(self, works: list[dist.Work], result: Tensor | None, *kept: Tensor | None) -> None:
        self.works, self.result, self.kept = works, result, kept
        if works:
            self.flight = _watches[1]()
            self.flight.__enter__()

    def wait(self) -> Tensor | None:
        if self.works:
            with _watches[0]():
                for work in self.works:
                    work.wait()
            self.flight.__exit__(None, None, None)
        return self.result


class ProcessGroup:
    """A Group of torch.distributed.

    On gloo every message goes straight from rank to rank: that is up to three times faster than its
    collectives, and sums are made here in the order of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.direct = dist.get_backend(group) == "gloo"

    def exchange(self, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Work:
        return self._post([(to, send)], [(source, receive)], receive)

    def all_gather(self, x: Tensor) -> Pending:
        flat = x.flatten()
        gathered = flat.new_empty((self.ranks, flat.numel()))
        result = gathered.view(self.ranks, *x.shape)
        if not self.direct:
            work = _all_gather(gathered.flatten(), flat, group=self.group, async_op=True)
            return Work([work], result, flat)
        gathered[self.rank] = flat
        return self._post([(rank, flat) for rank in self._others()], [(r, gathered[r]) for r in self._others()], result)

    def reduce_scatter(self, x: Tensor) -> Pending:
        x = x.contiguous()
        if not self.direct:
            own = torch.empty_like(x[0])
            return Work([_reduce_scatter(own.flatten(), x.flatten(), group=self.group, async_op=True)], own, x)
        received = torch.empty_like(x)
        parts = [(rank, x[rank]) for rank in self._others()]
        arriving = self._post(parts, [(rank, received[rank]) for rank in self._others()], received)
        return Summed(arriving, x[self.rank], self.rank)

    def all_to_all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        received = torch.empty_like(x)
        received[self.rank] = x[self.rank]
        parts = [(rank, x[rank]) for rank in self._others()]
        self._post(parts, [(rank, received[rank]) for rank in self._others()], None).wait()
        return received

    def maximum(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def _others(self) -> list[int]:
        """The other ranks by distance, so that not all write to one at a time."""
        return [(self.rank + distance) % self.ranks for distance in range(1, self.ranks)]

    def _post(
        self,
        sends: Sequence[tuple[int, Tensor | None]],
        receives: Sequence[tuple[int, Tensor | None]],
        result: Tensor | None,
    ) -> Work:
        """Start messages to and from ranks; None is no message."""
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for to, x in sends if x is not None]
        operations += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=r) for r, x in receives if x is not None]
        kept = [x for _, x in (*sends, *receives)]
        return Work(dist.batch_isend_irecv(operations) if operations else [], result, *kept)


class Summed:
    """Parts of a sum in flight; they are added in the order of the ranks, whichever comes first."""

    def __init__(self, arriving: Work, own: Tensor, rank: int) -> None:
        self.arriving, self.own, self.rank = arriving, own, rank

    def wait(self) -> Tensor:
        parts = self.arriving.wait()
        assert parts is not None
        parts[self.rank] = self.own
        return parts.sum(0)


class Alone:
    """The Group of a single rank, which has nobody to write to."""

    rank, ranks = 0, 1

    def exchange(self, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Work:
        raise AssertionError("a single rank exchanges nothing")

    def all_gather(self, x: Tensor) -> Work:
        return Work([], x.unsqueeze(0))

    def reduce_scatter(self, x: Tensor) -> Work:
        return Work([], x[0])

    def all_to_all(self, x: Tensor) -> Tensor:
        return x

    def maximum(self, x: Tensor) -> Tensor:
        return x


def find_group(name: str | None, ranks: int) -> Group:
    """The process group registered under `name`, of the size that a plan expects.

    Raises:
        PlanError: there is none, or it has another size.
    """
    if ranks == 1:
        return Alone()
    if name is None:
        raise PlanError("this plan has no process group", fix="make it with ContextParallel.plan, on every rank")
    registered: Any = name
    group = ProcessGroup(_resolve_process_group(registered))
    if group.ranks != ranks:
        raise PlanError(f"the plan is for {ranks} ranks and its process group has {group.ranks}")
    return group


def open_groups(groups: Groups, device_type: str) -> None:
    """Call every rank of NCCL groups together once: only then may some of them exchange messages alone."""
    if device_type == "cpu":
        return
    for name in (groups.ring, groups.all_to_all):
        if name is not None:
            registered: Any = name
            dist.all_reduce(torch.zeros(1, device=device_type), group=_resolve_process_group(registered))


def find_groups(groups: Groups | None, ranks: int, all_to_all_ranks: int) -> tuple[Group, Group]:
    """(ring, all-to-all) groups of a plan for P = `ranks`."""
    ring, trade = (groups.ring, groups.all_to_all) if groups else (None, None)
    return find_group(ring, ranks // all_to_all_ranks), find_group(trade, all_to_all_ranks)


def gather(x: Tensor, groups: tuple[Group, Group]) -> Tensor:
    """Every rank's tensor of the same shape, `[P, ..]`, in rank order: within a group first, then across."""
    ring, trade = groups
    inner = trade.all_gather(x).wait()
    assert inner is not None
    outer = ring.all_gather(inner).wait()
    assert outer is not None
    return outer.flatten(0, 1)


def sum_ranks(x: Tensor, groups: Groups | None, ranks: int, all_to_all_ranks: int) -> Tensor:
    """The sum of a small tensor over the P = `ranks` of a context-parallel group; without gradient."""
    return gather(x.detach(), find_groups(groups, ranks, all_to_all_ranks)).sum(0)
