"""Expert parallelism: each of `ep` ranks has a share of every layer's experts, and tokens travel to those they chose.

Source: GShard (Lepikhin et al., 2020); without dropping tokens, MegaBlocks (Gale et al., 2022).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan_cp.attention.local_shard import local_tensor
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.sections import Parallel


def check_expert_parallel(args: Any, parallel: Parallel) -> None:
    """Refuse experts that cannot be shared evenly, and a model without any.

    Args:
        args: ModelArgs with `n_experts`.

    Raises:
        ConfigError: naming the key and the degrees that fit.
    """
    if not args.n_experts and (parallel.ep > 1 or parallel.expert_capacity):
        raise ConfigError(
            "parallel.ep and parallel.expert_capacity are for models with experts, and this one has none",
            fix="leave them out, or use another model.architecture",
        )
    if args.n_experts % parallel.ep:
        fits = [str(degree) for degree in range(1, parallel.ep) if args.n_experts % degree == 0]
        raise ConfigError(
            f"parallel.ep = {parallel.ep} does not divide the model's {args.n_experts} experts",
            fix=f"use ep {' or '.join(fits)}",
        )


class Routing(NamedTuple):
    """What routers chose, over all ranks; sums in fp64 on the device.

    Attributes:
        counts: `[L, X]` tokens sent to each expert of each layer, dropped ones too; 0 in layers without experts.
        entropy: `[L]` sum over tokens of the entropy of their shares, normalized over the chosen experts, in nats.
        dropped: `[]` choices that were dropped because an expert was full.
    """

    counts: Tensor
    entropy: Tensor
    dropped: Tensor


class RoutingSums:
    """Adds up a rank's routing, in backward: once for each forward that trains, also where it runs twice.

    Args:
        layers, experts: L and X.
    """

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self.experts = experts
        # Of each layer its counts and entropy, and in a last row the dropped choices.
        self._sums = torch.zeros(layers + 1, experts + 1, dtype=torch.float64, device=device)

    def add(self, layer: int, counts: Tensor, entropy: Tensor, dropped: int) -> None:
        """Add what a layer's router chose in one forward; counts `[X]`."""
        self._sums[layer, :-1] += counts.to(self._sums.device)  # a dry run's counts are on the host
        self._sums[layer, -1] += entropy
        self._sums[-1, -1] += dropped

    def take(self) -> Routing:
        """The sums over all ranks since the last call. Collective over the job."""
        dist.all_reduce(self._sums)
        taken = self._sums.clone()
        self._sums.zero_()
        return Routing(taken[:-1, :-1], taken[:-1, -1], taken[-1, -1])


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of a mesh its share of every layer's experts, dim 0 of their parameters. In place, on meta."""
    for experts in model.experts.values():  # type: ignore[operator]
        for name, parameter in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))


def dispatch_experts(model: nn.Module, sums: RoutingSums, group: ProcessGroup | None, capacity: float) -> None:
    """Have the model's experts count what they are sent and, over a group, get tokens from other ranks.

    Args:
        model: its `experts` are modules by layer, called with hidden states `[T, E]`, chosen experts `[T, K]` int64 and
            their shares `[T, K]`.
        group: the ranks that share the experts; None: each has all.
        capacity: see parallel.expert_capacity.
    """
    for layer, experts in getattr(model, "experts", {}).items():
        experts.forward = ExpertDispatch(layer, experts, sums, group, capacity)


