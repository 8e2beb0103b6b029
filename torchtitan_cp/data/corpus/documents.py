"""The corpus as documents: read in order, split into trained-on and held-out, joined where the config asks for it."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from torchtitan_cp.config.data import Data, SourceKeys
from torchtitan_cp.data.corpus.chat import ChatTemplate, read_conversation
from torchtitan_cp.data.corpus.records import Document, SkippedRecords
from torchtitan_cp.data.corpus.sources import SOURCES, find_files, location
from torchtitan_cp.data.errors import DataError

logger = logging.getLogger(__name__)

JOINED_BYTES = 1 << 20
LOG_INTERVAL_SECONDS = 10.0


class Corpus:
    """The files of one source. They are streamed: memory holds one document, whatever the size of the corpus.

    Args:
        source: the config's table.
        template: writes the conversations of a source that holds them.

    Attributes:
        files: in the order they are read.
        size_bytes: of all files, as stored on disk.

    Raises:
        DataError: data.path leads to no file.
    """

    def __init__(self, source: SourceKeys, template: ChatTemplate | None = None) -> None:
        self.source, self.template = source, template
        self.files = tuple(find_files(source))
        self.size_bytes = sum(file.size_bytes for file in self.files)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) over the settings that shape documents, and every file's name, size and mtime."""
        source = self.source
        is_name = source.source == "huggingface" and not self.size_bytes
        path = source.path if is_name else str(Path(location(source)).expanduser().absolute())
        fields = (source.text_field, source.token_field, source.group_field, 0)  # 0 was a key; caches go on as they are
        settings = [source.source, path, *fields, source.document, source.validation_fraction]
        settings += filter(None, [SOURCES[source.source].version])
        if self.template:
            chat = (source.messages_field, source.prompt_field, source.completion_field, source.loss_on)
            settings += [*chat, self.template.source, self.template.variables, self.template.named]
        digest = hashlib.sha256(json.dumps(settings).encode())
        for file in self.files:
            digest.update(json.dumps([file.name, file.size_bytes, file.mtime_ns]).encode())
        return digest.hexdigest()

    def documents(
        self, skipped: SkippedRecords, first_file: int = 0, held_out_key: str | None = None
    ) -> Iterator[Document]:
        """The documents of both splits, in order, as they are read: conversations as rows.

        Args:
            skipped: counts what cannot be read.
            first_file: index of the file to begin at.
            held_out_key: key of a record that is held out whatever its hash. If it is joined with others, it alone is
                held out, or with min_document, for which it may be too short, the joined document.

        Raises:
            DataError: there is no document.
        """
        kind, empty = SOURCES[self.source.source], first_file == 0
        joins, fraction = self.source.document == "folder", self.source.validation_fraction
        chooses_joined = joins and self.source.min_document > 0
        starts = [0, *accumulate(file.size_bytes for file in self.files)]

        def read(indices: list[int]) -> Iterator[Document]:
            for index in indices:
                file = self.files[index]
                for document in kind.read(file, self.source, skipped):
                    if document.row is not None:
                        document.where = document.key.replace(file.name, str(file.path), 1)
                    chosen = document.key == held_out_key and not chooses_joined
                    document.held_out = chosen or is_held_out(document.key, fraction)
                    document.read_bytes += starts[index]
                    yield document

        folders = (lambda index: self.files[index].folder) if joins else None
        for _, group in groupby(range(first_file, len(self.files)), folders):
            indices, skipped_before = list(group), dict(skipped.counts)
            documents = _join(read(indices)) if joins else read(indices)
            for number, document in enumerate(documents, start=1):
                document.resume_point, empty = (indices[0], skipped_before, number), False
                document.held_out |= chooses_joined and document.key == held_out_key
                yield document
        if empty:
            raise self.no_document(skipped)

    def texts(self, skipped: SkippedRecords) -> Iterator[tuple[Document, str]]:
        """The documents with their texts, those of conversations as the template writes them; none with token ids.

        Args:
            skipped: counts what cannot be read, or written by the template.

        Raises:
            DataError: there is no document; or the template does not allow to find what is learned.
        """
        empty = True
        for document in self.documents(skipped):
            text = document.content
            if self.template and document.row is not None:
                with skipped.skipping(document.where):
                    text, _ = read_conversation(document.row, self.source, self.template)
            if isinstance(text, str) and text:
                yield document, text
            empty = empty and not len(text)
        if empty:
            raise self.no_document(skipped)

    def no_document(self, skipped: SkippedRecords) -> DataError:
        """The error for a corpus in which nothing can be read."""
        summary = f"; skipped: {skipped.summary()}" if skipped.counts else ""
        return DataError(
            f"the corpus at {location(self.source)} holds no document; files: {len(self.files)}{summary}",
            fix=f"check path, source and the *_field keys of {self.source.where}: files are UTF-8 text, or rows "
            "with these fields",
        )

    @contextmanager
    def show_progress(self, title: str) -> Iterator[Callable[[int], None]]:
        """Show the progress of one pass: a bar on a terminal, elsewhere a line in the log now and then.

        Args:
            title: what is being done, e.g. `tokenizing`.

        Returns:
            a function to call with the bytes that are done, counted from the corpus's beginning.
        """
        console = Console(stderr=True)
        columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        bar = Progress(TextColumn(title), *columns, console=console, disable=not console.is_terminal)
        task = bar.add_task(title, total=self.size_bytes or None)
        total = f" of {self.size_bytes / 1e6:.0f}" if self.size_bytes else ""
        next_log_seconds = time.monotonic() + LOG_INTERVAL_SECONDS

        def update(done_bytes: int) -> None:
            nonlocal next_log_seconds
            bar.update(task, completed=done_bytes)
            if bar.disable and time.monotonic() >= next_log_seconds:
                next_log_seconds = time.monotonic() + LOG_INTERVAL_SECONDS
                logger.info("%s: %.0f%s MB", title, done_bytes / 1e6, total)

        with bar:
            yield update


