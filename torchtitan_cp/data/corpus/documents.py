"""The corpus as documents: read in order, split into trained-on and held-out, joined where the config asks for it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from torchtitan_cp.config.sections import Data, SourceKeys
from torchtitan_cp.data.corpus.records import SkippedRecords
from torchtitan_cp.data.corpus.sources import SOURCES, find_files, location
from torchtitan_cp.data.errors import DataError

JOINED_BYTES = 1 << 20


@dataclass(frozen=True)
class ResumePoint:
    """Where reading can begin: at a file; where files are joined, at the first of a folder.

    Attributes:
        file: its index in the corpus.
        skipped: counts of what was skipped before it, by kind.
    """

    file: int = 0
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Document:
    """What the model may attend over as a whole.

    Attributes:
        content: text, not empty, encodable as UTF-8; or token ids `[n]` int64, n > 0, none negative.
        held_out: belongs to the validation split.
        read_bytes: how much of the corpus (as it is on disk) was read up to its end.
        resume_point: the last one before it.
        key: its name in the corpus; of a joined document, that of its first text.
        group: name of the folder, repository or other group it belongs to; None: it belongs to none.
    """

    content: str | np.ndarray
    held_out: bool
    read_bytes: int
    resume_point: ResumePoint
    key: str
    group: str | None


class Corpus:
    """The files of one source. Reading streams them: memory holds a document, whatever the corpus's size.

    Args:
        source: the config's table.

    Attributes:
        files: in the order they are read.
        size_bytes: of all files as they are on disk.

    Raises:
        DataError: data.path is missing or leads to no file.
    """

    def __init__(self, source: SourceKeys) -> None:
        self.source = source
        self.files = tuple(find_files(source))
        self.size_bytes = sum(file.size_bytes for file in self.files)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) over the settings that shape documents, and every file's name, size and mtime."""
        source = self.source
        is_name = source.source == "huggingface" and not self.size_bytes
        path = source.path if is_name else str(Path(location(source)).expanduser().absolute())
        fields = (source.text_field, source.token_field, source.group_field, source.group_depth)
        settings = [source.source, path, *fields, source.document, source.validation_fraction]
        digest = hashlib.sha256(json.dumps(settings).encode())
        for file in self.files:
            digest.update(json.dumps([file.name, file.size_bytes, file.mtime_ns]).encode())
        return digest.hexdigest()

    def documents(
        self, skipped: SkippedRecords, begin: ResumePoint | None = None, held_out_key: str | None = None
    ) -> Iterator[Document]:
        """The documents of both splits, in order.

        Args:
            skipped: counts what cannot be read; takes over the counts of `begin`.
            begin: where to begin.
            held_out_key: key of a record that is held out whatever its hash.

        Raises:
            DataError: at the end, if there was no document.
        """
        begin, kind = begin or ResumePoint(), SOURCES[self.source.source]
        skipped.counts.update(begin.skipped)
        joins, fraction = kind.joins and self.source.document == "folder", self.source.validation_fraction
        read_bytes, empty = sum(file.size_bytes for file in self.files[: begin.file]), begin.file == 0

        def read(indices: list[int], resume_point: ResumePoint) -> Iterator[Document]:
            nonlocal read_bytes
            for file in (self.files[index] for index in indices):
                for record in kind.read(file, self.source, skipped):
                    held_out = is_held_out(record.key, fraction) or record.key == held_out_key
                    position_bytes = read_bytes + record.position_bytes
                    yield Document(record.content, held_out, position_bytes, resume_point, record.key, record.group)
                read_bytes += file.size_bytes

        def unit(index: int) -> object:
            return self.files[index].folder if joins else index

        for _, indices in groupby(range(begin.file, len(self.files)), unit):
            files = list(indices)
            documents = read(files, ResumePoint(files[0], dict(skipped.counts)))
            for document in _join(documents) if joins else documents:
                empty = False
                yield document
        if empty:
            summary = f"; skipped: {skipped.summary()}" if skipped.counts else ""
            raise DataError(
                f"the corpus at {location(self.source)} holds {len(self.files)} files and no document{summary}",
                fix=f"check path, source and text_field of {self.source.where}: files are UTF-8 text, or rows with "
                "that field",
            )


def _join(documents: Iterator[Document]) -> Iterator[Document]:
    """Join the texts of one folder, separately for each split, into documents of up to JOINED_BYTES.

    Each text ends with a newline. A text larger than JOINED_BYTES is a document of its own.
    """
    waiting: dict[bool, list[Document]] = {False: [], True: []}
    sizes = {False: 0, True: 0}
    for document in documents:
        assert isinstance(document.content, str), "only files are joined"
        text = document.content if document.content.endswith("\n") else document.content + "\n"
        split, size_bytes = document.held_out, len(text.encode())
        if waiting[split] and sizes[split] + size_bytes > JOINED_BYTES:
            yield _joined(waiting[split])
            waiting[split], sizes[split] = [], 0
        waiting[split].append(replace(document, content=text))
        sizes[split] += size_bytes
    yield from (_joined(texts) for texts in waiting.values() if texts)


def _joined(texts: list[Document]) -> Document:
    content = "".join(str(text.content) for text in texts)
    return replace(texts[0], content=content, read_bytes=texts[-1].read_bytes)


def is_held_out(key: str, fraction: float) -> bool:
    """Whether a record belongs to validation. Only its own key decides, so added files change no other record."""
    return key_hash(key) < fraction * 2**64


def key_hash(key: str) -> int:
    """A number from 0 to 2**64 - 1. The records with the lowest numbers are held out."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big")


def check_corpus(data: Data) -> None:
    """Check that every source is there; the first file found is enough.

    Raises:
        DataError: a path is missing or leads to no file, or an extra is missing.
    """
    for source in data.by_name().values():
        next(find_files(source))
