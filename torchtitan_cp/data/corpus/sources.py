"""Where text comes from: the sources by name, each with its way to find files and to read one."""

import glob
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_cp.config.sections import SourceKeys
from torchtitan_cp.data.corpus.hub import find_dataset, read_dataset
from torchtitan_cp.data.corpus.jsonl import JSONL_SUFFIXES, read_jsonl
from torchtitan_cp.data.corpus.parquet import import_pyarrow, read_parquet
from torchtitan_cp.data.corpus.record import Record, SourceFile
from torchtitan_cp.data.corpus.skipped_records import SkippedRecords
from torchtitan_cp.data.errors import DataError

NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True)
class Source:
    """One value of `source`.

    Attributes:
        find: the files, in an order that depends on their names alone; a folder's files follow each other.
        read: the passages of a file; what cannot be read goes to the rejects.
        joins: whether `document` applies. A row is a document whatever it says.
        wants: what `path` is to lead to, for messages.
    """

    find: Callable[[SourceKeys], Iterator[SourceFile]]
    read: Callable[[SourceFile, SourceKeys, SkippedRecords], Iterator[Record]]
    joins: bool
    wants: str


def find_files(source: SourceKeys) -> Iterator[SourceFile]:
    """The corpus's files, found as they are asked for.

    Raises:
        DataError: the path is missing, is set where nothing reads it, or leads to no file, or an extra is missing.
    """
    found, kind = False, SOURCES[source.source]
    for file in kind.find(source):
        found = True
        yield file
    if not found:
        raise DataError(
            f"{source.where}.source = {source.source!r} finds no file at {location(source)}",
            fix=f"point {source.where}.path at {kind.wants}",
        )


def location(source: SourceKeys) -> str:
    """Where the source looks, for messages: the folder, glob or name."""
    return _stdlib_folder() if source.source == "python-stdlib" else source.path


def _find_stdlib(source: SourceKeys) -> Iterator[SourceFile]:
    if source.path:
        raise DataError(
            f"{source.where}.path = {source.path!r} is set, but source = 'python-stdlib' reads no path",
            fix=f"set {source.where}.source = 'text' or 'jsonl', or leave path out",
        )
    yield from _walk(
        Path(_stdlib_folder()), wanted=lambda name: name.endswith(".py"), pruned=lambda name: name in NOT_STDLIB
    )


def _stdlib_folder() -> str:
    return sysconfig.get_paths()["stdlib"]


def _find_text(source: SourceKeys) -> Iterator[SourceFile]:
    yield from _find_at_path(source, wanted=lambda name: not name.startswith("."))


def _find_jsonl(source: SourceKeys) -> Iterator[SourceFile]:
    yield from _find_at_path(source, wanted=lambda name: name.endswith(JSONL_SUFFIXES) and not name.startswith("."))


def _find_parquet(source: SourceKeys) -> Iterator[SourceFile]:
    import_pyarrow(source)
    yield from _find_at_path(source, wanted=lambda name: name.endswith(".parquet") and not name.startswith("."))


def _find_at_path(source: SourceKeys, wanted: Callable[[str], bool]) -> Iterator[SourceFile]:
    """Files below a folder that are `wanted` by name, or whatever a glob (or the path of one file) names."""
    if not source.path:
        raise DataError(
            f"{source.where}.source = {source.source!r} needs {source.where}.path",
            fix=f"set {source.where}.path to a folder or a glob",
        )
    path = os.path.expanduser(source.path)
    if os.path.isdir(path):
        yield from _walk(Path(path), wanted=wanted, pruned=lambda name: name.startswith("."))
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


def _root_of(pattern: str) -> Path:
    """The folder that a glob's matches are named relative to: what stands before its first wildcard."""
    fixed = []
    for part in Path(pattern).parts:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed)


def _walk(root: Path, *, wanted: Callable[[str], bool], pruned: Callable[[str], bool]) -> Iterator[SourceFile]:
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
            if wanted(name):
                yield from _regular(Path(folder, name), root)


def _refuse_folder(error: OSError) -> None:
    raise DataError(
        f"a folder of the corpus cannot be listed: {error.filename} ({error.strerror})",
        fix="make it readable, or give a path that leaves it out",
    )


def _regular(path: Path, root: Path) -> Iterator[SourceFile]:
    """The file as a SourceFile; nothing for folders and devices. A broken link passes, to be named when it is read."""
    name = path.relative_to(root).as_posix()
    try:
        status = path.stat()
    except OSError:
        yield SourceFile(name, path, size_bytes=0, mtime_ns=0)
        return
    if stat.S_ISREG(status.st_mode):
        yield SourceFile(name, path, status.st_size, status.st_mtime_ns)


def _read_text(file: SourceFile, source: SourceKeys, skipped_records: SkippedRecords) -> Iterator[Record]:
    """The whole file as one passage, strictly UTF-8; nothing for an empty file."""
    try:
        raw = file.path.read_bytes()
        text = raw.decode("utf-8")
    except OSError as error:
        skipped_records.add(f"unreadable file ({error.strerror})", str(file.path))
    except UnicodeDecodeError as error:
        skipped_records.add("not UTF-8", f"{file.path}:{raw.count(bytes([10]), 0, error.start) + 1}")
    else:
        if text:
            folders = file.folder.split("/")
            group = "/".join(folders[: source.group_depth or None])
            yield Record(text, file.name, len(raw), group)


TEXT_FILES = "a folder that holds text, or at a glob such as 'corpus/**/*.txt'"

SOURCES = {
    "python-stdlib": Source(_find_stdlib, _read_text, joins=True, wants=TEXT_FILES),
    "text": Source(_find_text, _read_text, joins=True, wants=TEXT_FILES),
    "jsonl": Source(
        _find_jsonl, read_jsonl, False, "*.jsonl, *.jsonl.gz or *.jsonl.zst files: a folder, a file or a glob"
    ),
    "parquet": Source(_find_parquet, read_parquet, False, "*.parquet files: a folder, a file or a glob"),
    "huggingface": Source(find_dataset, read_dataset, False, "a dataset by name, or a folder that holds one"),
}
