"""An endless order of a store's tokens that can be read from any cursor."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np


class Documents(Protocol):
    """What a stream reads: TokenStore, or a view of one.

    Attributes:
        groups: `[documents]` int64; documents that belong together (one folder, one repository) share a number.
    """

    documents: int
    tokens: int
    document_lengths: np.ndarray
    groups: np.ndarray

    def read(self, document: int, start: int, stop: int) -> np.ndarray: ...


class SeparatedStore:
    """A store with one more token at the end of every document that is not empty.

    The separator is part of the document, so cursors, windows and epochs count it, and stay exact.

    Args:
        store: what is read.
        separator: token id, beside the token that ends each document in the store.

    Attributes:
        documents, tokens, document_lengths, groups: as of a store; separators are counted.
    """

    def __init__(self, store: Documents, separator: int) -> None:
        self.store, self.separator = store, separator
        self.documents = store.documents
        self.document_lengths: np.ndarray = store.document_lengths + (store.document_lengths > 0)
        self.tokens = int(self.document_lengths.sum())
        self.groups = store.groups

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens `[stop - start]` int64 of a document; 0 <= start <= stop <= its length."""
        end = int(self.store.document_lengths[document])
        tokens = self.store.read(document, min(start, end), min(stop, end))
        return np.append(tokens, self.separator) if start <= end < stop else tokens


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


@dataclass(eq=False)
class TokenStream:
    """The store's tokens, epoch after epoch. A read depends only on the arguments and the cursor.

    `shuffled`: in each epoch documents are permuted and concatenated; the concatenation is cut into blocks, and the
    whole blocks are permuted too (the remainder stays at the end). So the short sequences of an early stage come from
    many documents, and a sequence as long as a block is still contiguous text.

    `related`: in each epoch groups are permuted, and the documents of a group follow one another in the store's order,
    so that a long sequence holds text that depends on text far before it (as in-context pretraining,
    arXiv:2310.10638, does by similarity). Blocks are not permuted: that would split groups. The price is that a group
    longer than a step fills whole steps.

    The cursor counts tokens, whatever the ranks and the sequence length, so a run resumes on any number of ranks and in
    any stage. Memory is a few numbers per document and block; no token is held.

    Args:
        store: at least one token.
        block_tokens: the longest sequence length of the curriculum.
        seed: of the order.
        shuffle: False leaves documents and blocks in the store's order, as validation wants.
        order: what shuffling permutes, `shuffled` or `related`.
    """

    store: Documents
    block_tokens: int
    seed: int
    shuffle: bool = True
    order: str = "shuffled"

    def __post_init__(self) -> None:
        assert self.store.tokens > 0, "a stream needs a token"
        self._order = lru_cache(maxsize=2)(self._make_order)  # a read may cross from one epoch into the next

    def __reduce__(self) -> Any:
        return TokenStream, (self.store, self.block_tokens, self.seed, self.shuffle, self.order)

    def read(self, cursor: int, count: int) -> np.ndarray:
        """Tokens `[count]` int64 from `cursor` on, a number of tokens consumed; crosses blocks and epochs."""
        tokens = np.empty(count, dtype=np.int64)
        filled = 0
        for document, start, stop in self.spans(cursor, count).tolist():
            tokens[filled : filled + stop - start] = self.store.read(document, start, stop)
            filled += stop - start
        return tokens

    def spans(self, cursor: int, count: int) -> np.ndarray:
        """Which text the `count` tokens from `cursor` on are; crosses blocks and epochs.

        Returns:
            `[spans, 3]` int64, rows of (document, start, stop) in the order of the stream. No row is empty, and a
            document that continues across a block's end is one row.
        """
        rows = [np.empty((0, 3), dtype=np.int64)]
        end = cursor + count
        while cursor < end:
            epoch, position = divmod(cursor, self.store.tokens)
            stop = min(position + end - cursor, self.store.tokens)
            rows.append(self._spans_of_epoch(self._order(epoch if self.shuffle else 0), position, stop))
            cursor += stop - position
        return _joined(np.concatenate(rows))

    def _spans_of_epoch(self, order: _EpochOrder, position: int, stop: int) -> np.ndarray:
        """Rows as in `spans` of the positions from `position` to `stop` of one epoch, cut at block ends."""
        last = min(-(-stop // self.block_tokens), len(order.blocks) + 1)
        inner = np.arange(position // self.block_tokens + 1, last) * self.block_tokens
        edges = np.concatenate([[position], inner, [stop]])
        places = self._places(order, edges[:-1])
        ends = places + np.diff(edges)
        first = np.searchsorted(order.starts, places, side="right") - 1
        counts = np.searchsorted(order.starts, ends, side="left") - first
        block = np.repeat(np.arange(len(places)), counts)
        index = first[block] + counted(counts)
        begins = order.starts[index]
        starts = np.maximum(begins, places[block])
        stops = np.minimum(order.starts[index + 1], ends[block])
        rows = np.stack([order.documents[index], starts - begins, stops - begins], axis=1)
        return rows[stops > starts]

    def _places(self, order: _EpochOrder, positions: np.ndarray) -> np.ndarray:
        """Positions in an epoch -> positions in the concatenation; both `[n]` int64."""
        places = positions.copy()
        block, offset = np.divmod(positions, self.block_tokens)
        moved = block < len(order.blocks)
        places[moved] = order.blocks[block[moved]] * self.block_tokens + offset[moved]
        return places

    def _make_order(self, epoch: int) -> _EpochOrder:
        bits = np.random.PCG64([self.seed, epoch])
        documents, blocks = np.arange(self.store.documents), np.arange(0)
        if self.shuffle and self.order == "related":
            documents = _permuted_groups(bits, self.store.groups)
        elif self.shuffle:
            documents = _permutation(bits, self.store.documents)
            blocks = _permutation(bits, self.store.tokens // self.block_tokens)
        starts = np.concatenate([[0], np.cumsum(self.store.document_lengths[documents])])
        return _EpochOrder(documents, starts, blocks)


def counted(counts: np.ndarray) -> np.ndarray:
    """0 to count - 1 for each count, one after another: [2, 0, 3] -> [0, 1, 0, 1, 2]. Both int64."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _permutation(bits: np.random.PCG64, count: int) -> np.ndarray:
    """`[count]` int64, by sorting raw bits: those NumPy keeps the same from version to version (NEP 19)."""
    return np.argsort(bits.random_raw(count), kind="stable")


def _permuted_groups(bits: np.random.PCG64, groups: np.ndarray) -> np.ndarray:
    """`[documents]` int64: groups permuted, the documents of each one after another in the store's order."""
    names, group = np.unique(groups, return_inverse=True)
    return np.argsort(_permutation(bits, len(names))[group], kind="stable")


def _joined(rows: np.ndarray) -> np.ndarray:
    """Rows of (document, start, stop), with each row that continues the row before it merged into that one."""
    continues = (rows[1:, 0] == rows[:-1, 0]) & (rows[1:, 1] == rows[:-1, 2])
    edge = np.ones(min(len(rows), 1), dtype=bool)
    joined = rows[np.flatnonzero(np.concatenate([edge, ~continues]))]
    joined[:, 2] = rows[np.flatnonzero(np.concatenate([~continues, edge])), 2]
    return joined
