"""Losses on held-out text: the mode a model is evaluated in, and the loss any model must beat."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients and dropout; the model is in training mode again afterwards."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def unigram_loss(train_counts: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log-likelihood, in nats, of `labels` under the training frequencies, plus one each.

    Args:
        train_counts: `[V]`, how often each token occurs in the training text.
        labels: token ids, any shape.
    """
    counts = train_counts.astype(np.float64) + 1
    return float(-(np.log(counts) - np.log(counts.sum()))[labels].mean())
