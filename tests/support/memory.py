"""A store in memory whose tokens are 0, 1, 2, ... so that each tells where it stands."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.data.corpus.store import TokenStore


class MemoryStore:
    """As TokenStore, without files.

    Args:
        masks: of each document, whether each token is learned; None: the store has none.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        groups: Sequence[int] | None = None,
        masks: Sequence[Sequence[bool]] | None = None,
    ) -> None:
        self.masks, self.has_masks = masks, masks is not None
        self.document_lengths = np.array(lengths, dtype=np.int64)
        self.documents, self.tokens = len(lengths), int(sum(lengths))
        self.begins = np.concatenate([[0], np.cumsum(self.document_lengths)])
        self.groups = np.arange(len(lengths)) if groups is None else np.array(groups, dtype=np.int64)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.document_lengths[document], "outside the document"
        return np.arange(self.begins[document] + start, self.begins[document] + stop)

    def read_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        return None if self.masks is None else np.array(self.masks[document], dtype=bool)[start:stop]


TURN = 20


class MaskedStore:
    """A store's documents as conversations: TURN tokens of a question, TURN of an answer that is learned, and again."""

    has_masks = True

    def __init__(self, store: TokenStore) -> None:
        self.read, self.groups, self.documents = store.read, store.groups, store.documents
        self.document_lengths, self.tokens = store.document_lengths, store.tokens

    def read_mask(self, document: int, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop) // TURN % 2 == 1


def masked(stream: TokenStream) -> TokenStream:
    """The same stream of conversations."""
    return replace(stream, store=MaskedStore(stream.store))  # type: ignore[arg-type]


def rows_of(lengths: Sequence[int]) -> np.ndarray:
    """Whole documents of these lengths as a stream's spans."""
    return TokenStream(MemoryStore(lengths), 1, seed=0, shuffle=False).spans(0, sum(lengths))
