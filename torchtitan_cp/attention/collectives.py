"""Messages between the ranks of a group: everything that attention sends goes through `Group`.

Only a comparison with one process sends more, Python objects; see comparison.py and recording.py.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torchtitan_cp.attention.errors import PlanError

# Renamed in torch 2.13; 2.11 knows the old names only.
_all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Result = TypeVar("Result")
Shape = tuple[int, ...]
Message = tuple[int, Tensor]  # the other rank, and the tensor that is sent to it or received from it

BYTES_AHEAD = 1 << 30
# (CUDA event recorded after the wait for some messages, their bytes)
_ahead: deque[tuple[torch.cuda.Event, int]] = deque()

Watch = Callable[[], AbstractContextManager[None]]
_watches: tuple[Watch, Watch] = (nullcontext, nullcontext)


def watch_messages(during_wait: Watch = nullcontext, in_flight: Watch = nullcontext) -> None:
    """From now on, enter these contexts around every message of this process, for example to time them.

    A call without arguments stops this.

    Args:
        during_wait: around each wait for a message. On CUDA the stream waits, not the host: time it with events.
        in_flight: from the start of a message until the wait for it ends.
    """
    global _watches
    _watches = (during_wait, in_flight)


class Pending(Generic[Result]):
    """Messages in flight.

    Args:
        works: handles of torch.distributed.
        finish: makes the result from the received tensors.
        tensors: those sent and received, which must live until the messages have arrived.
    """

    def __init__(
        self, works: Sequence[dist.Work], finish: Callable[[], Result], tensors: Sequence[Tensor] = ()
    ) -> None:
        self.works, self.finish, self.tensors = works, finish, tensors
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
            if self.tensors[0].is_cuda and not _captures_graph():
                _ahead.append((torch.cuda.current_stream().record_event(), sum(x.nbytes for x in self.tensors)))
        return self.finish()


class Group:
    """A process group by its registered name; without a name, a group of one rank.

    All ranks of a group make the same calls in the same order. On gloo every message goes directly from rank to
    rank, which is up to three times faster than gloo's collectives; sums are then computed here, in rank order.

    Attributes:
        rank: this rank's number in the group; ranks: the size of the group.
        direct: whether messages go from rank to rank.
    """

    def __init__(self, name: str | None = None) -> None:
        self.group = _resolve_process_group(name) if name else None  # type: ignore[arg-type]
        self.rank, self.ranks = (self.group.rank(), self.group.size()) if self.group else (0, 1)
        self.direct = self.group is None or dist.get_backend(self.group) == "gloo"

    def send_receive(self, send: Tensor, target: int, receive: Tensor, source: int) -> Pending[Tensor]:
        """Start to send a contiguous tensor to one rank and to receive from another; empty tensors are not sent."""
        return self._post(_filled([(target, send)]), _filled([(source, receive)]), lambda: receive)

    def all_gather(self, x: Tensor) -> Pending[Tensor]:
        """Start to gather tensors of one shape: `[..] -> [P, ..]`."""
        flat = x.contiguous().flatten()
        gathered = flat.new_empty((self.ranks, flat.numel()))
        result = gathered.view(self.ranks, *x.shape)
        if not self.direct:
            work = _all_gather(gathered.flatten(), flat, group=self.group, async_op=True)
            return Pending([work], lambda: result, [flat])
        return self._trade(flat.expand(self.ranks, -1), gathered, lambda: result)

    def reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        """Start to sum over the ranks, each of which keeps its own part: `[P, ..] -> [..]`."""
        x = x.contiguous()
        if not self.direct:
            total = torch.empty_like(x[0])
            work = _reduce_scatter(total.flatten(), x.flatten(), group=self.group, async_op=True)
            return Pending([work], lambda: total, [x])
        parts = torch.empty_like(x)
        return self._trade(x, parts, lambda: parts.sum(0))

    def uneven_all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[Shape]]) -> list[list[Tensor]]:
        """Send the flat part i to rank i, and receive tensors of `shapes[i]` from it; empty parts are not sent."""
        received = [x.new_empty(sum(map(math.prod, of_rank))) for x, of_rank in zip(parts, shapes, strict=True)]
        self._trade(parts, received, lambda: received).wait()
        return [unpack(x, of_rank) for x, of_rank in zip(received, shapes, strict=True)]

    def _trade(
        self, parts: Sequence[Tensor] | Tensor, received: list[Tensor] | Tensor, finish: Callable[[], Result]
    ) -> Pending[Result]:
        """Start to send part i to rank i, in an order in which not all ranks write to the same one at once."""
        received[self.rank] = parts[self.rank]
        others = [(self.rank + distance) % self.ranks for distance in range(1, self.ranks)]
        sends, receives = ([(rank, tensors[rank]) for rank in others] for tensors in (parts, received))
        return self._post(_filled(sends), _filled(receives), finish)

    def _post(self, sends: list[Message], receives: list[Message], finish: Callable[[], Result]) -> Pending[Result]:
        """Start all messages; everything that travels from rank to rank passes here."""
        _limit_bytes_ahead()
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for to, x in sends]
        operations += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=source) for source, x in receives]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(works, finish, [x for _, x in (*sends, *receives)])


def _limit_bytes_ahead() -> None:
    """Let the host run ahead of a GPU by BYTES_AHEAD of messages, or by the last two messages if they are larger.

    However early a message is freed, its memory can be reused only when the GPU is past it (`record_stream`). A host
    that has launched the steps of many layers would need new memory for each. `limit_all_gathers` of FSDP1 is the same
    remedy. The GPU does not run out of work: it still has the work between the last two messages.
    """
    if _captures_graph():  # while it captures, events may not be queried, and memory comes from a pool of its own
        return
    while _ahead and (_ahead[0][0].query() or (len(_ahead) > 2 and sum(size for _, size in _ahead) > BYTES_AHEAD)):
        _ahead.popleft()[0].synchronize()


def _captures_graph() -> bool:
    """Whether CUDA is capturing launches into a graph, as torch.compile can."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _filled(messages: list[Message]) -> list[Message]:
    """The messages that are not empty."""
    return [(rank, x) for rank, x in messages if x.numel()]


def unpack(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Views of the tensors of these shapes that a flat tensor begins with."""
    sizes = [math.prod(shape) for shape in shapes]
    return [x.view(shape) for x, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


def find_group(names: tuple[str, ...], ranks: int) -> Group:
    """The first of the process groups registered under these names that has `ranks` ranks; for one rank, no group.

    Raises:
        PlanError: none of them has.
    """
    for group in (Group(), *map(Group, names)):
        if group.ranks == ranks:
            return group
    if not names:
        raise PlanError("this plan has no process group", fix="make it with ContextParallel.plan, on every rank")
    raise PlanError(
        "linear attention and convolutions need one group of all context-parallel ranks, and the mesh has two axes",
        fix="give ContextParallel the same ranks as a 1-D mesh too: whole_mesh",
    )


def open_groups(names: tuple[str, ...], device_type: str) -> None:
    """Run one collective in each NCCL group, which NCCL needs before only some of its ranks exchange messages."""
    for name in names if device_type != "cpu" else ():
        Group(name).all_gather(torch.zeros(1, device=device_type)).wait()


def gather(x: Tensor, groups: tuple[Group, Group]) -> Tensor:
    """Every rank's tensor of one shape, `[P, ..]`, in rank order: within the all-to-all group, then across the ring."""
    ring, all_to_all_group = groups
    return ring.all_gather(all_to_all_group.all_gather(x).wait()).wait().flatten(0, 1)
