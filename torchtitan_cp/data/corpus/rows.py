"""Rows of JSON lines (or of one JSON array) and of Hugging Face datasets: each is text, token ids or a conversation.

Rows that cannot be read are counted, logged and skipped. The package datasets is an extra.
"""

import gzip
import json
import os
import re
import sys
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import numpy as np

from torchtitan_cp.config.data import SourceKeys
from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.data.corpus.records import (
    BadRecordError,
    Document,
    RepeatedKeys,
    SkippedRecords,
    SourceFile,
    parse_json,
)
from torchtitan_cp.data.errors import DataError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# What may stand in an array before a row, and after the last one.
BETWEEN_ROWS, ARRAY_END = re.compile(r"\s*,?\s*"), re.compile(r"\s*\]\s*$")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def read_row(row: object, number: int, file: SourceFile, read_bytes: int, source: SourceKeys) -> Document:
    """The document of a row (a line of JSONL, a row of Parquet or of a dataset).

    Args:
        row: a mapping of fields.
        number: of the row in its file, from 1.
        read_bytes: bytes of the file up to the end of the row.

    Raises:
        BadRecordError: the row lacks the field, or its text or token ids are empty or cannot be read.
    """
    name = wanted_fields(source)[0]
    if not isinstance(row, Mapping) or name not in row:
        fields = ", ".join(map(str, row)) if isinstance(row, Mapping) else "none"
        raise BadRecordError(f"no field {name!r}", f"its fields: {fields:.80}")
    content: str | np.ndarray = ""
    if not source.conversations:
        content = _tokens(row[name], name) if source.token_field else _text(row[name], name)
        if not len(content):
            raise BadRecordError(f"field {name!r} that is empty")
    group = row.get(source.group_field) if source.group_field else None
    document = Document(content, f"{file.name}:{number}", None if group is None else str(group), read_bytes)
    document.row = row if source.conversations else None
    return document


