"""Global-norm clipping in two halves: this rank's square norms, which the caller sums over the ranks; and the step."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer

from torchtitan_cp.attention.local_shard import local_tensor


@torch.no_grad()  # without autograd, a DTensor returns its local tensor at once
def square_norms(groups: Sequence[Iterable[nn.Parameter]], ranks: int | None = None) -> Tensor:
    """This rank's part of the squared global norm of each group, `[groups]` fp64.

    Summed over the ranks of the job it is the global norm's square: where several ranks hold the same values (a replica
    of HSDP, a norm beside tensor-parallel matrices, a plain tensor), each counts its fraction of them.

    Args:
        groups: parameters of this rank; a group may have none.
        ranks: number of ranks that hold these parameters together: those of the job, or of one pipeline stage.
            Default: for a DTensor the ranks of its mesh, for a plain tensor this rank alone.
    """
    gradients: list[Tensor] = []
    fractions: list[float] = []
    counts: list[int] = []
    for group in groups:
        shards = [_local_and_copies(p.grad, ranks) for p in group if p.grad is not None]
        counts.append(len(shards))
        gradients += [gradient for gradient, _ in shards]
        fractions += [1 / copies for _, copies in shards]
    if not gradients:
        return torch.zeros(len(counts), dtype=torch.float64)
    squares = torch.stack(torch._foreach_norm(gradients)).double().square()
    squares = squares * _constant(tuple(fractions), gradients[0].device)
    # index_add would not be deterministic on CUDA.
    return torch.stack([group_squares.sum() for group_squares in squares.split(counts)])


@lru_cache(maxsize=32)
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers that every step needs on the device, fp64. Copying them in each step would make the host wait."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def _local_and_copies(gradient: Tensor, ranks: int | None) -> tuple[Tensor, float]:
    """(this rank's shard, the number of ranks that hold the same values)."""
    if not isinstance(gradient, DTensor):
        return gradient, ranks or 1
    if any(placement.is_partial() for placement in gradient.placements):
        # The norm of a sum does not follow from the norms of its parts.
        whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        gradient = gradient.redistribute(placements=whole)
    mesh, shards = gradient.device_mesh, 1
    for axis, placement in enumerate(gradient.placements):
        shards *= 1 if placement.is_replicate() else mesh.size(axis)
    return local_tensor(gradient), (ranks or mesh.size()) / shards


@torch.no_grad()
def step_clipped(optimizer: Optimizer, global_norm: float, max_norm: float) -> None:
    """Step with gradients shrunk to `max_norm` if their global norm is larger; 0 never clips.

    torch's fused AdamW has `grad_scale`, the factor of a scaled loss: its kernel divides each gradient by it, and
    stores the result. So its step is that of gradients divided by global_norm / max_norm, which is rounded to fp32.
    For other optimizers a pass multiplies all gradients by max_norm / global_norm first.
    Source: Pascanu et al., 2013.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not max_norm or not global_norm > max_norm:
        optimizer.step()
    elif isinstance(optimizer, AdamW) and optimizer.defaults["fused"]:
        device = parameters[0].device
        optimizer.grad_scale = torch.full((), global_norm / max_norm, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale  # type: ignore[attr-defined]
    else:
        gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, max_norm / global_norm)
        optimizer.step()
