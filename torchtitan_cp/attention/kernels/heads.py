"""Changes heads to shapes that a kernel takes."""

import torch.nn.functional as F
from torch import Tensor


def same_dims(*tensors: Tensor) -> list[Tensor]:
    """Pad the head dims with zeros to the largest of them.

    A zero in a query or key adds nothing to a score, and a zero column of values gives a zero column of
    output, so attention with Dqk != Dv (multi-head latent attention) runs on a kernel that needs them equal.
    """
    widest = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]


def sum_groups(gradient: Tensor, heads: int) -> Tensor:
    """Gradient of `heads` key heads from that of their copies, `[B, S, Hq, D] -> [B, S, Hkv, D]`, summed in fp32."""
    copies = gradient.shape[2] // heads
    return gradient if copies == 1 else gradient.unflatten(2, (heads, copies)).float().sum(3)