class ExpertDispatch:
    """The forward of a layer's experts, of which this rank has a share; see `dispatch_experts`.

    Tokens are sent in two chunks on CUDA, so that one travels while the experts compute the other.
    """

    def __init__(
        self, layer: int, module: nn.Module, sums: RoutingSums, group: ProcessGroup | None, capacity: float
    ) -> None:
        self.layer, self.module, self.sums, self.group, self.capacity = layer, module, sums, group, capacity
        self.compute: Callable[..., Tensor] = module.forward
        self.ranks, self.experts = group.size() if group else 1, sums.experts
        if hasattr(module, "num_experts"):  # transformers counts with it
            vars(module)["num_experts"] = self.experts // self.ranks
        self.chunks = 1

    def __call__(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The weighted sum of each token's experts, `[T, E]`.

        Args:
            hidden: `[T, E]`.
            chosen: `[T, K]` int64, experts of the whole layer.
            shares: `[T, K]`.
        """
        chunks = self.chunks if hidden.device.type == "cpu" else 2
        counts = torch.stack([c.flatten().bincount(minlength=self.experts) for c in chosen.tensor_split(chunks)])
        if self.ranks > 1 or self.capacity:
            out, dropped = self._exchange(hidden, chosen, shares, counts)
        else:
            out, dropped = self.compute(hidden, chosen, shares), 0
        if not torch.is_grad_enabled():
            return out
        normalized = shares.detach().double()
        normalized = normalized / normalized.sum(-1, keepdim=True)
        entropy = torch.special.entr(normalized).sum()
        return _Counted.apply(out, self.sums, (self.layer, counts.sum(0), entropy, dropped))

    def _exchange(self, hidden: Tensor, chosen: Tensor, shares: Tensor, counts: Tensor) -> tuple[Tensor, int]:
        """The result, and how many choices were dropped.

        Args:
            counts: `[chunks, X]` of the choices.
        """
        kept, chosen_rows = counts, chosen.numel()
        if self.capacity:
            kept = counts.clamp(max=math.ceil(self.capacity * chosen_rows / counts.numel()))
        # For each chunk and rank, the rows for each of its experts.
        sent = kept.view(len(kept), self.ranks, -1)
        by_rank = sent.transpose(0, 1).contiguous()
        received = by_rank.clone()
        if self.group:
            dist.all_to_all_single(received, by_rank, group=self.group)
        received = received.transpose(0, 1)
        rows_sent, rows_received = torch.stack([sent, received]).sum(-1).tolist()  # the host waits
        parts = [x.tensor_split(len(kept)) for x in (hidden, chosen, shares)]
        trips, orders = [_Trip(*rows, self.group) for rows in zip(rows_sent, rows_received, strict=True)], []
        arriving, returning, out = [], [], []
        for trip, tokens, choices, own, most in zip(trips, parts[0], parts[1], counts, kept, strict=True):
            numbers = own.to(hidden.device), most.to(hidden.device), sum(trip.sent)
            orders.append(self._order(choices.flatten(), *numbers))
            arriving.append(_Start.apply(tokens[orders[-1] // chosen.shape[1]], trip))
        for trip, rows, of_experts in zip(trips, arriving, received, strict=True):
            rows = self._compute_rows(_Finish.apply(rows, trip), of_experts)
            returning.append((back := _Trip(trip.received, trip.sent, self.group), _Start.apply(rows, back)))
        for (trip, rows), order, weights in zip(returning, orders, parts[2], strict=True):
            rows = _Finish.apply(rows, trip)
            spread = rows.new_zeros(weights.numel(), rows.shape[1]).index_put((order,), rows)
            out.append(torch.einsum("tke,tk->te", spread.view(*weights.shape, rows.shape[1]), weights.to(rows.dtype)))
        return torch.cat(out), chosen_rows - sum(map(sum, rows_sent))

    def _order(self, chosen: Tensor, counts: Tensor, kept: Tensor, rows: int) -> Tensor:
        """Indices of choices by expert, the first `kept` of each; counts and kept `[X]`, rows their sum."""
        order = chosen.argsort(stable=True)
        if not self.capacity:
            return order
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[chosen[order]]
        # The host knows how many are kept: a mask as an index would make it wait for the device.
        return order[(place >= kept[chosen[order]]).argsort(stable=True)[:rows]]

    def _compute_rows(self, rows: Tensor, counts: Tensor) -> Tensor:
        """This rank's experts on rows `[R, E]`, which are ordered by sender and expert; counts `[ranks, X / ep]`."""
        numbers = torch.arange(counts.shape[1], device=rows.device).repeat(self.ranks)
        numbers = numbers.repeat_interleave(counts.flatten().to(rows.device), output_size=len(rows))
        empty = not len(rows)
        if empty:  # experts without any row would have no gradient, and FSDP would wait for it
            rows, numbers = F.pad(rows, (0, 0, 0, 1)), numbers.new_zeros(1)
        whole: Any = self.module._parameters
        vars(self.module)["_parameters"] = {name: local_tensor(x) for name, x in whole.items()}
        try:
            out = self.compute(rows, numbers[:, None], rows.new_ones(len(rows), 1))
        finally:
            vars(self.module)["_parameters"] = whole
        return out[:0] if empty else out


class _Trip:
    """Rows on their way to other ranks.

    Args:
        sent, received: rows to and from each rank.
        group: None: they stay.

    Attributes:
        arriving: their buffer while they travel, and what to wait for.
    """

    def __init__(self, sent: list[int], received: list[int], group: ProcessGroup | None) -> None:
        self.sent, self.received, self.group = sent, received, group
        self.arriving: Any = None

    def start(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows, and give the buffer that others fill until `finish`."""
        buffer, work = rows, None
        if self.group:
            buffer = rows.new_empty(sum(received), rows.shape[1])
            work = dist.all_to_all_single(buffer, rows.contiguous(), received, sent, group=self.group, async_op=True)
        self.arriving = buffer, work
        return buffer

    def finish(self) -> Tensor:
        """Wait for the buffer, and give it; on CUDA the stream waits."""
        (buffer, work), self.arriving = self.arriving, None
        if work:
            work.wait()
        return buffer


class _Start(torch.autograd.Function):
    """Sends rows; in backward, waits for the gradients that `_Finish` sent back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.start(rows.view_as(rows), trip.sent, trip.received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.finish(), None


class _Finish(torch.autograd.Function):
    """Waits for rows; in backward, sends their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.finish()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start(gradient, ctx.trip.received, ctx.trip.sent)
        return gradient, None  # its place is taken by what arrives


class _Counted(torch.autograd.Function):
    """The identity, which adds up a layer's routing in backward. In compiled code a tensor's hook cannot."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, sums: RoutingSums, routing: tuple[Any, ...]) -> Tensor:
        ctx.sums, ctx.routing = sums, routing
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.sums.add(*ctx.routing)
        return gradient, None, None
