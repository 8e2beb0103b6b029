"""Mean loss over a fixed set of held-out sequences."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[Any], token_losses: Callable[[Any], tuple[Tensor, Tensor]]) -> float:
    """Mean loss in nats over all ranks' tokens; all ranks call with as many batches each.

    Args:
        batches: micro-batches of this rank.
        token_losses: micro-batch -> (summed loss, number of unmasked tokens), scalars on the device.
    """
    model.eval()
    totals = None
    for batch in batches:
        pair = torch.stack([value.double() for value in token_losses(batch)])
        totals = pair if totals is None else totals + pair
    model.train()
    assert totals is not None, "validation needs a batch"
    dist.all_reduce(totals)
    loss_sum, tokens = totals.tolist()
    return loss_sum / max(1.0, tokens)
