"""AdamW with decay for matrices only."""

import torch
from torch import nn

from torchtitan_cp.config.sections import Optimizer


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW over two groups: matrices decay, norms and biases do not. Fused where the device has it.

    Source: Loshchilov and Hutter, 2019.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)
