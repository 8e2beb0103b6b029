"""How much of a run's time evaluation may take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Budget:
    """Keeps evaluation below a fraction of the run's time. Rank 0's clock decides for all ranks.

    Attributes:
        max_share: fraction of the time of training and evaluation together; 1 is no limit.
        trained_seconds, spent_seconds: of training and of evaluation so far.
        token_seconds: per token, of the last evaluation.
    """

    max_share: float
    trained_seconds: float = 0.0
    spent_seconds: float = 0.0
    token_seconds: float = 0.0

    def affords(self, tokens: int) -> bool:
        """True if this many more tokens stay within max_share, at the speed of the last ones."""
        spent = self.spent_seconds + tokens * self.token_seconds
        return self.max_share >= 1 or spent <= self.max_share * (self.trained_seconds + spent)

    @contextmanager
    def spending(self, tokens: int) -> Iterator[None]:
        """Count the seconds of an evaluation on this many tokens."""
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        self.spent_seconds += seconds
        self.token_seconds = seconds / tokens
