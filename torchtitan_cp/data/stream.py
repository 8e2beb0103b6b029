"""An endless order of a store's tokens that can be entered anywhere by a cursor."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from torchtitan_cp.data.store import TokenStore


class _EpochOrder(NamedTuple):
    """Where the tokens of one epoch come from.

    Attributes:
        documents: `[documents]` int64, in the order they are concatenated.
        starts: `[documents + 1]` int64, where each begins in the concatenation; the last is its length.
        blocks: `[whole blocks]` int64, in the order they are read.
    """

    documents: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray


class TokenStream:
    """The store's tokens, epoch after epoch. What is read depends on the arguments and the cursor alone.

    In each epoch documents are permuted and concatenated; the concatenation is cut into blocks, and the whole blocks
    are permuted too (what is left at the end stays there). So the short sequences of an early stage come from many
    documents, and a sequence as long as a block is still contiguous text. The cursor counts tokens: no rank, no
    sequence length is in it, so a run resumes on any number of ranks and in any stage.

    Memory is a few numbers per document and block; no token is held.

    Args:
        store: at least one token.
        block_tokens: the longest sequence length of the curriculum.
        seed: of the order.
        shuffle: False leaves documents and blocks in the store's order, as validation wants.
    """

    def __init__(self, store: TokenStore, block_tokens: int, seed: int, *, shuffle: bool = True) -> None:
        assert store.tokens > 0, "a stream needs a token"
        self.store, self.block_tokens, self.seed, self.shuffle = store, block_tokens, seed, shuffle
        self._order = lru_cache(maxsize=2)(self._make_order)  # a read may cross from one epoch into the next

    def read(self, cursor: int, count: int) -> np.ndarray:
        """Tokens `[count]` int64 from `cursor` on, a number of tokens consumed; crosses blocks and epochs."""
        tokens = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            for document, start, stop in self._pieces(cursor + filled, count - filled):
                tokens[filled : filled + stop - start] = self.store.read(document, start, stop)
                filled += stop - start
        return tokens

    def sequence(self, cursor: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """The sequence at `cursor`: tokens `[S]` int64, and labels `[S]` int64, the token that follows each.

        The label of a block's last token is the first token of the block read next.
        """
        tokens = self.read(cursor, seq_len + 1)
        return tokens[:-1], tokens[1:]

    def _pieces(self, cursor: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(document, start, stop) of up to `count` tokens, to the end of the cursor's block at most."""
        epoch, position = divmod(cursor, self.store.tokens)
        order = self._order(epoch if self.shuffle else 0)
        place, block_end = self._locate(order, position)
        end = min(place + count, block_end)
        index = int(np.searchsorted(order.starts, place, side="right")) - 1
        while place < end:
            start, stop = int(order.starts[index]), min(int(order.starts[index + 1]), end)
            if stop > place:
                yield int(order.documents[index]), place - start, stop - start
            place, index = stop, index + 1

    def _locate(self, order: _EpochOrder, position: int) -> tuple[int, int]:
        """Position in an epoch -> (place in the concatenation, end of its block there)."""
        block, offset = divmod(position, self.block_tokens)
        if block >= len(order.blocks):
            return position, self.store.tokens
        start = int(order.blocks[block]) * self.block_tokens
        return start + offset, start + self.block_tokens

    def _make_order(self, epoch: int) -> _EpochOrder:
        bits = np.random.PCG64([self.seed, epoch])
        documents = self._permutation(bits, self.store.documents)
        blocks = self._permutation(bits, self.store.tokens // self.block_tokens)
        starts = np.concatenate([[0], np.cumsum(self.store.document_lengths[documents])])
        return _EpochOrder(documents, starts, blocks)

    def _permutation(self, bits: np.random.PCG64, count: int) -> np.ndarray:
        """`[count]` int64, by sorting raw bits: those NumPy keeps the same from version to version (NEP 19)."""
        if not self.shuffle:
            return np.arange(count)
        return np.argsort(bits.random_raw(count), kind="stable")
