"""Tokens on disk: flat files of token ids, memory-mapped, and an index of where documents begin.

A split lies in `<split>-00000.bin`, `<split>-00001.bin`, ... (each full but the last) and `<split>.index.npy`.
"""

import hashlib
from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np

SHARD_BYTES = 512 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id; little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenWriter:
    """Writes one split. A class, because open files and counts live from one batch to the next.

    Args:
        folder: where the files go.
        split: their name, `train` or `validation`.
        vocab_size: V; sets the dtype and the length of `unigram_counts`.
        shard_bytes: size of a full file.

    Attributes:
        tokens: how many were written.
        unigram_counts: `[V]` int64, how often each id was written.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.split, self.dtype = folder, split, token_dtype(vocab_size)
        self.tokens = 0
        self.unigram_counts = np.zeros(vocab_size, dtype=np.int64)
        self._shard_tokens = shard_bytes // self.dtype.itemsize
        self._offsets = array("q", [0])
        self._shard: BinaryIO | None = None
        self._digest = hashlib.sha256()

    @property
    def documents(self) -> int:
        """How many were ended."""
        return len(self._offsets) - 1

    def append(self, ids: np.ndarray) -> None:
        """Add tokens `[n]` to the document at hand."""
        self.unigram_counts += np.bincount(ids, minlength=len(self.unigram_counts))
        left = np.ascontiguousarray(ids, dtype=self.dtype)
        self._digest.update(left.tobytes())
        while len(left):
            room = self._shard_tokens - self.tokens % self._shard_tokens
            self._open_shard().write(left[:room].tobytes())
            self.tokens += len(left[:room])
            left = left[room:]

    def end_document(self) -> None:
        """What comes next belongs to another document."""
        self._offsets.append(self.tokens)

    def close(self) -> str:
        """Write the index. Returns the sha256 (hex) of tokens and document lengths."""
        if self._shard:
            self._shard.close()
        offsets = np.array(self._offsets, dtype="<i8")
        np.save(self.folder / f"{self.split}.index.npy", offsets)
        self._digest.update(offsets.tobytes())
        return self._digest.hexdigest()

    def _open_shard(self) -> BinaryIO:
        """The file that takes the next token."""
        if self._shard is None or self.tokens % self._shard_tokens == 0:
            if self._shard:
                self._shard.close()
            number = self.tokens // self._shard_tokens
            self._shard = open(self.folder / f"{self.split}-{number:05d}.bin", "wb")  # noqa: SIM115
        return self._shard


class TokenStore:
    """A split that was written, memory-mapped: pages come from disk as they are read.

    Args:
        folder: where the files are.
        split: their name, `train` or `validation`.
        vocab_size: V, as when it was written.

    Attributes:
        documents: how many documents there are.
        tokens: how many tokens, with the one that ends each document.
        document_lengths: `[documents]` int64, in tokens.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int) -> None:
        self._offsets = np.load(folder / f"{split}.index.npy")
        self.documents = len(self._offsets) - 1
        self.tokens = int(self._offsets[-1])
        self.document_lengths: np.ndarray = np.diff(self._offsets)
        paths = sorted(folder.glob(f"{split}-*.bin"))
        self._shards = [np.memmap(path, dtype=token_dtype(vocab_size), mode="r") for path in paths]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens `[stop - start]` int64 of a document; 0 <= start <= stop <= its length."""
        assert 0 <= start <= stop <= self.document_lengths[document], "outside the document"
        position, end = int(self._offsets[document]) + start, int(self._offsets[document]) + stop
        tokens = np.empty(stop - start, dtype=np.int64)
        filled = 0
        while position < end:
            shard, place = divmod(position, len(self._shards[0]))
            part = self._shards[shard][place : place + end - position]
            tokens[filled : filled + len(part)] = part
            filled, position = filled + len(part), position + len(part)
        return tokens