def wanted_fields(source: SourceKeys) -> list[str]:
    """The fields that a row must have."""
    chat = [source.messages_field] if source.messages_field else [source.prompt_field, source.completion_field]
    return chat if chat[0] else [source.token_field or source.text_field]


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BadRecordError(f"field {name!r} that is not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecordError(f"field {name!r} with a lone surrogate") from None
    return value


def _tokens(value: object, name: str) -> np.ndarray:
    try:
        tokens = np.asarray(value)
    except ValueError:  # lists of unequal length
        tokens = np.asarray(None)
    is_list = tokens.ndim == 1 and (tokens.dtype.kind in "iu" or not tokens.size)
    if not is_list or int(tokens.max(initial=0)) >= 1 << 63:
        raise BadRecordError(f"field {name!r} that is not a list of token ids")
    if tokens.min(initial=0) < 0:
        raise BadRecordError(f"field {name!r} with a negative token id")
    return tokens.astype(np.int64)


def read_jsonl(file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> Iterator[Document]:
    """The rows in the lines of a file, or of one JSON array. Those before a damaged part of an archive are kept.

    Raises:
        DataError: there is no memory to decompress a file; or as SkippedRecords.add_unreadable.
    """
    number = 0
    try:
        with open(file.path, "rb") as raw:
            lines = _lines(raw, file.path.suffix)
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.removeprefix(BOM_UTF8).lstrip().startswith(b"["):  # no row begins so
                    array = b"".join([line.removeprefix(BOM_UTF8), *lines]).decode("utf-8", "surrogateescape")
                    yield from _read_array(array, file, source, skipped)
                    return
                with skipped.skipping(f"{file.path}:{number}"):
                    # A file may begin with a byte order mark, and each of those that were joined into it.
                    if text := line.removeprefix(BOM_UTF8).decode("utf-8").strip():
                        row = parse_json(text, "malformed JSON")
                        yield read_row(row, number, file, raw.tell(), source)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError) as error:
        if "not enough memory" in str(error):  # of zstd, which has no exception of its own for this
            raise DataError(
                f"there is too little memory to read {file.path}",
                fix="free some: what `zstd --long=31` wrote takes 2 GB; or compress the file without --long",
            ) from error
        kind = "rest of a damaged archive" if number else "archive that cannot be read"
        skipped.add(kind, f"{file.path}:{number + 1} ({error})")
    except OSError as error:
        skipped.add_unreadable(error, file, number)


def _read_array(text: str, file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> Iterator[Document]:
    """The rows of a JSON array, one after the other; memory holds the text and one row."""
    repeated, number, place = RepeatedKeys(), 0, text.index("[") + 1
    decoder = json.JSONDecoder(object_pairs_hook=repeated)
    while not ARRAY_END.match(text, place):
        number += 1
        where = f"{file.path}:{number}"
        try:
            separator = BETWEEN_ROWS.match(text, place)
            row, place = decoder.raw_decode(text, separator.end() if separator else place)
        except (ValueError, RecursionError) as error:
            return skipped.add("rest of a damaged JSON array", f"{where} ({error})")
        with skipped.skipping(where):
            repeated.check()
            yield read_row(row, number, file, file.size_bytes * place // len(text), source)


def _lines(raw: BinaryIO, suffix: str) -> Iterator[bytes]:
    if suffix == ".gz":
        return iter(gzip.GzipFile(fileobj=raw))
    if suffix == ".zst":
        # The largest window, as `zstd --long=31` writes.
        return iter(zstd.ZstdFile(raw, options={zstd.DecompressionParameter.window_log_max: 31}))
    return iter(raw)


def find_dataset(source: SourceKeys) -> Iterator[SourceFile]:
    """The dataset as one file. A folder has the size of all its files and the newest mtime; a name has neither.

    Nothing is fetched, so whether a dataset of this name exists is not checked.
    """
    _import_datasets(source)
    folder = Path(os.path.expanduser(source.path))
    statuses = [path.stat() for path in sorted(folder.rglob("*")) if path.is_file()] if folder.is_dir() else []
    name = "/".join([source.path, source.subset, source.split, source.revision])
    size_bytes = sum(status.st_size for status in statuses)
    yield SourceFile(name, folder, size_bytes, max((status.st_mtime_ns for status in statuses), default=0))


def read_dataset(file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> Iterator[Document]:
    """The rows of a dataset.

    Raises:
        DataError: it cannot be found or read. The rest of a damaged dataset is not skipped.
    """
    datasets, number, read_bytes = _import_datasets(source), 0, 0
    try:
        for number, row in enumerate(_open(datasets, file.path, source), start=1):
            with skipped.skipping(f"{file.path}:{number}"):
                document = read_row(row, number, file, 0, source)
                content = document.content
                read_bytes += len(content.encode()) if isinstance(content, str) else getattr(content, "nbytes", 0)
                document.read_bytes = read_bytes
                yield document
    except Exception as error:  # the package raises whatever its file systems and formats raise
        raise DataError(
            f"{source.where}: the dataset {source.path!r} cannot be read after {number} rows: {error!r}",
            fix="give a folder, or a name this machine can reach, and a subset and split of it; then start again",
        ) from error


def _open(datasets: ModuleType, path: Path, source: SourceKeys) -> Iterable[object]:
    """The split's rows, from a folder that `save_to_disk` wrote, a folder of data files, or a name."""
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        saved = datasets.load_from_disk(os.fspath(path))
        rows: Iterable[object] = saved[source.split] if isinstance(saved, dict) else saved
        return rows
    rows = datasets.load_dataset(
        os.fspath(path) if path.exists() else source.path,
        source.subset or None,
        split=source.split,
        revision=source.revision or None,
        streaming=True,
    )
    return rows


def _import_datasets(source: SourceKeys) -> ModuleType:
    return import_extra("datasets", extra="hub", needed_by=f"{source.where}.source = 'huggingface'")
