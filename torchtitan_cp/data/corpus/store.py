"""Tokens on disk: flat files of token ids, memory-mapped, an index of where documents begin, and what describes them.

The files of a split:
- `<split>-00000.bin`, `<split>-00001.bin`, ...: token ids; every shard but the last is full;
- `<split>.offsets.bin`: int64, tokens of a full shard, then where each document begins and where the last one ends;
- `<split>.groups.bin`: int64 `[documents]`, the number of the group each document belongs to.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_cp.data.errors import DataError

JOURNAL_FILE, MANIFEST_FILE = "journal.json", "manifest.json"
SHARD_BYTES = 512 << 20
INDEX_DTYPE = np.dtype("<i8")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id; little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def shard_path(folder: Path, split: str, number: int) -> Path:
    """The file of a shard."""
    return folder / f"{split}-{number:05d}.bin"


def append_to(path: Path, content: bytes | memoryview) -> None:
    """Append to a file and wait until the disk has it."""
    with open(path, "ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class TokenWriter:
    """Writes one split. Documents stay in memory until `commit`.

    Args:
        folder: where the files go.
        split: their name, `train` or `validation`.
        vocab_size: V; sets the dtype and the length of `unigram_counts`.
        shard_bytes: size of a full shard.

    Attributes:
        tokens, documents: how many were added.
        unigram_counts: `[V]` int64, how often each id was committed.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.split, self.dtype = folder, split, token_dtype(vocab_size)
        self.tokens = self.documents = 0
        self.unigram_counts = np.zeros(vocab_size, dtype=np.int64)
        self._shard_tokens = shard_bytes // self.dtype.itemsize
        self._digests: list[str] = []  # of full shards
        self._documents: list[np.ndarray] = []  # not yet on disk; so are the next two
        self._offsets, self._groups = [self._shard_tokens, 0], list[int]()

    def append(self, ids: np.ndarray, group: int) -> None:
        """Add a document of tokens `[n]`, and the number of its group."""
        self._documents.append(ids.astype(self.dtype))
        self.tokens, self.documents = self.tokens + len(ids), self.documents + 1
        self._offsets.append(self.tokens)
        self._groups.append(group)

    def commit(self) -> dict[str, Any]:
        """Write everything to disk. Returns the state that `restore` takes, as JSON values."""
        tokens = np.concatenate([np.empty(0, self.dtype), *self._documents])
        self.unigram_counts += np.bincount(tokens, minlength=len(self.unigram_counts))
        position = self.tokens - len(tokens)
        while len(tokens):
            number, used = divmod(position, self._shard_tokens)
            part, tokens = np.split(tokens, [self._shard_tokens - used])
            path = shard_path(self.folder, self.split, number)
            append_to(path, part.data)
            position += len(part)
            if used + len(part) == self._shard_tokens:
                self._digests.append(_digest_of(path))
        for name, numbers in (("offsets", self._offsets), ("groups", self._groups)):
            append_to(self.folder / f"{self.split}.{name}.bin", np.array(numbers, dtype=INDEX_DTYPE).data)
            numbers.clear()
        self._documents.clear()
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "shard_digests": self._digests,
            "unigram_counts": self.unigram_counts.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a commit; the files end where it ended."""
        self.tokens, self.documents, self._digests = state["tokens"], state["documents"], state["shard_digests"]
        self.unigram_counts[:] = state["unigram_counts"]
        self._offsets.clear()

    def fingerprint(self) -> str:
        """sha256 (hex) of what was committed: tokens, document lengths and groups."""
        open_shard = shard_path(self.folder, self.split, len(self._digests))
        digests = [*self._digests, _digest_of(open_shard) if open_shard.exists() else hashlib.sha256().hexdigest()]
        digest = hashlib.sha256("".join(digests).encode())
        for name in ("offsets", "groups"):
            digest.update((self.folder / f"{self.split}.{name}.bin").read_bytes())
        return digest.hexdigest()


def _digest_of(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, mode="r").data).hexdigest()


class TokenStore:
    """A finished split, memory-mapped: pages come from disk as they are read.

    Args:
        folder: where the files are.
        split: their name, `train` or `validation`.
        vocab_size: V, as when it was written.

    Attributes:
        documents: how many documents there are.
        tokens: how many tokens, with the one that ends each document.
        document_lengths: `[documents]` int64, in tokens.
        groups: `[documents]` int64; documents of one folder, repository or value of `group_field` share a number.

    Raises:
        DataError: a file is missing, or its size does not fit the index.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int) -> None:
        self._arguments = (folder, split, vocab_size)
        index = _map(folder / f"{split}.offsets.bin", INDEX_DTYPE, None)
        if len(index) < 2:
            raise _damaged(folder / f"{split}.offsets.bin", "is cut short")
        self._shard_tokens, self._offsets = int(index[0]), index[1:]
        self.documents = len(self._offsets) - 1
        self.tokens = int(self._offsets[-1])
        self.document_lengths: np.ndarray = np.diff(self._offsets)
        self.groups = _map(folder / f"{split}.groups.bin", INDEX_DTYPE, self.documents)
        dtype = token_dtype(vocab_size)
        self._shards = [
            _map(shard_path(folder, split, number), dtype, min(self._shard_tokens, self.tokens - start))
            for number, start in enumerate(range(0, self.tokens, self._shard_tokens))
        ]

    def __reduce__(self) -> Any:
        return TokenStore, self._arguments

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens `[stop - start]` int64 of a document; 0 <= start <= stop <= its length."""
        assert 0 <= start <= stop <= self.document_lengths[document], "outside the document"
        position, end = int(self._offsets[document]) + start, int(self._offsets[document]) + stop
        tokens = np.empty(stop - start, dtype=np.int64)
        filled = 0
        while position < end:
            shard, offset = divmod(position, self._shard_tokens)
            part = self._shards[shard][offset : offset + end - position]
            tokens[filled : filled + len(part)] = part
            filled, position = filled + len(part), position + len(part)
        return tokens


def _map(path: Path, dtype: np.dtype, count: int | None) -> np.ndarray:
    """A mapped file of `count` numbers; None: however many there are."""
    try:
        size_bytes = path.stat().st_size
    except OSError:
        raise _damaged(path, "is missing") from None
    expected = size_bytes // dtype.itemsize if count is None else count
    if size_bytes != expected * dtype.itemsize:
        raise _damaged(path, f"has {size_bytes} bytes, and by its index {expected * dtype.itemsize}")
    return np.memmap(path, dtype=dtype, mode="r") if expected else np.empty(0, dtype=dtype)


def _damaged(path: Path, problem: str) -> DataError:
    return DataError(f"{path} {problem}", fix=f"delete {path.parent}: the next start makes it again")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if it is missing or unreadable."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def file_sizes(folder: Path) -> dict[str, int]:
    """Size in bytes of each file of a folder but the journal and the manifest; another rank may be deleting it."""
    sizes = {}
    with suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            with suppress(FileNotFoundError):
                if path.name not in (JOURNAL_FILE, MANIFEST_FILE):
                    sizes[path.name] = path.stat().st_size
    return sizes


def find_damage(folder: Path, expected: dict[str, int], *, may_be_longer: bool = False) -> str:
    """Which file of a folder does not have its expected size in bytes; empty if all have."""
    sizes = file_sizes(folder)
    for name, size in expected.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] < size or (sizes[name] > size and not may_be_longer):
            return f"{name} has {sizes[name]} bytes instead of {size}"
    return ""
