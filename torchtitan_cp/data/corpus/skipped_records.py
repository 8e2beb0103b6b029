"""Count of what a corpus holds that cannot be read: nothing is dropped without a word."""

import logging
from collections import Counter
from collections.abc import Mapping

logger = logging.getLogger(__name__)

NAMED_OF_A_KIND = 5


class SkippedRecords:
    """What was skipped, by kind; the first few of a kind are named in the log.

    Args:
        quiet: only count. For a second pass over a corpus whose rejects are named in another.

    Attributes:
        counts: how many were skipped, by kind.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self._quiet = quiet

    def add(self, kind: str, where: str) -> None:
        """Count one more of `kind`; `where` is its path, and line where there is one."""
        self.counts[kind] += 1
        if not self._quiet and self.counts[kind] <= NAMED_OF_A_KIND:
            logger.warning("%s: %s; skipped", where, kind)

    def restore(self, counts: Mapping[str, int]) -> None:
        """Go on from these counts, in place of those at hand."""
        self.counts = Counter(counts)

    def summary(self) -> str:
        """The totals in one line, e.g. `7 x malformed JSON, 2 x not UTF-8`; empty if nothing was skipped."""
        return ", ".join(f"{count} x {kind}" for kind, count in sorted(self.counts.items()))
