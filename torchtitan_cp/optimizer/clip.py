"""Global-norm clipping in two halves, so that one exchange between ranks serves the norm and all else."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shard of every gradient."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def shard_square_norm(parameters: Iterable[nn.Parameter], ranks: int | None = None) -> Tensor:
    """This rank's part of the squared global norm, fp64 scalar: summed over the ranks of the job it is the whole.

    What several ranks hold alike is divided among them: a replica of HSDP, a norm beside tensor-parallel
    matrices, a plain tensor.

    Args:
        parameters: of this rank.
        ranks: that hold these parameters between them, all of them the same way: those of the job, or of
            one pipeline stage. Default: of each gradient the ranks of its own mesh, and one of a plain tensor,
            which is right where meshes span all these ranks and every plain tensor is here alone.
    """
    by_copies: dict[float, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient, copies = _whole_values(parameter.grad, ranks)
            by_copies[copies].append(gradient)
    squares = [torch.stack(torch._foreach_norm(held)).double().square().sum() / n for n, held in by_copies.items()]
    return torch.stack(squares).sum()


def _whole_values(gradient: Tensor, ranks: int | None) -> tuple[Tensor, float]:
    """(this rank's shard, on how many ranks each of its values is)."""
    if not isinstance(gradient, DTensor):
        return gradient, ranks or 1
    if any(placement.is_partial() for placement in gradient.placements):
        # A partial sum has no norm of its own.
        whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        gradient = gradient.redistribute(placements=whole)
    mesh, shards = gradient.device_mesh, 1
    for axis, placement in enumerate(gradient.placements):
        shards *= 1 if placement.is_replicate() else mesh.size(axis)
    return gradient.to_local(), (ranks or mesh.size()) / shards


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], global_norm: float, max_norm: float) -> None:
    """Shrink gradients in place to `max_norm` if their global norm is larger; 0 never clips.

    Source: Pascanu et al., 2013.
    """
    if max_norm and global_norm > max_norm:
        torch._foreach_mul_(local_gradients(parameters), max_norm / global_norm)
