"""A store in memory whose tokens are 0, 1, 2, ... so that each tells where it stands."""

from collections.abc import Sequence

import numpy as np

from torchtitan_cp.data.batches.stream import TokenStream


class MemoryStore:
    """As TokenStore, without files."""

    def __init__(self, lengths: Sequence[int], groups: Sequence[int] | None = None) -> None:
        self.document_lengths = np.array(lengths, dtype=np.int64)
        self.documents, self.tokens = len(lengths), int(sum(lengths))
        self.begins = np.concatenate([[0], np.cumsum(self.document_lengths)])
        self.groups = np.arange(len(lengths)) if groups is None else np.array(groups, dtype=np.int64)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.document_lengths[document], "outside the document"
        return np.arange(self.begins[document] + start, self.begins[document] + stop)


def rows_of(lengths: Sequence[int]) -> np.ndarray:
    """Whole documents of these lengths as a stream's spans."""
    return TokenStream(MemoryStore(lengths), 1, seed=0, shuffle=False).spans(0, sum(lengths))
