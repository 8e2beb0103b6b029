"""A context-parallel group in one process: its ranks run one after another, with real kernels and no network.

For numerics at more ranks than there are machines, in tests and benchmarks. Each rank is a thread that runs
the strategies' own code; only the messages differ, which go through memory. Only one rank computes at a time:
a thread gives up its turn while it waits for a message.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

import torch
from torch import Tensor

from torchtitan_cp.attention import AttentionMask, Plan, make_plan
from torchtitan_cp.attention.api import check_shapes
from torchtitan_cp.attention.collectives import Group, Message, Pending
from torchtitan_cp.attention.kernels import ScoreMod, choose_kernel
from torchtitan_cp.attention.operator import with_exchange
from torchtitan_cp.attention.plan import in_global_order
from torchtitan_cp.attention.strategies import STRATEGIES, ranks_trading_heads
from torchtitan_cp.attention.strategies.strategy import Call, Residuals


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
    forward_bytes: list[list[int]]
    backward_bytes: list[list[int]]
    forward_seconds: list[float]
    backward_seconds: list[float]


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
    if strategy == "auto" and all_to_all_ranks > 1:
        strategy = "hybrid"
    options: dict[str, Any] = {
        "mask": mask,
        "ranks": ranks,
        "strategy": strategy,
        "kernel": kernel,
        "layout": layout,
        "all_to_all_ranks": all_to_all_ranks,
        "kv_transfer": kv_transfer,
    }
    planned = [make_plan(q.shape[1], rank=rank, **options) for rank in range(ranks)]
    trading = ranks_trading_heads(planned[0], q.shape[2], k.shape[2])
    plans = tuple(with_exchange(plan, trading) for plan in planned)
    check_shapes(plans[0].shard(q), plans[0].shard(k), plans[0].shard(v), plans[0], sinks)
    exchange = STRATEGIES[plans[0].strategy]
    chosen = choose_kernel(kernel, q, v, dense=mask.dense)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kept: list[Residuals | None] = [None] * ranks

    def call_of(rank: int, network: "Network") -> Call:
        all_to_all_ranks = plans[rank].all_to_all_ranks
        ring = SimulatedGroup(network, tuple(range(rank % all_to_all_ranks, ranks, all_to_all_ranks)), rank)
        all_to_all_group = SimulatedGroup(
            network,
            tuple(
                range(
                    rank // all_to_all_ranks * all_to_all_ranks,
                    rank // all_to_all_ranks * all_to_all_ranks + all_to_all_ranks,
                )
            ),
            rank,
        )
        return Call(plans[rank], chosen, ScoreMod(scale), k.shape[2], ring, all_to_all_group, sinks)

    def forward(rank: int, network: "Network") -> tuple[Tensor, ...]:
        q_local, k_local, v_local = (plans[rank].shard(x) for x in (q, k, v))
        out, lse, kept[rank] = exchange.forward(q_local, k_local, v_local, call_of(rank, network))
        return out, lse

    def backward(rank: int, network: "Network") -> tuple[Tensor, ...]:
        residuals = kept[rank]
        assert dout is not None
        assert residuals is not None
        gradients = exchange.backward(plans[rank].shard(dout), residuals, call_of(rank, network))
        return tuple(x for x in gradients if x is not None)

    def whole(parts: list[tuple[Tensor, ...]], which: int) -> Tensor:
        return torch.cat(in_global_order([part[which] for part in parts], plans[0].layout, 1), 1)

    network = Network(ranks)
    outputs = network.run(forward)
    backward_network, gradients = Network(ranks), None
    if dout is not None:
        gradients = backward_network.run(backward)
    dq, dk, dv = (whole(gradients, which) if gradients else None for which in range(3))
    return Simulation(
        whole(outputs, 0),
        whole(outputs, 1),
        dq,
        dk,
        dv,
        torch.stack([parts[3] for parts in gradients]).sum(0) if gradients and sinks is not None else None,
        plans,
        network.sent_bytes,
        backward_network.sent_bytes,
        network.seconds,
        backward_network.seconds,
    )


Key = tuple[tuple[int, ...], int, int, int]  # the group's members, number of the call, sender, receiver


class Network:
    """Messages of simulated ranks, of which one computes at a time.

    Attributes:
        sent_bytes: per rank, of each message to another rank.
        seconds: per rank, how long it computed.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.turn = Condition()
        self.messages: dict[Key, Tensor] = {}
        self.sent_bytes: list[list[int]] = [[] for _ in range(ranks)]
        self.seconds = [0.0] * ranks
        self.failure: BaseException | None = None

    def run(self, function: Callable[[int, "Network"], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Run `function(rank, network)` as every rank, and return what each returned.

        Raises:
            whatever the first rank that failed raised.
        """
        results: list[tuple[Tensor, ...]] = [()] * self.ranks

        def run_rank(rank: int) -> None:
            try:
                with self.turn, torch.no_grad():
                    self.seconds[rank] -= time.perf_counter()
                    results[rank] = function(rank, self)
                    self.stop_clock(rank)
            except BaseException as error:
                with self.turn:
                    self.failure = self.failure or error
                    self.turn.notify_all()

        threads = [Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure
        return results

    def send(self, key: Key, rank: int, message: Tensor) -> None:
        """Send a copy of a message as `rank`."""
        self.messages[key] = message.clone()
        self.sent_bytes[rank].append(message.numel() * message.element_size())
        self.turn.notify_all()

    def receive(self, key: Key, rank: int) -> Tensor:
        """A message to `rank`, once it has been sent; other ranks compute until then."""
        self.stop_clock(rank)
        self.turn.wait_for(lambda: key in self.messages or self.failure is not None)
        self.seconds[rank] -= time.perf_counter()
        if key not in self.messages:
            raise RuntimeError(f"another rank failed while rank {rank} waited") from self.failure
        return self.messages.pop(key)

    def stop_clock(self, rank: int) -> None:
        """Let the device finish first, so that its time counts for the rank that gave it work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[rank] += time.perf_counter()


class SimulatedGroup(Group):
    """A Group whose ranks are threads of one process.

    Args:
        members: numbers of its ranks in the network; number: this rank's.
    """

    def __init__(self, network: Network, members: tuple[int, ...], number: int) -> None:
        super().__init__()
        self.network, self.members, self.number = network, members, number
        self.rank, self.ranks = members.index(number), len(members)
        self.calls = 0

    def _post(self, sends: list[Message], receives: list[Message], finish: Callable[[], Any]) -> Pending[Any]:
        # All ranks make the same calls in the same order, so the count tells which call a message belongs to.
        self.calls += 1
        call = self.calls
        for rank, x in sends:
            self.network.send((self.members, call, self.rank, rank), self.number, x)

        def receive() -> Any:
            for rank, x in receives:
                x.copy_(self.network.receive((self.members, call, rank, self.rank), self.number))
            return finish()

        return Pending([], receive)
