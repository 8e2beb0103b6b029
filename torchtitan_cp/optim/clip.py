"""Global-norm clipping in two halves, so that one exchange between ranks serves the norm and all else."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shard of every gradient."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def square_norms(groups: Sequence[Iterable[nn.Parameter]], ranks: int | None = None) -> Tensor:
    """This rank's part of the squared global norm of each group, `[groups]` fp64.

    Summed over the ranks of the job it is the whole: what several ranks hold alike is divided among them, as a replica
    of HSDP, a norm beside tensor-parallel matrices, a plain tensor.

    Args:
        groups: parameters of this rank; a group may have none.
        ranks: that hold these parameters between them, all of them the same way: those of the job, or of
            one pipeline stage. Default: of each gradient the ranks of its own mesh, and one of a plain tensor,
            which is right where meshes span all these ranks and every plain tensor is here alone.
    """
    gradients: list[Tensor] = []
    shares: list[float] = []
    places: list[range] = []
    for group in groups:
        own = [_whole_values(p.grad, ranks) for p in group if p.grad is not None]
        places.append(range(len(gradients), len(gradients) + len(own)))
        gradients += [gradient for gradient, _ in own]
        shares += [1 / copies for _, copies in own]
    if not gradients:
        return torch.zeros(len(places), dtype=torch.float64)
    device = gradients[0].device
    squares = torch.stack(torch._foreach_norm(gradients)).double().square()
    squares = F.pad(squares * _constant(tuple(shares), torch.float64, device), (0, 1))
    # Rows of one length, filled up with the zero at the end; a sum by index would not be deterministic on CUDA.
    longest, zero = max(map(len, places)), len(gradients)
    table = tuple(index for place in places for index in (*place, *[zero] * (longest - len(place))))
    return squares[_constant(table, torch.int64, device).view(len(places), longest)].sum(1)


@lru_cache(maxsize=32)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that are the same in every step: copying them each time would make the host wait."""
    return torch.tensor(values, dtype=dtype, device=device)


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
