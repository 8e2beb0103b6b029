"""What was found again of what was planted."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Retrieval:
    """Accuracy of one kind of prompt.

    Attributes:
        lengths: tokens of a prompt, rising.
        depths: where the needle stood, from 0 at the top to 1 just above the question.
        accuracy: `[depths, lengths]`, share of the prompts whose whole answer was right; NaN where none was tried.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    accuracy: np.ndarray

    def at(self, seq_len: int) -> float | None:
        """Mean over depths at the longest length up to `seq_len` that was tried; None if none was."""
        tried = [column for column in self.accuracy.T[: np.searchsorted(self.lengths, seq_len, side="right")]]
        tried = [column for column in tried if not np.isnan(column).all()]
        return float(np.nanmean(tried[-1])) if tried else None
