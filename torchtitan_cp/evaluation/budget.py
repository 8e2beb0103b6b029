"""How much of a run's time goes into looking at it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Budget:
    """Keeps evaluation below a share of the run's time. One rank's clock decides, and tells the others.

    Attributes:
        share: of the time of training and evaluation together; 1 never says no.
        trained_seconds, spent_seconds: on either, so far.
        token_seconds: of a token of the last thing that was measured.
    """

    share: float
    trained_seconds: float = 0.0
    spent_seconds: float = 0.0
    token_seconds: float = 0.0

    def affords(self, tokens: int) -> bool:
        """Whether this many more tokens stay within max_share, at the speed of the last ones."""
        spent = self.spent_seconds + tokens * self.token_seconds
        return self.share >= 1 or spent <= self.share * (self.trained_seconds + spent)

    @contextmanager
    def spending(self, tokens: int) -> Iterator[None]:
        """Count the seconds of an evaluation on so many tokens."""
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        self.spent_seconds += seconds
        self.token_seconds = seconds / tokens
