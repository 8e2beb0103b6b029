"""Global-norm clipping in two halves, so that one exchange between ranks serves the norm and all else."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shard of every gradient."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def shard_square_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Sum of squares of this rank's shards, fp64 scalar; summed over ranks it is the squared global norm."""
    norms = torch._foreach_norm(local_gradients(parameters))
    return torch.stack([norm.double() for norm in norms]).square().sum()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], global_norm: float, max_norm: float) -> None:
    """Shrink gradients in place to `max_norm` if their global norm is larger; 0 never clips.

    Source: Pascanu et al., 2013.
    """
    if max_norm and global_norm > max_norm:
        torch._foreach_mul_(local_gradients(parameters), max_norm / global_norm)
