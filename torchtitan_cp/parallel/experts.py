"""Expert parallelism: each of `ep` ranks has a share of every layer's experts, and tokens travel to their experts.

Source: GShard (Lepikhin et al., 2020); without dropping tokens, MegaBlocks (Gale et al., 2022).
"""

from collections.abc import Iterator
from types import MethodType
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan_cp.attention.local_shard import local_tensor


class Routing(NamedTuple):
    """What the routers of all ranks chose; sums in fp64 on the device.

    Attributes:
        counts: `[L, X]` tokens sent to each expert of each layer; 0 in layers without experts.
        entropy: `[L]` sum over tokens of the entropy of their shares, normalized over the chosen experts; in nats.
    """

    counts: Tensor
    entropy: Tensor


class RoutingSums:
    """Adds up a rank's routing. It does so in backward, so that a recomputed forward counts once.

    Args:
        layers, experts: L and X.
    """

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self.experts = experts
        # A tensor for each layer, so that the compiled code of one layer can add to those of any: counts, entropy.
        self.layers = [torch.zeros(experts + 1, dtype=torch.float64, device=device) for _ in range(layers)]

    def take(self) -> Routing:
        """The sums over all ranks since the last call. Collective over the job."""
        taken = torch.stack(self.layers)
        dist.all_reduce(taken)
        for sums in self.layers:
            sums.zero_()
        return Routing(taken[:, :-1], taken[:, -1])


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of a mesh its share of every layer's experts, dim 0 of their parameters; in place, on meta."""
    for experts in model.experts.values():  # type: ignore[operator]
        for name, parameter in list(experts.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, mesh, [Shard(0)])
            setattr(experts, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def dispatch_experts(model: nn.Module, sums: RoutingSums, group: ProcessGroup | None) -> None:
    """Have the model's experts count the tokens they are sent and, with a group, get tokens from other ranks.

    Args:
        model: its `experts` are modules by layer, called with hidden states `[T, E]`, chosen experts `[T, K]` int64 and
            their shares `[T, K]`.
        group: the ranks that share the experts; None: each has all.
    """
    for layer, experts in getattr(model, "experts", {}).items():
        trains = any(parameter.requires_grad for parameter in model.layers[str(layer)].parameters())  # type: ignore[index, union-attr]
        experts.dispatch = ExpertDispatch(layer, experts, sums, group, trains=trains)
        # One function for all layers: torch.compile guards the identity of a forward, or of a method's function.
        experts.forward = MethodType(_forward, experts)


class _WithDispatch(Protocol):
    dispatch: "ExpertDispatch"


def _forward(experts: _WithDispatch, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    return experts.dispatch(hidden, chosen, shares)


def count_choices(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert is chosen, `[X]` int64. Unlike bincount, it does not make the host wait for a GPU."""
    return chosen.new_zeros(experts).index_add(0, chosen.flatten(), torch.ones_like(chosen.flatten()))


class ExpertDispatch:
    """The forward of a layer's experts, of which this rank has a share; see `dispatch_experts`.

    Tokens go to other ranks in two chunks on CUDA, so that one travels while the experts compute the other.

    Args:
        trains: some weight of the layer is trained, so that a backward reaches it, which may recompute it.
    """

    def __init__(
        self, layer: int, module: nn.Module, sums: RoutingSums, group: ProcessGroup | None, *, trains: bool
    ) -> None:
        self.module, self.sums, self.group, self.trains = module, sums.layers[layer], group, trains
        # Beside frozen layers, the input of the experts may have no gradient.
        self.has_gradient = torch.zeros((), device=self.sums.device, requires_grad=True)
        self.ranks, self.experts = group.size() if group else 1, sums.experts
        if hasattr(module, "num_experts"):  # transformers' forward reads it
            vars(module)["num_experts"] = self.experts // self.ranks
        self.chunks = 1

    def __call__(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The weighted sum of each token's experts, `[T, E]`.

        Args:
            hidden: `[T, E]`.
            chosen: `[T, K]` int64, experts of the whole layer.
            shares: `[T, K]`.
        """
        chunks = 2 if self.group and hidden.device.type != "cpu" else self.chunks
        counts = torch.stack([count_choices(part, self.experts) for part in chosen.tensor_split(chunks)])
        if torch.is_grad_enabled():
            normalized = shares.detach().double()
            normalized = normalized / normalized.sum(-1, keepdim=True)
            routing = counts.sum(0), torch.special.entr(normalized).sum()
            if hidden.requires_grad or self.trains:
                # On the input, as FSDP warns of modules whose output is a view.
                hidden = _Counted.apply(hidden, self.has_gradient, self.sums, routing)
            else:
                _add_routing(self.sums, *routing)
        if self.ranks > 1:
            return self._dispatch(hidden, chosen, shares, counts)
        return self._compute(hidden, chosen, shares)

    def _compute(self, *inputs: Tensor) -> Tensor:
        """The module's own forward."""
        out: Tensor = type(self.module).forward(self.module, *inputs)
        return out

    def _dispatch(self, hidden: Tensor, chosen: Tensor, shares: Tensor, counts: Tensor) -> Tensor:
        """Send tokens to their experts, and combine what comes back.

        Args:
            counts: `[chunks, X]`, how often each expert is chosen.
        """
        # For each chunk and rank, the rows for each of its experts.
        sent = counts.view(len(counts), self.ranks, -1)
        by_rank = sent.transpose(0, 1).contiguous()
        received = by_rank.clone()
        dist.all_to_all_single(received, by_rank, group=self.group)
        received = received.transpose(0, 1)
        rows = torch.stack([sent, received]).sum(-1).tolist()  # the host waits
        parts = [x.tensor_split(len(counts)) for x in (hidden, chosen, shares)]
        chunks = [self._chunk(*chunk) for chunk in zip(*parts, received, *rows, strict=True)]
        _, _, out = ([next(chunk) for chunk in chunks] for _ in range(3))
        return torch.cat(out)

    def _chunk(
        self, hidden: Tensor, chosen: Tensor, shares: Tensor, counts: Tensor, *rows_by_rank: list[int]
    ) -> Iterator[Tensor]:
        """Yield the rows that travel to experts, then those that travel back, then the result.

        A generator, so that one chunk is computed while another travels.

        Args:
            counts: `[ranks, X / ep]` rows from each rank for each expert here.
            rows_by_rank: those sent to each rank, and those received from each.
        """
        sent, received = rows_by_rank
        order = chosen.flatten().argsort(stable=True)  # choices by expert
        places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        # Rows are put, never gathered: then backward gathers, where it would add, in bf16 and with atomics.
        rows = hidden.new_empty(len(order), hidden.shape[1])
        rows.index_put_((places.view_as(chosen),), hidden[:, None].expand(-1, chosen.shape[1], -1))
        rows = self._send(rows, sent, received)
        yield rows
        rows = self._send(self._compute_rows(_wait(rows), counts), received, sent)
        yield rows
        spread = rows.new_empty(chosen.numel(), rows.shape[1]).index_put_((order,), _wait(rows))
        yield torch.einsum("tke,tk->te", spread.view(*chosen.shape, rows.shape[1]), shares.to(rows.dtype))

    def _send(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Start to send rows, and return those that arrive, which must not be read before `_wait`; backward waits."""
        assert self.group
        if rows.requires_grad:
            rows.register_hook(_wait)
        return _AllToAll.apply(rows, sent, received, self.group.group_name)

    def _compute_rows(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Run this rank's experts on rows `[R, E]`, ordered by sender and expert; counts `[ranks, X / ep]`."""
        numbers = torch.arange(counts.shape[1], device=rows.device).repeat(self.ranks)
        numbers = numbers.repeat_interleave(counts.flatten().to(rows.device), output_size=len(rows))
        empty = not len(rows)
        if empty:  # without any row experts would have no gradient, and FSDP would wait for it
            rows, numbers = F.pad(rows, (0, 0, 0, 1)), numbers.new_zeros(1)
        parameters = self.module._parameters
        vars(self.module)["_parameters"] = {name: x if x is None else local_tensor(x) for name, x in parameters.items()}
        try:
            out = self._compute(rows, numbers[:, None], rows.new_ones(len(rows), 1))
        finally:
            vars(self.module)["_parameters"] = parameters
        return out[:0] if empty else out


class _WayBack(Protocol):
    way_back: tuple[list[int], list[int], str]


class _AllToAll(torch.autograd.Function):
    """Start to send rows; in backward, to send their gradients back."""

    @staticmethod
    def forward(ctx: _WayBack, rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
        ctx.way_back = sent, received, group
        return torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), received, sent, group)

    @staticmethod
    def backward(ctx: _WayBack, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        arriving = torch.ops._c10d_functional.all_to_all_single(gradient.contiguous(), *ctx.way_back)
        return arriving, None, None, None


def _wait(rows: Tensor) -> Tensor:
    """Wait for rows that other ranks send; on CUDA the stream waits."""
    torch.ops._c10d_functional.wait_tensor(rows.detach())
    return rows


class _Routing(Protocol):
    sums: Tensor
    routing: tuple[Tensor, Tensor]


class _Counted(torch.autograd.Function):
    """The identity; adds up a layer's routing in backward. A tensor hook cannot do that in compiled code."""

    @staticmethod
    def forward(
        ctx: _Routing, hidden: Tensor, has_gradient: Tensor, sums: Tensor, routing: tuple[Tensor, Tensor]
    ) -> Tensor:
        ctx.sums, ctx.routing = sums, routing
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: _Routing, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        _add_routing(ctx.sums, *ctx.routing)
        return gradient, None, None, None


def _add_routing(sums: Tensor, counts: Tensor, entropy: Tensor) -> None:
    """Add the routing of a forward to a layer's sums."""
    sums[:-1] += counts.to(sums.device)  # a dry run's counts are on the host
    sums[-1] += entropy
