"""How far back each stage's model finds planted keys: the fraction found in far places, and a sentence about it.

The accuracy at a length is a mean over depths: in a prompt beyond the trained length, a key just above the question may
still be found. Keys in the upper half of a prompt show where a model stops.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchtitan_cp.evaluation.result import Retrieval

# From 90 % on a stage's model finds keys, and up to 20 % it does not. A length has some dozens of prompts, so 90 % is
# asked of the stage's own length, and of the mean of all up to it.
FOUND, MISSED = 0.9, 0.2
TRANSITION = 1  # columns beyond a stage's length in which it may do either
UPPER = 0.5  # depth that ends the upper half of a prompt


class Reach(NamedTuple):
    """The keys that the model of a stage finds.

    Attributes:
        stage: name.
        seq_len: tokens of the stage's sequences.
        found: by tokens of a prompt, rising: the fraction found of the keys in the upper half of such prompts.
    """

    stage: str
    seq_len: int
    found: dict[int, float]

    def split(self) -> tuple[list[int], list[int]]:
        """The lengths of prompts up to the stage's length, and those beyond it."""
        within = [length for length in self.found if length <= self.seq_len]
        return within, list(self.found)[len(within) :]

    def missed(self) -> int | None:
        """The length up to the stage's of whose prompts the fewest keys are found, if the model does not find them."""
        within = self.split()[0]
        if not within:
            return None
        mean = sum(self.found[length] for length in within) / len(within)
        return min(within, key=self.found.__getitem__) if min(mean, self.found[within[-1]]) < FOUND else None

    def describe(self, length: int) -> str:
        """An entry in words: `85% after stage 4K, in prompts of 2,048 tokens`."""
        return f"{self.found[length]:.0%} after stage {self.stage}, in prompts of {length:,} tokens"


def found_far_back(retrieval: Retrieval) -> dict[int, float]:
    """By tokens of a prompt, the fraction found of the keys in its upper half, from half of it to all of it back."""
    upper = retrieval.accuracy[np.array(retrieval.depths) < UPPER]
    tried = [column[~np.isnan(column)] for column in upper.T]
    return {length: float(each.mean()) for length, each in zip(retrieval.lengths, tried, strict=True) if len(each)}


def reach_map(stages: Sequence[Reach]) -> tuple[list[int], np.ndarray]:
    """The lengths of all stages' prompts, and what was found, `[stages, lengths]` fp64, NaN where nothing was asked."""
    lengths = sorted({length for stage in stages for length in stage.found})
    rows = [[stage.found.get(length, np.nan) for length in lengths] for stage in stages]
    return lengths, np.array(rows, dtype=np.float64)


def describe_reach(stages: Sequence[Reach]) -> str:
    """What the map means, in one sentence.

    Args:
        stages: in order, not empty, each with something found.
    """
    reach, best = "each stage's length" if len(stages) > 1 else "the stage's length", max(stages[-1].found.values())
    if best <= MISSED:
        return f"The model does not find planted keys yet: {best:.0%} at most, in prompts of any length."
    if missed := [stage.describe(length) for stage in stages if (length := stage.missed()) is not None]:
        return f"The model does not find keys over {reach}: {missed[0]}."
    beyond = [(stage, length) for stage in stages for length in stage.split()[1][TRANSITION:]]
    if not beyond:
        return f"The model finds keys over {reach}. Longer prompts were not tried (evaluation.passkey.lengths)."
    if found := [stage.describe(length) for stage, length in beyond if stage.found[length] > MISSED]:
        return f"The model finds keys over {reach}, and some far beyond it: {found[0]}."
    return f"The model finds keys over {reach}, and not far beyond it" + (
        ": the longer stages taught it to look further back." if len(stages) > 1 else "."
    )
