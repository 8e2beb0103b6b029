"""Tokens on disk: flat files of token ids, memory-mapped, an index of where documents begin, and what describes them.

The files of a split:
- `<split>-00000.bin`, `<split>-00001.bin`, ...: token ids; every shard but the last is full;
- `<split>.offsets.bin`: int64, tokens of a full shard, then where each document begins and where the last one ends;
- `<split>.groups.bin`: int64 `[documents]`, the number of the group each document belongs to;
- `<split>.mask.bin`, for conversations: one bit per token, most significant first, 1 if it is learned; each document
  begins at a new byte.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from torchtitan_cp.config.errors import name_in_errors
from torchtitan_cp.config.json_types import Json, JsonObject

JOURNAL_FILE, MANIFEST_FILE = "journal.json", "manifest.json"
SHARD_BYTES = 512 << 20
INDEX_DTYPE = np.dtype("<i8")
COUNTED_TOKENS = 4 << 20  # tokens per counting pass, as NumPy converts them to int64


class Manifest(TypedDict):
    """A finished folder of the cache.

    Attributes:
        settings: of the source and the tokenizer, as in the config.
        seconds: that making the tokens took; missing in older folders.
        file_bytes: size of each file but the manifest.
    """

    format_version: int
    settings: JsonObject
    corpus_fingerprint: str
    tokenizer_fingerprint: str
    content_fingerprint: str
    vocab_size: int
    seconds: float
    file_bytes: dict[str, int]


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id; little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def shard_path(folder: Path, split: str, number: int) -> Path:
    """The file of a shard."""
    return folder / f"{split}-{number:05d}.bin"


def append_to(path: Path, content: bytes | memoryview, mode: str = "ab") -> None:
    """Append to a file, or write it with mode "wb", and wait until the disk has it."""
    with name_in_errors(path), open(path, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def append_documents(
    folder: Path,
    split: str,
    vocab_size: int,
    documents: Sequence[tuple[np.ndarray, int]],
    shard_bytes: int = SHARD_BYTES,
    masks: Sequence[np.ndarray] | None = None,
) -> None:
    """Append documents to the files of a split. The disk has them when this returns.

    Args:
        folder, split, vocab_size: as TokenStore's.
        documents: tokens `[n]` of each, and the number of its group.
        shard_bytes: size of a full shard, for a split that has no files yet.
        masks: `[n]` bool of each document, which tokens are learned; None: the split has no masks.
    """
    dtype, index = token_dtype(vocab_size), folder / f"{split}.offsets.bin"
    if not index.exists():
        append_to(index, np.array([shard_bytes // dtype.itemsize, 0], dtype=INDEX_DTYPE).data)
    shard_tokens, position = (int(number) for number in _map(index, INDEX_DTYPE)[[0, -1]])
    tokens = np.concatenate([np.empty(0, dtype), *(ids for ids, _ in documents)], dtype=dtype, casting="unsafe")
    ends = position + np.cumsum([len(ids) for ids, _ in documents], dtype=INDEX_DTYPE)
    while len(tokens):
        number, used = divmod(position, shard_tokens)
        part, tokens = np.split(tokens, [shard_tokens - used])
        append_to(shard_path(folder, split, number), part.data)
        position += len(part)
    if masks is not None:
        append_to(folder / f"{split}.mask.bin", b"".join(np.packbits(mask).tobytes() for mask in masks))
    append_to(index, ends.data)
    append_to(folder / f"{split}.groups.bin", np.array([group for _, group in documents], dtype=INDEX_DTYPE).data)


class TokenStore:
    """A finished split, memory-mapped: pages come from disk as they are read.

    Args:
        folder: where the files are.
        split: their name, `train` or `validation`.
        vocab_size: V, as when it was written.

    Attributes:
        documents: number of documents.
        tokens: number of tokens, including end tokens.
        document_lengths: `[documents]` int64, in tokens.
        groups: `[documents]` int64; documents of one folder, repository or value of `group_field` share a number.
        has_masks: some tokens are not learned; see read_mask.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int) -> None:
        self.folder, self.split, self.vocab_size = folder, split, vocab_size
        self._index = _map(folder / f"{split}.offsets.bin", INDEX_DTYPE)
        self._shard_tokens, self._offsets = int(self._index[0]), self._index[1:]
        self.document_lengths = np.diff(self._offsets)
        self.documents, self.tokens = len(self.document_lengths), int(self.document_lengths.sum())
        self.groups = _map(folder / f"{split}.groups.bin", INDEX_DTYPE)
        shards = range(-(-int(self._offsets[-1]) // self._shard_tokens))
        self._shards = [_map(shard_path(folder, split, number), token_dtype(vocab_size)) for number in shards]
        self.has_masks = (folder / f"{split}.mask.bin").exists()
        if self.has_masks:
            self._mask_offsets = np.append(0, np.cumsum(-(-self.document_lengths // 8)))
            self._mask = _map(folder / f"{split}.mask.bin", np.dtype(np.uint8))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return TokenStore, (self.folder, self.split, self.vocab_size)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens `[stop - start]` int64 of a document; 0 <= start <= stop <= its length."""
        assert 0 <= start <= stop <= self.document_lengths[document], "outside the document"
        begin = int(self._offsets[document])
        position, end = begin + start, begin + stop
        parts = [np.empty(0, dtype=np.int64)]
        while position < end:
            shard, offset = divmod(position, self._shard_tokens)
            parts.append(self._shards[shard][offset : offset + end - position])
            position += len(parts[-1])
        return np.concatenate(parts)

    def read_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        """Which tokens of a document are learned, `[stop - start]` bool; None if the store has no masks: all are."""
        if not self.has_masks:
            return None
        first = int(self._mask_offsets[document])
        packed = self._mask[first + start // 8 : first + -(-stop // 8)]
        return np.unpackbits(packed)[start % 8 :][: stop - start].astype(bool)

    def summarize(self, check_stop: Callable[[], None]) -> tuple[str, np.ndarray]:
        """Read all tokens once.

        Args:
            check_stop: called before each file of tokens; may raise.

        Returns:
            sha256 (hex) of tokens, document lengths, groups and masks; and the occurrences of each id, `[V]` int64.
        """
        digests, counts = [], np.zeros(self.vocab_size, dtype=np.int64)
        for shard in self._shards:
            check_stop()
            digests.append(hashlib.sha256(shard.data).hexdigest())
            for start in range(0, len(shard), COUNTED_TOKENS):
                counts += np.bincount(shard[start : start + COUNTED_TOKENS], minlength=len(counts))
        if self._offsets[-1] % self._shard_tokens == 0:
            digests.append(hashlib.sha256().hexdigest())  # of the next shard, which has no file yet
        digest = hashlib.sha256("".join(digests).encode())
        digest.update(self._index.data)
        digest.update(self.groups.data)
        if self.has_masks:
            digest.update(self._mask.data)
        return digest.hexdigest(), counts


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    """The numbers in a file, mapped."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


def read_json(path: Path) -> JsonObject | None:
    """The JSON object in a file; None if the file is missing or holds none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in a folder of the cache; None if it is missing or unreadable."""
    return cast(Manifest | None, read_json(folder / MANIFEST_FILE))


def write_json(path: Path, values: Mapping[str, Json]) -> None:
    """Write the object to a file as JSON, whole or not at all."""
    replace_file(path, (json.dumps(values, indent=2) + "\n").encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, even if the power fails."""
    partial = path.with_name(path.name + ".partial")
    append_to(partial, content, "wb")
    os.replace(partial, path)


def file_sizes(folder: Path) -> dict[str, int]:
    """Size in bytes of each file of a folder but the journal and the manifest."""
    paths = [path for path in sorted(folder.iterdir()) if path.name not in (JOURNAL_FILE, MANIFEST_FILE)]
    return {path.name: path.stat().st_size for path in paths}


def find_damage(folder: Path, expected: dict[str, int], *, may_be_longer: bool = False) -> str:
    """The first file of a folder that does not have its expected size, and why; empty if all have."""
    for name, size in expected.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found < size or (found > size and not may_be_longer):
            return f"{name} has {found} bytes instead of {size}"
    return ""
