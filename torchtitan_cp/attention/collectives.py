"""Messages between the ranks of a group: the only module here that calls torch.distributed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torchtitan_cp.attention.errors import PlanError

# Renamed in torch 2.13; 2.11 knows the old names only.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Result = TypeVar("Result")
Message = tuple[int, Tensor]  # the other rank, and the tensor that is sent to it or received from it

Watch = Callable[[], AbstractContextManager[None]]
_watches: tuple[Watch, Watch] = (nullcontext, nullcontext)


def watch_messages(waiting: Watch = nullcontext, flying: Watch = nullcontext) -> None:
    """Enter these contexts around every message of this process from now on, for example to time them.

    Args:
        waiting: around each wait for a message. On CUDA the stream waits, not the host: time it with events.
        flying: from the start of a message until the wait for it ends.
    """
    global _watches
    _watches = (waiting, flying)


@dataclass(frozen=True)
class Groups:
    """Registered names of the process groups of one context-parallel group.

    A plan holds names instead of groups, so that it stays plain data.

    Attributes:
        ring: the ranks across which keys travel.
        all_to_all: the ranks that trade heads for sequence.
    """

    ring: str | None = None
    all_to_all: str | None = None


class Pending(Generic[Result]):
    """Messages in flight.

    Args:
        works: handles of torch.distributed.
        finish: makes the result from the received tensors.
        kept: tensors that must live until the messages have arrived.
    """

    def __init__(self, works: Sequence[dist.Work], finish: Callable[[], Result], kept: Sequence[Tensor] = ()) -> None:
        self.works, self.finish, self.kept = works, finish, kept
        if works:
            self.flight = _watches[1]()
            self.flight.__enter__()

    def wait(self) -> Result:
        """Wait until everything has arrived (on CUDA: make the current stream wait) and return the result."""
        if self.works:
            with _watches[0]():
                for work in self.works:
                    work.wait()
            self.flight.__exit__(None, None, None)
        return self.finish()


class Group:
    """A process group, or a single rank alone. All ranks make the same calls in the same order.

    On gloo every message goes directly from rank to rank, which is up to three times faster than gloo's
    collectives; sums are then made here, in rank order.

    Attributes:
        rank: this rank within the group.
        ranks: its size.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.ranks = (group.rank(), group.size()) if group else (0, 1)
        self.direct = group is None or dist.get_backend(group) == "gloo"

    def send_receive(
        self, send: Tensor | None, target: int, receive: Tensor | None, source: int
    ) -> Pending[Tensor | None]:
        """Start a send of a contiguous tensor to one rank and a receive from another; None means no message."""
        sends = [] if send is None else [(target, send)]
        return self._post(sends, [] if receive is None else [(source, receive)], lambda: receive)

    def all_gather(self, x: Tensor) -> Pending[Tensor]:
        """Start to gather tensors of one shape: `[..] -> [P, ..]`."""
        flat = x.flatten()
        gathered = flat.new_empty((self.ranks, flat.numel()))
        result = gathered.view(self.ranks, *x.shape)
        if not self.direct:
            work = _all_gather(gathered.flatten(), flat, group=self.group, async_op=True)
            return Pending([work], lambda: result, [flat])
        gathered[self.rank] = flat
        sends = [(rank, flat) for rank in self._others()]
        return self._post(sends, [(rank, gathered[rank]) for rank in self._others()], lambda: result)

    def reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        """Start to sum over the ranks, each of which keeps its own part: `[P, ..] -> [..]`."""
        x = x.contiguous()
        if not self.direct:
            own = torch.empty_like(x[0])
            work = _reduce_scatter(own.flatten(), x.flatten(), group=self.group, async_op=True)
            return Pending([work], lambda: own, [x])
        parts = torch.empty_like(x)
        parts[self.rank] = x[self.rank]
        return self._post(self._rows(x), self._rows(parts), lambda: parts.sum(0))

    def all_to_all(self, x: Tensor) -> Tensor:
        """Give part i to rank i and get one part from each: `[P, ..] -> [P, ..]`."""
        x = x.contiguous()
        received = torch.empty_like(x)
        received[self.rank] = x[self.rank]
        return self._post(self._rows(x), self._rows(received), lambda: received).wait()

    def maximum(self, x: Tensor) -> Tensor:
        """The element-wise maximum over the ranks."""
        x = x.clone()
        if self.group:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def _others(self) -> list[int]:
        """The other ranks by distance, so that they do not all write to the same one."""
        return [(self.rank + distance) % self.ranks for distance in range(1, self.ranks)]

    def _rows(self, x: Tensor) -> list[Message]:
        """Of `[P, ..]`, one message for each other rank."""
        return [(rank, x[rank]) for rank in self._others()]

    def _post(self, sends: list[Message], receives: list[Message], finish: Callable[[], Result]) -> Pending[Result]:
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for to, x in sends]
        operations += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=source) for source, x in receives]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(works, finish, [x for _, x in (*sends, *receives)])


def _resolve(name: str) -> dist.ProcessGroup:
    registered: Any = name
    return _resolve_process_group(registered)


def find_group(name: str | None, ranks: int) -> Group:
    """The process group registered under `name`; a group of one rank needs none.

    Raises:
        PlanError: there is none, or its size is not `ranks`.
    """
    if ranks == 1:
        return Group()
    if name is None:
        raise PlanError("this plan has no process group", fix="make it with ContextParallel.plan, on every rank")
    group = Group(_resolve(name))
    if group.ranks != ranks:
        raise PlanError(f"the plan is for {ranks} ranks and its process group has {group.ranks}")
    return group


def open_groups(groups: Groups, device_type: str) -> None:
    """Run one collective over each NCCL group: NCCL needs it before some of its ranks exchange messages alone."""
    for name in (groups.ring, groups.all_to_all):
        if name is not None and device_type != "cpu":
            dist.all_reduce(torch.zeros(1, device=device_type), group=_resolve(name))


def gather(x: Tensor, groups: tuple[Group, Group]) -> Tensor:
    """Every rank's tensor of one shape, `[P, ..]`, in rank order: within the all-to-all group, then across the ring."""
    ring, all_to_all_group = groups
    return ring.all_gather(all_to_all_group.all_gather(x).wait()).wait().flatten(0, 1)
