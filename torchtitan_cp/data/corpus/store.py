"""Tokens on disk: flat files of token ids, memory-mapped, and an index of where documents begin.

A split lies in
- `<split>-00000.bin`, `<split>-00001.bin`, ...: token ids, each file full but the last;
- `<split>.offsets.bin`: int64, tokens of a full file, then where each document begins and where the last one ends;
- `<split>.groups.bin`: int64 `[documents]`, the number of the group each belongs to.
"""

import hashlib
import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from torchtitan_cp.data.errors import DataError

SHARD_BYTES = 512 << 20
PART_TOKENS = 1 << 20  # of a long document, worked on at one time
INDEX_DTYPE = np.dtype("<i8")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id; little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenWriter:
    """Writes one split. A class, because open files and counts live from one document to the next.

    What was committed survives the process: another writer goes on from there by `restore`.

    Args:
        folder: where the files go.
        split: their name, `train` or `validation`.
        vocab_size: V; sets the dtype and the length of `unigram_counts`.
        shard_bytes: size of a full file.

    Attributes:
        tokens: how many were written.
        documents: how many were ended.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.split, self.dtype = folder, split, token_dtype(vocab_size)
        self.tokens = self.documents = 0
        self._unigram_counts = np.zeros(vocab_size, dtype=np.int64)
        self._uncounted: list[np.ndarray] = []  # counted together, for a count takes V steps however few the tokens
        self._uncounted_tokens = 0
        self._shard_tokens = shard_bytes // self.dtype.itemsize
        self._offsets, self._groups = array("q", [self._shard_tokens, 0]), array("q")  # not yet in their files
        self._shard: BinaryIO | None = None
        self._digests: list[str] = []  # of full shards
        self._digest = hashlib.sha256()  # of the open one

    @property
    def unigram_counts(self) -> np.ndarray:
        """`[V]` int64, how often each id was written."""
        self._count()
        return self._unigram_counts

    def _count(self) -> None:
        if self._uncounted:
            ids = np.concatenate(self._uncounted)
            self._unigram_counts += np.bincount(ids, minlength=len(self._unigram_counts))
            self._uncounted, self._uncounted_tokens = [], 0

    def append(self, ids: np.ndarray) -> None:
        """Add tokens `[n]` to the document at hand."""
        while len(ids):
            room = self._shard_tokens - self.tokens % self._shard_tokens
            part = np.ascontiguousarray(ids[: min(room, PART_TOKENS)], dtype=self.dtype)
            self._open_shard().write(part.data)
            self._digest.update(part.data)
            self._uncounted.append(part)
            self.tokens, self._uncounted_tokens = self.tokens + len(part), self._uncounted_tokens + len(part)
            if self._uncounted_tokens > len(self._unigram_counts):
                self._count()
            if self.tokens % self._shard_tokens == 0:
                self._close_shard()
            ids = ids[len(part) :]

    def end_document(self, group: int | None = None) -> None:
        """What comes next belongs to another document.

        Args:
            group: number of the group it belongs to; None: its own number, where no document of a split is given one.
        """
        self._offsets.append(self.tokens)
        self._groups.append(self.documents if group is None else group)
        self.documents += 1

    def commit(self) -> dict[str, Any]:
        """Bring everything to disk. Returns what `restore` needs, as JSON has it."""
        if self._shard:
            _sync(self._shard)
        for name, numbers in (("offsets", self._offsets), ("groups", self._groups)):
            with open(self._index(name), "ab") as file:
                file.write(np.array(numbers, dtype=INDEX_DTYPE).tobytes())
                _sync(file)
            del numbers[:]
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "shard_digests": [*self._digests, self._digest.hexdigest()],
            "unigram_counts": self.unigram_counts.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> str:
        """Go on from a commit; what was written after it is cut off.

        Returns:
            what is wrong with the files, in words; empty if they hold what was committed.
        """
        self.tokens, self.documents = state["tokens"], state["documents"]
        self._unigram_counts[:] = state["unigram_counts"]
        *self._digests, open_digest = state["shard_digests"]
        del self._offsets[:]
        sizes = {self._shard_path(number): self._shard_tokens for number in range(len(self._digests))}
        open_tokens = self.tokens - self._shard_tokens * len(self._digests)
        if open_tokens:
            sizes[self._shard_path(len(self._digests))] = open_tokens
        sizes = {path: tokens * self.dtype.itemsize for path, tokens in sizes.items()}
        sizes[self._index("offsets")] = INDEX_DTYPE.itemsize * (self.documents + 2)
        sizes[self._index("groups")] = INDEX_DTYPE.itemsize * self.documents
        for path in set(self.folder.glob(f"{self.split}-*.bin")) - set(sizes):
            path.unlink()
        for path, size in sizes.items():
            if not path.exists() or path.stat().st_size < size:
                return f"{path.name} is shorter than {size} bytes"
            os.truncate(path, size)
        if open_tokens:
            self._digest.update(self._shard_path(len(self._digests)).read_bytes())
        return "" if self._digest.hexdigest() == open_digest else f"the last file of {self.split} was changed"

    def close(self) -> str:
        """Finish the files. Returns the sha256 (hex) of tokens, document lengths and groups."""
        digests = self.commit()["shard_digests"]
        if self._shard:
            self._shard.close()
        digest = hashlib.sha256("".join(digests).encode())
        for name in ("offsets", "groups"):
            digest.update(np.fromfile(self._index(name), dtype=INDEX_DTYPE).tobytes())
        return digest.hexdigest()

    def _index(self, name: str) -> Path:
        return self.folder / f"{self.split}.{name}.bin"

    def _shard_path(self, number: int) -> Path:
        return self.folder / f"{self.split}-{number:05d}.bin"

    def _open_shard(self) -> BinaryIO:
        """The file that takes the next token."""
        if self._shard is None:
            self._shard = open(self._shard_path(len(self._digests)), "ab")  # noqa: SIM115
        return self._shard

    def _close_shard(self) -> None:
        assert self._shard is not None, "a full shard was written to"
        _sync(self._shard)
        self._shard.close()
        self._digests.append(self._digest.hexdigest())
        self._shard, self._digest = None, hashlib.sha256()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


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
        groups: `[documents]` int64, the number of the group each belongs to: documents of one folder, repository
            or value of `group_field` have the same.

    Raises:
        DataError: a file is missing or not as long as the index says.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int) -> None:
        self._made_of = (folder, split, vocab_size)
        index = _map(folder / f"{split}.offsets.bin", INDEX_DTYPE, None)
        if len(index) < 2:
            raise _damaged(folder / f"{split}.offsets.bin", "is cut short")
        self._shard_tokens, self._offsets = int(index[0]), index[1:]
        self.documents = len(self._offsets) - 1
        self.tokens = int(self._offsets[-1])
        self.document_lengths: np.ndarray = np.diff(self._offsets)
        self.groups = _map(folder / f"{split}.groups.bin", INDEX_DTYPE, self.documents)
        dtype, starts = token_dtype(vocab_size), range(0, self.tokens, self._shard_tokens)
        self._shards = [
            _map(folder / f"{split}-{number:05d}.bin", dtype, min(self._shard_tokens, self.tokens - start))
            for number, start in enumerate(starts)
        ]

    def __reduce__(self) -> Any:
        return TokenStore, self._made_of

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens `[stop - start]` int64 of a document; 0 <= start <= stop <= its length."""
        assert 0 <= start <= stop <= self.document_lengths[document], "outside the document"
        position, end = int(self._offsets[document]) + start, int(self._offsets[document]) + stop
        tokens = np.empty(stop - start, dtype=np.int64)
        filled = 0
        while position < end:
            shard, place = divmod(position, self._shard_tokens)
            part = self._shards[shard][place : place + end - position]
            tokens[filled : filled + len(part)] = part
            filled, position = filled + len(part), position + len(part)
        return tokens


def _map(path: Path, dtype: np.dtype, count: int | None) -> np.ndarray:
    """A file of `count` numbers (None: however many), mapped."""
    try:
        size_bytes = path.stat().st_size
    except OSError:
        raise _damaged(path, "is missing") from None
    wanted = size_bytes // dtype.itemsize if count is None else count
    if size_bytes != wanted * dtype.itemsize:
        raise _damaged(path, f"has {size_bytes} bytes, and by its index {wanted * dtype.itemsize}")
    return np.memmap(path, dtype=dtype, mode="r") if wanted else np.empty(0, dtype=dtype)


def _damaged(path: Path, problem: str) -> DataError:
    return DataError(f"{path} {problem}", fix=f"delete {path.parent}: the next start makes it again")
