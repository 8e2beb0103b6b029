"""The loss of a model that knows only how frequent each token is: what any network must beat."""

import numpy as np


def unigram_loss(train_counts: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log-likelihood, in nats, of `labels` under the training frequencies, plus one each.

    Args:
        train_counts: `[V]`, how often each token stands in the training text.
        labels: token ids, any shape.
    """
    counts = train_counts.astype(np.float64) + 1
    return float(-(np.log(counts) - np.log(counts.sum()))[labels].mean())