def _join(documents: Iterator[Document]) -> Iterator[Document]:
    """Join the texts of one folder, separately for each split, into documents of up to JOINED_BYTES.

    Each text ends with a newline. A text larger than JOINED_BYTES is a document of its own.
    """
    waiting: dict[bool, list[Document]] = {False: [], True: []}
    sizes = {False: 0, True: 0}
    for document in documents:
        text = _text(document)
        document.content = text = text if text.endswith("\n") else text + "\n"
        split, size_bytes = document.held_out, len(text.encode())
        if waiting[split] and sizes[split] + size_bytes > JOINED_BYTES:
            yield _joined(waiting[split])
            waiting[split], sizes[split] = [], 0
        waiting[split].append(document)
        sizes[split] += size_bytes
    yield from (_joined(texts) for texts in waiting.values() if texts)


def _joined(texts: list[Document]) -> Document:
    content = "".join(map(_text, texts))
    return replace(texts[0], content=content, read_bytes=texts[-1].read_bytes)


def is_held_out(key: str, fraction: float) -> bool:
    """Whether a record belongs to validation. Only its own key decides, so added files change no other record."""
    return key_hash(key) < fraction * 2**64


def key_hash(key: str) -> int:
    """A hash from 0 to 2**64 - 1. The records with the lowest hashes are held out."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big")


def check_corpus(data: Data) -> None:
    """Check that every source has at least one file, and warn of rows that are read as plain text.

    Raises:
        DataError: a path leads to no file, or an extra is missing.
    """
    for source in data.by_name().values():
        first = next(find_files(source))
        if source.source == "text" and first.path.suffix == ".jsonl":
            logger.warning(
                f"{source.where}.source = 'text' reads {first.path} with its braces and quotes; 'jsonl' reads its rows"
            )


def _text(document: Document) -> str:
    assert isinstance(document.content, str), "only texts are joined"
    return document.content
