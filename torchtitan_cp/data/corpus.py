"""The corpus as documents: read in order, split into trained-on and held-out, joined where the config asks for it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_cp.config.sections import Data
from torchtitan_cp.data.errors import DataError
from torchtitan_cp.data.passage import SourceFile
from torchtitan_cp.data.rejects import Rejects
from torchtitan_cp.data.sources import SOURCES, find_files, location

JOINED_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """One text the model may attend over as a whole.

    Attributes:
        text: not empty, encodable as UTF-8.
        held_out: belongs to the validation split.
        read_bytes: how much of the corpus (as it is on disk) was read up to here, for progress.
    """

    text: str
    held_out: bool
    read_bytes: int


class Corpus:
    """The files that `[data]` names. Reading streams them: memory holds a document, whatever the corpus's size.

    Args:
        data: the config's section.

    Attributes:
        files: what was found, in the order it is read.
        size_bytes: of all files as they are on disk.

    Raises:
        DataError: data.path is missing or leads to no file.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        self.files = tuple(find_files(data))
        self.size_bytes = sum(file.size_bytes for file in self.files)

    def fingerprint(self) -> str:
        """sha256 (hex) over the settings that shape documents, and every file's name, size and mtime."""
        data = self.data
        settings = [data.source, str(Path(location(data)).expanduser().absolute()), data.text_field, data.document]
        digest = hashlib.sha256(json.dumps([*settings, data.validation_fraction]).encode())
        for file in self.files:
            digest.update(json.dumps([file.name, file.size_bytes, file.mtime_ns]).encode())
        return digest.hexdigest()

    def documents(self, rejects: Rejects) -> Iterator[Document]:
        """Every document, training and held-out ones as they come.

        Args:
            rejects: receives what cannot be read.

        Raises:
            DataError: at the end, if there was no document.
        """
        source = SOURCES[self.data.source]
        joined = source.joins and self.data.document == "folder"
        count = 0
        for document in self._join_folders(rejects) if joined else self._single(self.files, 0, rejects):
            count += 1
            yield document
        if count == 0:
            skipped = f"; skipped: {rejects.summary()}" if rejects.counts else ""
            raise DataError(
                f"the corpus at {location(self.data)} holds {len(self.files)} files and no document{skipped}",
                fix="check data.path, data.source and data.text_field: files are UTF-8 text, or JSON lines with that "
                "field",
            )

    def _single(self, files: tuple[SourceFile, ...], read_bytes: int, rejects: Rejects) -> Iterator[Document]:
        """Each passage of the files as a document. read_bytes: of the corpus before the first of them."""
        read = SOURCES[self.data.source].read
        for file in files:
            for passage in read(file, self.data, rejects):
                held_out = is_held_out(passage.key, self.data.validation_fraction)
                yield Document(passage.text, held_out, read_bytes + passage.position_bytes)
            read_bytes += file.size_bytes

    def _join_folders(self, rejects: Rejects) -> Iterator[Document]:
        """Documents of up to JOINED_BYTES from the files of one folder, each split for itself."""
        read_bytes = 0
        for files in _by_folder(self.files):
            waiting = {False: _Joined(), True: _Joined()}
            for document in self._single(files, read_bytes, rejects):
                joined = waiting[document.held_out]
                if not joined.takes(document.text):
                    yield joined.document(document.held_out, document.read_bytes)
                    joined = waiting[document.held_out] = _Joined()
                joined.add(document.text)
            read_bytes += sum(file.size_bytes for file in files)
            yield from (joined.document(split, read_bytes) for split, joined in waiting.items() if joined.texts)


class _Joined:
    """A document in the making: texts of one folder, each ending with a newline."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.size_bytes = 0

    def takes(self, text: str) -> bool:
        """Whether the text fits. A text larger than JOINED_BYTES fits where it is alone."""
        return not self.texts or self.size_bytes + _joined_size_bytes(text) <= JOINED_BYTES

    def add(self, text: str) -> None:
        self.texts.append(text if text.endswith("\n") else text + "\n")
        self.size_bytes += _joined_size_bytes(text)

    def document(self, held_out: bool, read_bytes: int) -> Document:
        return Document("".join(self.texts), held_out, read_bytes)


def _joined_size_bytes(text: str) -> int:
    return len(text.encode()) + (not text.endswith("\n"))


def _by_folder(files: tuple[SourceFile, ...]) -> Iterator[tuple[SourceFile, ...]]:
    """Neighbouring files of one folder, together."""
    start = 0
    for index in range(1, len(files) + 1):
        if index == len(files) or files[index].folder != files[start].folder:
            yield files[start:index]
            start = index


def is_held_out(key: str, fraction: float) -> bool:
    """Whether a passage belongs to validation: its own name decides, so that added files move no other."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def check_corpus(data: Data) -> None:
    """Look whether the corpus is there; the first file found is enough.

    Raises:
        DataError: data.path is missing or leads to no file.
    """
    next(find_files(data))
