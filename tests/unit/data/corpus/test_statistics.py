"""Lengths of documents in numbers."""

import numpy as np

from torchtitan_cp.data.corpus.statistics import LengthStatistics


def test_statistics_are_of_lengths_that_exist_and_weigh_long_documents_by_tokens() -> None:
    lengths = np.array([1] * 50 + [10] * 40 + [5000] * 9 + [200_000])
    statistics = LengthStatistics.of(lengths)
    assert (statistics.documents, statistics.tokens) == (100, 245_450)
    assert (statistics.p50, statistics.p90, statistics.p99, statistics.longest) == (1, 10, 5000, 200_000)
    assert statistics.mean == 2454.5
    assert statistics.long_fraction == {"4K": 245_000 / 245_450, "32K": 200_000 / 245_450, "128K": 200_000 / 245_450}
    nothing = LengthStatistics.of(np.empty(0, dtype=np.int64))
    assert (nothing.documents, nothing.tokens, nothing.longest, nothing.long_fraction["4K"]) == (0, 0, 0, 0.0)
