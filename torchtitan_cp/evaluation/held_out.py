"""Losses on held-out text: the time they may take, the mode a model is evaluated in, the loss any model must beat."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

STAGE_PARTS = 10  # evaluations of a stage where evaluation.interval says nothing else
LEAST_STEPS = 10  # between them
TRAINING_COST = 3  # of a token, over that of evaluating it: a forward, and a backward of twice its work


@dataclass
class Budget:
    """Keeps evaluation below a fraction of the run's time. Rank 0's clock decides for all ranks.

    Attributes:
        max_share: fraction of the time of training and evaluation together; 1 is no limit.
        trained_seconds, evaluation_seconds: time spent on training and on evaluation so far.
        token_seconds: seconds per token of the last evaluation.
        planned_tokens: that the run trains. Before its first step, its time is estimated from them.
    """

    max_share: float
    trained_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    token_seconds: float = 0.0
    planned_tokens: int = 0

    def affords(self, tokens: int, part: float = 1.0) -> bool:
        """True if this many more tokens stay within a part of max_share, at the speed of the last ones."""
        spent, trained_seconds = self._seconds_with(tokens)
        return self.max_share >= 1 or spent <= part * self.max_share * (trained_seconds + spent)

    def share_with(self, tokens: int) -> float:
        """The fraction of the time that evaluation has taken after this many more tokens, rounded up to two digits."""
        spent, trained_seconds = self._seconds_with(tokens)
        share = spent / (trained_seconds + spent) if spent else 0.0
        digits = 1 - math.floor(math.log10(share)) if share else 0
        return math.ceil(share * 10**digits) / 10**digits

    def _seconds_with(self, tokens: int) -> tuple[float, float]:
        """Seconds of evaluation after this many more tokens, and seconds of training."""
        token_seconds, trained_seconds = self.token_seconds, self.trained_seconds
        if not trained_seconds:
            token_seconds = token_seconds or 1.0  # whatever a token takes, the share is the same
            trained_seconds = TRAINING_COST * self.planned_tokens * token_seconds
        return self.evaluation_seconds + tokens * token_seconds, trained_seconds

    @contextmanager
    def spending(self, tokens: int) -> Iterator[None]:
        """Count the seconds of an evaluation on this many tokens."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.evaluation_seconds += seconds
        self.token_seconds = seconds / tokens


def is_due(interval: int, step: int, stage_step: int, stage_steps: int) -> bool:
    """Whether a stage is evaluated after a step within it.

    Args:
        interval: evaluation.interval.
        step: of the run; stage_step: of the stage; both count from 1.
        stage_steps: how many the stage has.
    """
    if interval < 0:
        return stage_step % max(LEAST_STEPS, math.ceil(stage_steps / STAGE_PARTS)) == 0
    return interval > 0 and step % interval == 0


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients and dropout; the model is in training mode again afterwards."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def unigram_loss(train_counts: np.ndarray, label_counts: np.ndarray) -> float:
    """Mean negative log-likelihood, in nats, of labels under add-one-smoothed training frequencies; NaN without labels.

    Args:
        train_counts: `[V]`, how often each token occurs in the training text.
        label_counts: `[V]`, how often each is a label.
    """
    counts, labels = train_counts.astype(np.float64) + 1, label_counts.sum()
    return float((np.log(counts.sum()) - np.log(counts)) @ label_counts / labels) if labels else math.nan
