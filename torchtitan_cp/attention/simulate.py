"""A context-parallel group in one process: its ranks run one after another, with real kernels and no network.

For numerics at more ranks than there are machines, for tests, benchmarks and planning. Each rank is a
thread that runs the code of the strategies as it is; only the messages differ, which go through memory. A
thread holds the floor until it waits for a message, so that one rank computes at a time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Thread

import torch
from torch import Tensor

from torchtitan_cp.attention.api import check_shapes, make_plan
from torchtitan_cp.attention.kernels import choose_kernel
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.operator import resolved
from torchtitan_cp.attention.plan import Plan, in_global_order
from torchtitan_cp.attention.strategies import STRATEGIES, Call, choose_strategy
from torchtitan_cp.attention.strategies.strategy import Residuals


@dataclass(frozen=True)
class Simulation:
    """What all ranks together computed.

    Attributes:
        out: `[B, S, Hq, Dv]`; lse: `[B, S, Hq]`, in the order of the sequence.
        dq, dk, dv, dsinks: gradients as of one process; None without `dout`, dsinks without `sinks`.
        plans: of each rank.
        forward_bytes, backward_bytes: sent by each rank in each of its messages, in order.
        forward_seconds, backward_seconds: each rank's own time, without waiting.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None
    plans: tuple[Plan, ...]
    forward_bytes: tuple[tuple[int, ...], ...]
    backward_bytes: tuple[tuple[int, ...], ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]


def simulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranks: int,
    mask: AttentionMask | None = None,
    strategy: str = "auto",
    kernel: str = "auto",
    layout: str = "auto",
    all_to_all_ranks: int = 1,
    kv_transfer: str = "exact",
    scale: float | None = None,
    sinks: Tensor | None = None,
    dout: Tensor | None = None,
) -> Simulation:
    """Attention of full tensors as `ranks` ranks would compute it, forward and, given `dout`, backward.

    Args:
        q: `[B, S, Hq, Dqk]`; k: `[B, S, Hkv, Dqk]`; v: `[B, S, Hkv, Dv]`; dout: `[B, S, Hq, Dv]`.
        ranks: P. The rest is as for `make_plan` and `attend`.

    Raises:
        LayoutError, PlanError: as `make_plan` and `attend` do.
    """
    mask = mask or AttentionMask()
    if strategy == "auto":
        strategy = "hybrid" if all_to_all_ranks > 1 else choose_strategy(q.shape[2], k.shape[2], ranks, mask.band)
    plans = tuple(
        resolved(
            make_plan(
                q.shape[1],
                mask=mask,
                ranks=ranks,
                rank=rank,
                strategy=strategy,
                kernel=kernel,
                layout=layout,
                all_to_all_ranks=all_to_all_ranks,
                kv_transfer=kv_transfer,
            ),
            strategy,
        )
        for rank in range(ranks)
    )
    check_shapes(plans[0].shard(q), plans[0].shard(k), plans[0].shard(v), plans[0], sinks)
    chosen, exchange = choose_kernel(kernel, q, v), STRATEGIES[strategy]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kept: list[Residuals | None] = [None] * ranks

    def call_of(rank: int, hall: "Hall") -> Call:
        inner = plans[rank].all_to_all_ranks
        ring = hall.group(rank, tuple(range(rank % inner, ranks, inner)))
        trade = hall.group(rank, tuple(range(rank // inner * inner, rank // inner * inner + inner)))
        return Call(plans[rank], chosen, scale, k.shape[2], ring, trade)

    def forward(rank: int, hall: "Hall") -> tuple[Tensor, ...]:
        q_local, k_local, v_local = (plans[rank].shard(x) for x in (q, k, v))
        out, lse, kept[rank] = exchange.forward(q_local, k_local, v_local, sinks, call_of(rank, hall))
        return out, lse

    def backward(rank: int, hall: "Hall") -> tuple[Tensor, ...]:
        residuals = kept[rank]
        assert dout is not None
        assert residuals is not None
        gradients = exchange.backward(plans[rank].shard(dout), residuals, sinks, call_of(rank, hall))
        return tuple(x for x in gradients if x is not None)

    def whole(parts: list[tuple[Tensor, ...]], which: int) -> Tensor:
        return torch.cat(in_global_order([part[which] for part in parts], plans[0].layout, 1), 1)

    forward_hall = Hall(ranks)
    outputs = forward_hall.run(forward)
    backward_hall, gradients = Hall(ranks), None
    if dout is not None:
        gradients = backward_hall.run(backward)
    dq, dk, dv = (whole(gradients, which) for which in range(3)) if gradients else (None, None, None)
    dsinks = torch.stack([parts[3] for parts in gradients]).sum(0) if gradients and sinks is not None else None
    return Simulation(
        whole(outputs, 0),
        whole(outputs, 1),
        dq,
        dk,
        dv,
        dsinks,
        plans,
        tuple(tuple(sent) for sent in forward_hall.sent_bytes),
        tuple(tuple(sent) for sent in backward_hall.sent_bytes),
        tuple(forward_hall.seconds),
        tuple(backward_hall.seconds),
    )


class Hall:
    """Where simulated ranks meet: one has the floor at a time, and messages lie in boxes until they are taken.

    Attributes:
        sent_bytes: per rank, of each message to another rank.
        seconds: per rank, how long it had the floor.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.floor = Condition()
        self.boxes: dict[tuple[tuple[int, ...], int, int, int], Tensor] = {}
        self.sent_bytes: list[list[int]] = [[] for _ in range(ranks)]
        self.seconds = [0.0] * ranks
        self.failure: BaseException | None = None

    def group(self, rank: int, members: tuple[int, ...]) -> "SimulatedGroup":
        """The group of these ranks as one of them sees it."""
        return SimulatedGroup(self, members, members.index(rank))

    def run(self, function: Callable[[int, "Hall"], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Run `function(rank, hall)` as every rank, and return what each returned.

        Raises:
            whatever the first rank that failed raised.
        """
        results: list[tuple[Tensor, ...]] = [()] * self.ranks

        def speak(rank: int) -> None:
            try:
                with self.floor, torch.no_grad():
                    begun = time.perf_counter()
                    self.seconds[rank] -= begun
                    results[rank] = function(rank, self)
                    self._settle()
                    self.seconds[rank] += time.perf_counter()
            except BaseException as error:
                with self.floor:
                    self.failure = self.failure or error
                    self.floor.notify_all()

        threads = [Thread(target=speak, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure
        return results

    def post(self, key: tuple[tuple[int, ...], int, int, int], sender: int, message: Tensor) -> None:
        """Lay a copy of a message into its box."""
        self.boxes[key] = message.clone()
        self.sent_bytes[sender].append(message.numel() * message.element_size())
        self.floor.notify_all()

    def take(self, key: tuple[tuple[int, ...], int, int, int], receiver: int) -> Tensor:
        """A message, once it lies in its box; others have the floor until then."""
        with self._listening(receiver):
            self.floor.wait_for(lambda: key in self.boxes or self.failure is not None)
        if key not in self.boxes:
            raise RuntimeError(f"another rank failed while rank {receiver} waited") from self.failure
        return self.boxes.pop(key)

    @contextmanager
    def _listening(self, rank: int) -> Iterator[None]:
        self._settle()
        self.seconds[rank] += time.perf_counter()
        yield
        self.seconds[rank] -= time.perf_counter()

    def _settle(self) -> None:
        """Let a device finish, so that its time counts for the rank that gave it work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Arriving:
    """A message of a simulated group in flight."""

    def __init__(self, take: Callable[[], Tensor | None]) -> None:
        self.take = take

    def wait(self) -> Tensor | None:
        return self.take()


class SimulatedGroup:
    """A transfer.Group whose ranks are threads of one process."""

    def __init__(self, hall: Hall, members: tuple[int, ...], rank: int) -> None:
        self.hall, self.members, self.rank, self.ranks = hall, members, rank, len(members)
        self.operation = 0

    def exchange(self, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Arriving:
        number = self._begin()
        if send is not None:
            self._post(number, to, send)

        def take() -> Tensor | None:
            return None if receive is None else receive.copy_(self._take(number, source))

        return Arriving(take)

    def all_gather(self, x: Tensor) -> Arriving:
        number = self._begin()
        for other in self._others():
            self._post(number, other, x)

        def take() -> Tensor:
            return torch.stack([x if rank == self.rank else self._take(number, rank) for rank in range(self.ranks)])

        return Arriving(take)

    def reduce_scatter(self, x: Tensor) -> Arriving:
        number = self._begin()
        for other in self._others():
            self._post(number, other, x[other])

        def take() -> Tensor:
            total = torch.zeros_like(x[0])
            for rank in range(self.ranks):
                total += x[rank] if rank == self.rank else self._take(number, rank)
            return total

        return Arriving(take)

    def all_to_all(self, x: Tensor) -> Tensor:
        number = self._begin()
        for other in self._others():
            self._post(number, other, x[other])
        return torch.stack([x[rank] if rank == self.rank else self._take(number, rank) for rank in range(self.ranks)])

    def maximum(self, x: Tensor) -> Tensor:
        gathered = self.all_gather(x).wait()
        assert gathered is not None
        return gathered.amax(0)

    def _begin(self) -> int:
        """All ranks call the same in the same order, so a count says which call a message belongs to."""
        self.operation += 1
        return self.operation

    def _others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]

    def _post(self, number: int, to: int, message: Tensor) -> None:
        self.hall.post((self.members, number, self.rank, to), self.members[self.rank], message)

    def _take(self, number: int, source: int) -> Tensor:
        return self.hall.take((self.members, number, source, self.rank), self.members[self.rank])
