"""The corpus as documents: read in order, split into trained-on and held-out, joined where the config asks for it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from torchtitan_cp.config.sections import Data, SourceKeys
from torchtitan_cp.data.corpus.record import SourceFile
from torchtitan_cp.data.corpus.skipped_records import SkippedRecords
from torchtitan_cp.data.corpus.sources import SOURCES, find_files, location
from torchtitan_cp.data.errors import DataError

JOINED_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where reading can begin: at a file, or where files are joined at a folder's first.

    Attributes:
        file: its index in the corpus.
        rejects: what was skipped before it, by kind.
    """

    file: int = 0
    skipped_records: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Document:
    """What the model may attend over as a whole.

    Attributes:
        content: text, not empty, encodable as UTF-8; or token ids `[n]` int64, n > 0, none negative.
        held_out: belongs to the validation split.
        read_bytes: how much of the corpus (as it is on disk) was read up to here, for progress.
        place: where reading would have to begin to come by it again.
        key: names it; of a joined document, its first text.
        group: names what it belongs to, as a folder or a repository; None: related to no other.
    """

    content: str | np.ndarray
    held_out: bool
    read_bytes: int
    place: Place
    key: str
    group: str | None


class Corpus:
    """The files of one source. Reading streams them: memory holds a document, whatever the corpus's size.

    Args:
        source: the config's table.

    Attributes:
        files: what was found, in the order it is read.
        size_bytes: of all files as they are on disk.

    Raises:
        DataError: data.path is missing or leads to no file.
    """

    def __init__(self, source: SourceKeys) -> None:
        self.source = source
        self.files = tuple(find_files(source))
        self.size_bytes = sum(file.size_bytes for file in self.files)

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

    def documents(self, skipped_records: SkippedRecords, place: Place | None = None) -> Iterator[Document]:
        """Every document, training and held-out ones as they come.

        Args:
            rejects: receives what cannot be read.
            place: begin there, with the rejects that were counted up to it.

        Raises:
            DataError: at the end, if there was no document.
        """
        place = place or Place()
        skipped_records.restore(place.skipped_records)
        joined = SOURCES[self.source.source].joins and self.source.document == "folder"
        single = ((index, index + 1) for index in range(place.file, len(self.files)))
        units = _by_folder(self.files, place.file) if joined else single
        empty = place.file == 0
        read_bytes = sum(file.size_bytes for file in self.files[: place.file])
        for start, stop in units:
            here = Place(start, dict(skipped_records.counts))
            documents = self._single(self.files[start:stop], read_bytes, here, skipped_records)
            for document in _join(documents) if joined else documents:
                empty = False
                yield document
            read_bytes += sum(file.size_bytes for file in self.files[start:stop])
        if empty:
            skipped = f"; skipped: {skipped_records.summary()}" if skipped_records.counts else ""
            raise DataError(
                f"the corpus at {location(self.source)} holds {len(self.files)} files and no document{skipped}",
                fix=f"check path, source and text_field of {self.source.where}: files are UTF-8 text, or rows with "
                "that field",
            )

    def _single(
        self, files: tuple[SourceFile, ...], read_bytes: int, place: Place, skipped_records: SkippedRecords
    ) -> Iterator[Document]:
        """Each passage of the files as a document. read_bytes: of the corpus before the first of them."""
        read = SOURCES[self.source.source].read
        for file in files:
            for record in read(file, self.source, skipped_records):
                held_out = is_held_out(record.key, self.source.validation_fraction)
                position_bytes = read_bytes + record.position_bytes
                yield Document(record.content, held_out, position_bytes, place, record.key, record.group)
            read_bytes += file.size_bytes


def _join(documents: Iterator[Document]) -> Iterator[Document]:
    """Documents of up to JOINED_BYTES from the texts of one folder, those of each split for themselves."""
    waiting = {False: _Joined(), True: _Joined()}
    for document in documents:
        joined = waiting[document.held_out]
        if not joined.takes(document):
            yield joined.document()
            joined = waiting[document.held_out] = _Joined()
        joined.add(document)
    yield from (joined.document() for joined in waiting.values() if joined.texts)


class _Joined:
    """A document in the making: texts of one folder, each ending with a newline."""

    def __init__(self) -> None:
        self.texts: list[Document] = []
        self.size_bytes = 0

    def takes(self, text: Document) -> bool:
        """Whether the text fits. A text larger than JOINED_BYTES fits where it is alone."""
        return not self.texts or self.size_bytes + len(_line_text(text).encode()) <= JOINED_BYTES

    def add(self, text: Document) -> None:
        self.texts.append(text)
        self.size_bytes += len(_line_text(text).encode())

    def document(self) -> Document:
        content = "".join(map(_line_text, self.texts))
        return replace(self.texts[0], content=content, read_bytes=self.texts[-1].read_bytes)


def _line_text(document: Document) -> str:
    """A document's text with a newline at its end."""
    text = document.content
    assert isinstance(text, str), "only files are joined"
    return text if text.endswith("\n") else text + "\n"


def _by_folder(files: tuple[SourceFile, ...], start: int) -> Iterator[tuple[int, int]]:
    """(first, end) of neighbouring files of one folder, from file number `start` on."""
    for index in range(start + 1, len(files) + 1):
        if index == len(files) or files[index].folder != files[start].folder:
            yield start, index
            start = index


def is_held_out(key: str, fraction: float) -> bool:
    """Whether a passage belongs to validation: its own name decides, so that added files move no other."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def check_corpus(data: Data) -> None:
    """Look whether every source is there; the first file found is enough.

    Raises:
        DataError: a path is missing or leads to no file, or an extra is missing.
    """
    for source in data.by_name().values():
        next(find_files(source))
