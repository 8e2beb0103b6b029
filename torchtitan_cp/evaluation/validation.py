"""What evaluation does to a model, and undoes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients and dropout; the model trains again afterwards."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
