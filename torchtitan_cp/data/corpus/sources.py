"""Where text comes from: for each value of `source`, how its files are found and read."""

import ast
import glob
import os
import stat
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path

from torchtitan_cp.config.data import SourceKeys
from torchtitan_cp.data.corpus import parquet, rows
from torchtitan_cp.data.corpus.recall import recall_documents
from torchtitan_cp.data.corpus.records import Document, SkippedRecords, SourceFile
from torchtitan_cp.data.errors import DataError

DOCSTRING_FILE_BYTES = 1 << 14  # each conversation holds its whole file
NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True)
class Source:
    """One value of `source`.

    Attributes:
        find: yields the files, in an order that depends only on their names, those of a folder one after the other.
        read: yields the documents of a file.
        expects: what `path` should be, for messages.
        version: counts the changes of what `read` yields for the same files, whose tokens are then made again.
    """

    find: Callable[[SourceKeys], Iterator[SourceFile]]
    read: Callable[[SourceFile, SourceKeys, SkippedRecords], Iterator[Document]]
    expects: str
    version: int = 0


def find_files(source: SourceKeys) -> Iterator[SourceFile]:
    """The files of the corpus, one after the other.

    Raises:
        DataError: the path leads to no file, or an extra is missing.
    """
    found, kind, where = False, SOURCES[source.source], location(source)
    for file in kind.find(source) if where else ():
        found = True
        yield file
    if not found:
        relative = where and not Path(where).expanduser().is_absolute()
        raise DataError(
            f"{source.where}.source = {source.source!r} finds no file at {source.where}.path = {where!r}",
            fix=f"set {source.where}.path to {kind.expects}"
            + f"; a path is relative to the current directory, {Path.cwd()}" * bool(relative),
        )


def unread_suffixes(source: SourceKeys) -> Counter[str]:
    """How many files of the folder at `path` the source does not read, by suffix, such as `.json` beside `.jsonl`."""
    path = Path(os.path.expanduser(source.path))
    suffixes = {"jsonl": rows.JSONL_SUFFIXES, "parquet": parquet.SUFFIXES}.get(source.source)
    if suffixes is None or not path.is_dir():
        return Counter()
    found = (file.path.name for file in _walk(path, ("",), pruned=lambda name: name.startswith(".")))
    return Counter(Path(name).suffix or name for name in found if not name.endswith(suffixes))


def count_repeated(files: Iterable[SourceFile]) -> int:
    """How many of the files are links to others of them, whose text is then read again."""
    paths = [file.path for file in files]
    if not any(path.is_symlink() for path in paths):
        return 0
    folder = lru_cache(maxsize=None)(os.path.realpath)
    real = {
        os.path.realpath(path) if path.is_symlink() else os.path.join(folder(path.parent), path.name) for path in paths
    }
    return len(paths) - len(real)


def location(source: SourceKeys) -> str:
    """Where the source looks: a folder, glob or name."""
    return sysconfig.get_paths()["stdlib"] if source.source.startswith("python-") else source.path


def _find_stdlib(source: SourceKeys) -> Iterator[SourceFile]:
    return _walk(Path(location(source)), (".py",), pruned=lambda name: name in NOT_STDLIB)


def _find_at_path(source: SourceKeys, suffixes: tuple[str, ...]) -> Iterator[SourceFile]:
    """Files with one of these suffixes below a folder, or what a glob matches, or a single file.

    Names of what a glob matches are relative to the part of it before the first wildcard.
    """
    path = os.path.expanduser(source.path)
    if os.path.isdir(path):
        yield from _walk(Path(path), suffixes, pruned=lambda name: name.startswith("."))
    elif os.path.exists(path):
        yield from _regular(Path(path), Path(path).parent)
    elif glob.has_magic(path):
        root = Path(*takewhile(lambda part: not glob.has_magic(part), Path(path).parts))
        matches = {Path(match) for match in glob.iglob(path, recursive=True)}
        for match in sorted(matches, key=lambda match: (match.parent.as_posix(), match.name)):
            yield from _regular(match, root)


def _find_parquet(source: SourceKeys) -> Iterator[SourceFile]:
    parquet.import_pyarrow(source)
    return _find_at_path(source, parquet.SUFFIXES)


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
    """The whole file as one document, strictly UTF-8, without a byte order mark; nothing for an empty file.

    Raises:
        DataError: as SkippedRecords.add_unreadable.
    """
    try:
        text = file.path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        skipped.add_unreadable(error, file)
    except UnicodeDecodeError as error:
        skipped.add("not UTF-8", f"{file.path}:{error.object.count(bytes([10]), 0, error.start) + 1}")
    else:
        if text:
            yield Document(text, file.name, file.folder, file.size_bytes)


def _read_docstrings(file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> Iterator[Document]:
    """A conversation for each documented function and class; all of a file are held out, or none."""
    for text in _read_text(file, source, skipped):
        if text.read_bytes <= DOCSTRING_FILE_BYTES:
            assert isinstance(text.content, str)
            for messages in docstring_conversations(text.content):
                yield replace(text, content="", row={"messages": messages})


def _read_recall(file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> Iterator[Document]:
    """The documents that `recall` makes of a file; all of them are held out, or none."""
    for text in _read_text(file, source, skipped):
        assert isinstance(text.content, str)
        for content in recall_documents(text.content, file.name):
            yield replace(text, content=content)


def docstring_conversations(text: str) -> Iterator[list[dict[str, str]]]:
    """Questions what the functions and classes of a file do, answered by the first lines of their docstrings.

    A question contains the file without the docstring that answers it. Text that is not Python yields nothing.

    Yields:
        the messages of a conversation.
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
    "python-stdlib": Source(_find_stdlib, _read_text, TEXT, version=1),
    "text": Source(partial(_find_at_path, suffixes=("",)), _read_text, TEXT, version=1),
    "jsonl": Source(partial(_find_at_path, suffixes=rows.JSONL_SUFFIXES), rows.read_jsonl, JSONL),
    "parquet": Source(_find_parquet, parquet.read_parquet, "*.parquet files: a folder, a file or a glob"),
    "python-docstrings": Source(_find_stdlib, _read_docstrings, TEXT),
    "python-recall": Source(_find_stdlib, _read_recall, TEXT),
    "huggingface": Source(rows.find_dataset, rows.read_dataset, "a dataset's name, or a folder that holds one"),
}
