"""Balances experts without a loss: the biases of routers follow the load of their experts.

Source: Wang et al., 2024; DeepSeek-V3 (2024), section 2.1.2.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def update_router_biases(biases: Mapping[int, Tensor], counts: Tensor, rate: float) -> None:
    """Raise the bias of each expert with fewer tokens than the mean by `rate`, and lower that of one with more.

    Args:
        biases: by layer, `[X]` fp32, changed in place.
        counts: `[layers, X]` fp64 on their device, tokens of the step that each expert was sent, over all ranks.
    """
    for layer, bias in biases.items():
        sent = counts[layer]
        # Whole numbers, so the signs are exact and all ranks have the same biases.
        bias.add_(torch.sign(sent.sum() - len(sent) * sent), alpha=rate)
