"""Muon for the matrices of the blocks, sharded in any way, beside another optimizer for the rest.

Sources: Jordan et al., 2024; Liu et al. (Moonshot), 2025, who scale the step to AdamW's size, so that both share a
learning rate, and take each expert as a matrix. The numbers are those of torch.optim.Muon.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from torchtitan_cp.attention.local_shard import local_tensor
from torchtitan_cp.config.training import Optimizer as OptimizerConfig
from torchtitan_cp.optim import adamw
from torchtitan_cp.optim.optimizers import Group, Groups

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MIN_NORM = 1e-7
MOMENTUM = 0.95  # fraction of the old momentum kept in a step, in both sources


class Muon(Optimizer):
    """Steps along the orthogonalised momentum of each matrix.

    Args:
        matrices: parameter groups of matrices, and of experts' `[X, _, _]`, with `muon` True and `weight_decay`.
        rest: optimizer of all other parameters, its groups with `muon` False. It steps with this one, which holds
            the groups and the state of both: callers see one optimizer.
        momentum: fraction of the old momentum kept in a step.
        dtype: that matrices are gathered and orthogonalised in.
    """

    def __init__(self, matrices: Groups, rest: Optimizer, *, momentum: float, dtype: torch.dtype) -> None:
        super().__init__([*matrices, *rest.param_groups], {"lr": 0.0, "momentum": momentum})
        self._rest, self._dtype = rest, dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. torch passes `closure=None` when it makes the state for a checkpoint."""
        for batch in matrix_batches(self.param_groups):
            matrices = [(group["params"][0], group) for group in batch]
            directions = _orthogonalized([self._direction(*entry) for entry in matrices])
            for (parameter, group), direction in zip(matrices, directions, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape[-2:])))
        self._rest.state = self.state
        self._rest.param_groups = [group for group in self.param_groups if not group["muon"]]
        self._rest.step()

    def _direction(self, parameter: Tensor, group: Group) -> Tensor:
        """Nesterov's momentum, after adding the gradient to it."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(state["momentum_buffer"], group["momentum"]).to(self._dtype)


def matrix_batches(groups: Groups) -> Iterator[Groups]:
    """Yield Muon's matrices that have a gradient, each as a group of its own, in batches.

    A batch has one matrix for each rank of their mesh to orthogonalise, the largest first, so that a batch has equal
    sizes. A parameter of experts is a batch by itself, as each rank orthogonalises some of its experts.
    """
    by_mesh = defaultdict[DeviceMesh | None, Groups](list)
    for group in groups:
        for parameter in group["params"]:
            if group.get("muon") and parameter.grad is not None:
                mesh = getattr(parameter, "device_mesh", None) if parameter.ndim == 2 else None
                by_mesh[mesh].append({**group, "params": [parameter]})
    for mesh, matrices in by_mesh.items():
        matrices.sort(key=lambda group: group["params"][0].numel(), reverse=True)
        ranks = mesh.size() if mesh else 1
        yield from (matrices[start : start + ranks] for start in range(0, len(matrices), ranks))


def _orthogonalized(updates: Sequence[Tensor]) -> Iterator[Tensor]:
    """Orthogonalise each update as a whole matrix, and shard it as before.

    Args:
        updates: on one mesh, at most as many as it has ranks. Each rank gathers and orthogonalises one of them, and
            broadcasts the result; memory holds one whole result at a time.
    """
    sharded = [update for update in updates if isinstance(update, DTensor)]  # all or none
    if not sharded:
        yield from map(orthogonalize, updates)
        return
    if sharded[0].ndim == 3:
        yield from map(_orthogonalized_experts, sharded)
        return
    mesh = sharded[0].device_mesh
    this_rank = tuple(mesh.get_coordinate() or ())
    owners = list(itertools.product(*map(range, mesh.shape)))[: len(sharded)]
    matrix: Tensor | None = None  # the one that this rank orthogonalises
    for owner, update in zip(owners, sharded, strict=True):
        if owner == this_rank:
            matrix = update.full_tensor()
        else:
            update.full_tensor()  # collective
    # After all gathers: in between, the other ranks would wait for it.
    matrix = None if matrix is None else orthogonalize(matrix)
    for owner, update in zip(owners, sharded, strict=True):
        own = matrix if owner == this_rank else None
        result = local_tensor(update).new_empty(update.shape) if own is None else own
        for axis, rank in enumerate(owner):
            # Every rank has it after the last axis; before that, some broadcast values that are overwritten later.
            dist.broadcast(result, group=mesh.get_group(axis), group_src=rank)
        yield distribute_tensor(result, mesh, update.placements, src_data_rank=None)


def _orthogonalized_experts(update: DTensor) -> DTensor:
    """Orthogonalise each expert of a sharded `[X, _, _]` on one rank, or on one rank of each replica."""
    mesh, placements, local = update.device_mesh, update.placements, update.to_local()
    cut_axis = next((axis for axis, placement in enumerate(placements) if placement.is_shard(1)), None)
    if cut_axis is None:
        local = orthogonalize(local)
    else:  # the ranks of this axis have a part of each expert, and trade them for whole ones
        axis_mesh = mesh[(mesh.mesh_dim_names or ())[cut_axis]] if mesh.ndim > 1 else mesh
        whole = DTensor.from_local(local, axis_mesh, [Shard(1)]).redistribute(placements=[Shard(0)])
        whole = DTensor.from_local(
            orthogonalize(whole.to_local()), axis_mesh, [Shard(0)], shape=whole.shape, stride=whole.stride()
        )
        local = whole.redistribute(placements=[Shard(1)]).to_local()
    return DTensor.from_local(local, mesh, placements, shape=update.shape, stride=update.stride())


def orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly: a quintic Newton-Schulz moves singular values to between 0.7 and 1.2.

    Args:
        matrix: `[_, _]`, or several, `[X, _, _]`.
    """
    a, b, c = COEFFICIENTS
    tall, add_product = matrix.shape[-2] > matrix.shape[-1], torch.addmm if matrix.ndim == 2 else torch.baddbmm
    wide = matrix.mT if tall else matrix
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=MIN_NORM)
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        wide = add_product(wide, add_product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.mT if tall else wide).contiguous()


def build(groups: Groups, settings: OptimizerConfig, compute_dtype: torch.dtype) -> Optimizer:
    """Muon, which computes in `compute_dtype`, over the groups with `muon` True, and AdamW over the others."""
    rest = adamw.build([group for group in groups if not group["muon"]], settings, compute_dtype)
    matrices = [group for group in groups if group["muon"]]
    return Muon(matrices, rest, momentum=MOMENTUM, dtype=compute_dtype)


def parts(groups: Groups) -> Iterator[Groups]:
    """A parameter each of AdamW's, and the batches that ranks orthogonalise together."""
    yield from adamw.parts([group for group in groups if not group["muon"]])
    yield from matrix_batches(groups)
