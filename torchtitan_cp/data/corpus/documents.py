"""The corpus as documents: its files found and read in order, split into trained-on and held-out, joined where asked.

For each value of `source`, `SOURCES` says how its files are found and read.
"""

import ast
import glob
import hashlib
import json
import logging
import os
import stat
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, groupby
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from torchtitan_cp.config.sections import Data, SourceKeys
from torchtitan_cp.data.corpus import rows
from torchtitan_cp.data.corpus.chat import ChatTemplate, read_conversation
from torchtitan_cp.data.corpus.records import Document, SkippedRecords, SourceFile
from torchtitan_cp.data.errors import DataError

logger = logging.getLogger(__name__)

JOINED_BYTES = 1 << 20
LOG_INTERVAL_SECONDS = 10.0
DOCSTRING_FILE_BYTES = 1 << 14  # each conversation holds its whole file
NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__")


class Corpus:
    """The files of one source. Reading streams them: memory holds a document, whatever the corpus's size.

    Args:
        source: the config's table.
        template: of a source of conversations.

    Attributes:
        files: in the order they are read.
        size_bytes: of all files as they are on disk.

    Raises:
        DataError: data.path is missing or leads to no file.
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
        fields = (source.text_field, source.token_field, source.group_field, source.group_depth)
        settings = [source.source, path, *fields, source.document, source.validation_fraction]
        if self.template:
            chat = (source.messages_field, source.prompt_field, source.completion_field, source.loss_on)
            settings += [*chat, self.template.source, self.template.variables]
        digest = hashlib.sha256(json.dumps(settings).encode())
        for file in self.files:
            digest.update(json.dumps([file.name, file.size_bytes, file.mtime_ns]).encode())
        return digest.hexdigest()

    def documents(
        self, skipped: SkippedRecords, first_file: int = 0, held_out_key: str | None = None
    ) -> Iterator[Document]:
        """The documents of both splits, in order.

        Args:
            skipped: counts what cannot be read.
            first_file: index of the file to begin at.
            held_out_key: key of a record that is held out whatever its hash.

        Raises:
            DataError: at the end, if there was no document; or the template cannot say what is learned.
        """
        kind, empty = SOURCES[self.source.source], first_file == 0
        joins, fraction = kind.joins and self.source.document == "folder", self.source.validation_fraction
        starts = [0, *accumulate(file.size_bytes for file in self.files)]

        def read(indices: list[int]) -> Iterator[Document]:
            for index in indices:
                file = self.files[index]
                for document in kind.read(file, self.source, skipped):
                    if self.template:
                        with skipped.skipping(document.key.replace(file.name, str(file.path), 1)):
                            row = document.content
                            document.content, document.learned = read_conversation(row, self.source, self.template)
                        if not document.learned:
                            continue
                    document.held_out = is_held_out(document.key, fraction) or document.key == held_out_key
                    document.read_bytes += starts[index]
                    yield document

        folders = (lambda index: self.files[index].folder) if joins else None
        for _, group in groupby(range(first_file, len(self.files)), folders):
            indices, skipped_before = list(group), dict(skipped.counts)
            documents = _join(read(indices)) if joins else read(indices)
            for number, document in enumerate(documents, start=1):
                document.place, empty = (indices[0], skipped_before, number), False
                yield document
        if empty:
            keys = ("messages_field", "prompt_field")
            field = next((name for name in keys if getattr(self.source, name)), "text_field")
            summary = f"; skipped: {skipped.summary()}" if skipped.counts else ""
            raise DataError(
                f"the corpus at {location(self.source)} holds {len(self.files)} files and no document{summary}",
                fix=f"check path, source and {field} of {self.source.where}: files are UTF-8 text, or rows with "
                "that field",
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
        document.content += "" if document.content.endswith("\n") else "\n"
        split, size_bytes = document.held_out, len(document.content.encode())
        if waiting[split] and sizes[split] + size_bytes > JOINED_BYTES:
            yield _joined(waiting[split])
            waiting[split], sizes[split] = [], 0
        waiting[split].append(document)
        sizes[split] += size_bytes
    yield from (_joined(texts) for texts in waiting.values() if texts)


def _joined(texts: list[Document]) -> Document:
    content = "".join(text.content for text in texts)
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


@dataclass(frozen=True)
class Source:
    """One value of `source`.

    Attributes:
        find: the files, in an order that depends only on their names; the files of a folder are neighbours.
        read: the documents of a file.
        expects: what `path` should lead to, for messages.
        joins: whether `document` applies. A row is always a document.
    """

    find: Callable[[SourceKeys], Iterator[SourceFile]]
    read: Callable[[SourceFile, SourceKeys, SkippedRecords], Iterator[Document]]
    expects: str
    joins: bool = False


def find_files(source: SourceKeys) -> Iterator[SourceFile]:
    """The corpus's files, found as they are asked for.

    Raises:
        DataError: the path is missing, leads to no file, or is set although the source has none; or an extra is
            missing.
    """
    found, kind = False, SOURCES[source.source]
    if not source.path and not source.source.startswith("python-"):
        raise DataError(
            f"{source.where}.source = {source.source!r} needs {source.where}.path",
            fix=f"set {source.where}.path to {kind.expects}",
        )
    for file in kind.find(source):
        found = True
        yield file
    if not found:
        raise DataError(
            f"{source.where}.source = {source.source!r} finds no file at {location(source)}",
            fix=f"point {source.where}.path at {kind.expects}",
        )


def location(source: SourceKeys) -> str:
    """Where the source looks: a folder, glob or name."""
    return sysconfig.get_paths()["stdlib"] if source.source.startswith("python-") else source.path


def _find_stdlib(source: SourceKeys) -> Iterator[SourceFile]:
    if source.path:
        raise DataError(
            f"{source.where}.path = {source.path!r} is set, but source = {source.source!r} reads no path",
            fix=f"set {source.where}.source = 'text' or 'jsonl', or leave path out",
        )
    return _walk(Path(location(source)), (".py",), pruned=lambda name: name in NOT_STDLIB)


def _find_at_path(source: SourceKeys, suffixes: tuple[str, ...]) -> Iterator[SourceFile]:
    """Files with one of these suffixes below a folder; or what a glob or the path of a file matches."""
    path = os.path.expanduser(source.path)
    if os.path.isdir(path):
        yield from _walk(Path(path), suffixes, pruned=lambda name: name.startswith("."))
    elif os.path.exists(path):
        yield from _regular(Path(path), Path(path).parent)
    elif glob.has_magic(path):
        root = _root_of(path)
        matches = {Path(match) for match in glob.iglob(path, recursive=True)}
        for match in sorted(matches, key=lambda match: (match.parent.as_posix(), match.name)):
            yield from _regular(match, root)
    else:
        raise DataError(
            f"{source.where}.path = {source.path!r} does not exist", fix="give an existing folder, file or glob"
        )


def _find_parquet(source: SourceKeys) -> Iterator[SourceFile]:
    rows.import_pyarrow(source)
    return _find_at_path(source, (".parquet",))


def _root_of(pattern: str) -> Path:
    """The part of a glob before its first wildcard; the names of its matches are relative to it."""
    parts = Path(pattern).parts
    return Path(*parts[: [glob.has_magic(part) for part in parts].index(True)])


def _walk(root: Path, suffixes: tuple[str, ...], *, pruned: Callable[[str], bool]) -> Iterator[SourceFile]:
    """Files below `root` in sorted order. Links to folders are followed, each folder once."""
    seen: set[str] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_refuse_folder):
        subfolders[:] = sorted(name for name in subfolders if not pruned(name))
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        for name in sorted(names):
            if name.endswith(suffixes) and not pruned(name):
                yield from _regular(Path(folder, name), root)


def _refuse_folder(error: OSError) -> None:
    raise DataError(
        f"a folder of the corpus cannot be listed: {error.filename} ({error.strerror})",
        fix="make it readable, or give a path that leaves it out",
    )


def _regular(path: Path, root: Path) -> Iterator[SourceFile]:
    """The file as a SourceFile; nothing for folders and devices. A broken link is logged when it is read."""
    name = path.relative_to(root).as_posix()
    try:
        status = path.stat()
    except OSError:
        yield SourceFile(name, path, size_bytes=0, mtime_ns=0)
        return
    if stat.S_ISREG(status.st_mode):
        yield SourceFile(name, path, status.st_size, status.st_mtime_ns)


def _read_text(file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> Iterator[Document]:
    """The whole file as one document, strictly UTF-8; nothing for an empty file."""
    try:
        raw = file.path.read_bytes()
        text = raw.decode("utf-8")
    except OSError as error:
        skipped.add(f"unreadable file ({error.strerror})", str(file.path))
    except UnicodeDecodeError as error:
        skipped.add("not UTF-8", f"{file.path}:{raw.count(bytes([10]), 0, error.start) + 1}")
    else:
        if text:
            group = "/".join(file.folder.split("/")[: source.group_depth or None])
            yield Document(text, file.name, group, len(raw))


def _read_docstrings(file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> Iterator[Document]:
    """A conversation for each documented function and class; all of a file are held out, or none."""
    for text in _read_text(file, source, skipped):
        if text.read_bytes <= DOCSTRING_FILE_BYTES:
            for messages in docstring_conversations(text.content):
                yield replace(text, content={"messages": messages})


def docstring_conversations(text: str) -> Iterator[list[dict[str, str]]]:
    """What each function and class of a file does: asked with the file, answered by its docstring's first line.

    The file is given without the docstring that answers. Text that is no Python yields nothing.

    Yields:
        the messages.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the text
            definitions = list(_definitions(ast.parse(text), ""))
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")
    for node, name in definitions:
        answer, docstring = (ast.get_docstring(node) or "").partition("\n")[0].strip(), node.body[0]
        if answer:
            rest = "\n".join(lines[: docstring.lineno - 1] + lines[docstring.end_lineno :])
            question = f"{rest}\n\nWhat does {name} do?"
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef | ast.ClassDef, str]]:
    """Functions and classes in the order of the file, each with its dotted name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield child, prefix + child.name
            yield from _definitions(child, f"{prefix}{child.name}.")


TEXT = "a folder of text files, or a glob such as 'corpus/**/*.txt'"
JSONL = "*.jsonl, *.jsonl.gz or *.jsonl.zst files: a folder, a file or a glob"
SOURCES = {
    "python-stdlib": Source(_find_stdlib, _read_text, TEXT, joins=True),
    "text": Source(partial(_find_at_path, suffixes=("",)), _read_text, TEXT, joins=True),
    "jsonl": Source(partial(_find_at_path, suffixes=rows.JSONL_SUFFIXES), rows.read_jsonl, JSONL),
    "parquet": Source(_find_parquet, rows.read_parquet, "*.parquet files: a folder, a file or a glob"),
    "python-docstrings": Source(_find_stdlib, _read_docstrings, TEXT),
    "huggingface": Source(rows.find_dataset, rows.read_dataset, "a dataset's name, or a folder that holds one"),
}
