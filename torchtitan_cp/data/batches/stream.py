"""An endless order of a store's tokens that can be read from any cursor."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from torchtitan_cp.data.corpus.store import TokenStore


class _EpochOrder(NamedTuple):
    """Where the tokens of one epoch come from.

    Attributes:
        documents: `[documents]` int64, in the order they are concatenated.
        starts: `[documents + 1]` int64, where each begins in the concatenation; the last is its length.
        blocks: `[whole blocks]` int64, in the order they are read; empty if the concatenation is read as it is.
    """

    documents: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of the concatenation as `[rows, 3]` int64, (document, start, stop), none empty."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        begins, ends = self.starts[first:last], self.starts[first + 1 : last + 1]
        rows = np.stack([self.documents[first:last], np.maximum(start - begins, 0), np.minimum(ends, stop) - begins], 1)
        return rows[rows[:, 1] < rows[:, 2]]


@dataclass(eq=False)
class TokenStream:
    """The store's tokens, epoch after epoch. A read depends only on the arguments and the cursor.

    `shuffled`: in each epoch documents are permuted and concatenated; the concatenation is cut into blocks, and the
    whole blocks are permuted too (the remainder stays at the end). So the short sequences of an early stage come from
    many documents, and a sequence as long as a block is still contiguous text. Of conversations no blocks are
    permuted, as the edge of each would cut one.

    `related`: in each epoch groups are permuted, and the documents of a group follow one another in the store's order,
    so that a long sequence holds text that depends on text far before it (as in-context pretraining,
    arXiv:2310.10638, does by similarity). Blocks are not permuted: that would split groups. The price is that a group
    longer than a step fills whole steps.

    The cursor counts tokens, whatever the ranks and the sequence length, so a run resumes on any number of ranks and in
    any stage. Memory is a few numbers per document and block; no token is held.

    Args:
        store: at least one token.
        block_tokens: the longest sequence length of the curriculum.
        seed: each epoch permutes by it and the number of the epoch.
        shuffle: False leaves documents and blocks in the store's order, as validation wants.
        order: what shuffling permutes, `shuffled` or `related`.
    """

    store: TokenStore
    block_tokens: int
    seed: int
    shuffle: bool = True
    order: str = "shuffled"

    def __post_init__(self) -> None:
        assert self.store.tokens > 0, "a stream needs a token"
        self._order = lru_cache(maxsize=2)(self._make_order)  # a read may cross from one epoch into the next

    def __reduce__(self) -> tuple[type, tuple[TokenStore, int, int, bool, str]]:
        return TokenStream, (self.store, self.block_tokens, self.seed, self.shuffle, self.order)

    def read(self, cursor: int, count: int) -> np.ndarray:
        """Tokens `[count]` int64 from `cursor` on, a number of tokens consumed; crosses blocks and epochs."""
        parts = [self.store.read(*row) for row in self.spans(cursor, count).tolist()]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def spans(self, cursor: int, count: int) -> np.ndarray:
        """Which text the `count` tokens from `cursor` on are; crosses blocks and epochs.

        Returns:
            `[spans, 3]` int64, rows of (document, start, stop) in the order of the stream. No row is empty, and a
            document that continues across a block's end is one row.
        """
        rows, end = [np.empty((0, 3), dtype=np.int64)], cursor + count
        while cursor < end:
            epoch, position = divmod(cursor, self.store.tokens)
            order = self._order(epoch if self.shuffle else 0)
            block, offset = divmod(position, self.block_tokens)
            start, room = position, self.store.tokens - position
            if block < len(order.blocks):
                start, room = int(order.blocks[block]) * self.block_tokens + offset, self.block_tokens - offset
            taken = min(room, end - cursor)
            rows.append(order.rows(start, start + taken))
            cursor += taken
        return _joined(np.concatenate(rows))

    def _make_order(self, epoch: int) -> _EpochOrder:
        bits = np.random.PCG64([self.seed, epoch])
        documents, blocks = np.arange(self.store.documents), np.arange(0)
        if self.shuffle and self.order == "related":
            names, group = np.unique(self.store.groups, return_inverse=True)
            documents = np.argsort(_permutation(bits, len(names))[group], kind="stable")
        elif self.shuffle:
            documents = _permutation(bits, self.store.documents)
            if not self.store.has_masks:
                blocks = _permutation(bits, self.store.tokens // self.block_tokens)
        starts = np.concatenate([[0], np.cumsum(self.store.document_lengths[documents])])
        return _EpochOrder(documents, starts, blocks)


def _permutation(bits: np.random.PCG64, count: int) -> np.ndarray:
    """`[count]` int64, by sorting raw bits: those NumPy keeps the same from version to version (NEP 19)."""
    return np.argsort(bits.random_raw(count), kind="stable")


def _joined(rows: np.ndarray) -> np.ndarray:
    """Rows of (document, start, stop), with each row that continues the row before it merged into that one."""
    continues = (rows[1:, 0] == rows[:-1, 0]) & (rows[1:, 1] == rows[:-1, 2])
    edge = np.ones(min(len(rows), 1), dtype=bool)
    joined = rows[np.flatnonzero(np.concatenate([edge, ~continues]))]
    joined[:, 2] = rows[np.flatnonzero(np.concatenate([~continues, edge])), 2]
    return joined
