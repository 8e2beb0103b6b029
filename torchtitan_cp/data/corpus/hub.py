"""Datasets of Hugging Face by name or folder, streamed. The package datasets is an extra."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_cp.config import UserError
from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.sections import SourceKeys
from torchtitan_cp.data.corpus.records import Record, SkippedRecords, SourceFile, read_row
from torchtitan_cp.data.errors import DataError


def find_dataset(source: SourceKeys) -> Iterator[SourceFile]:
    """The dataset as one file: a folder has the size of all its files and the newest mtime, a name has neither.

    Nothing is fetched, so the name of a dataset is not checked.
    """
    _import_datasets(source)
    if not source.path:
        raise DataError(
            f"{source.where}.source = 'huggingface' needs {source.where}.path",
            fix=f"set {source.where}.path to a dataset's name or a local folder",
        )
    folder = Path(source.path).expanduser()
    statuses = [path.stat() for path in sorted(folder.rglob("*")) if path.is_file()] if folder.is_dir() else []
    name = "/".join([source.path, source.subset, source.split, source.revision])
    size_bytes = sum(status.st_size for status in statuses)
    yield SourceFile(name, folder, size_bytes, max((status.st_mtime_ns for status in statuses), default=0))


def read_dataset(file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> Iterator[Record]:
    """The rows of a dataset.

    Raises:
        DataError: it cannot be found or read. The rest of a damaged dataset is not skipped.
    """
    number, read_bytes = 0, 0
    try:
        for number, row in enumerate(_open(file.path, source), start=1):
            where, key = f"{source.path}:{number}", f"{file.name}:{number}"
            if record := read_row(row, source, skipped, where=where, key=key, position_bytes=0):
                content = record.content
                read_bytes += len(content.encode()) if isinstance(content, str) else content.nbytes
                yield replace(record, position_bytes=read_bytes)
    except UserError:
        raise
    except Exception as error:  # the package raises whatever its file systems and formats raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{source.where}: the dataset {source.path!r} cannot be read after {number} rows: {reason}",
            fix="give a folder, or a name this machine can reach, and a subset and split of it; then start again",
        ) from error


def _open(path: Path, source: SourceKeys) -> Any:
    """The split's rows, from a folder that `save_to_disk` wrote, a folder of data files, or a name."""
    datasets = _import_datasets(source)
    if (path / "dataset_dict.json").exists():
        return datasets.load_from_disk(os.fspath(path))[source.split]
    if (path / "state.json").exists():
        return datasets.load_from_disk(os.fspath(path))
    return datasets.load_dataset(
        os.fspath(path) if path.exists() else source.path,
        source.subset or None,
        split=source.split,
        revision=source.revision or None,
        streaming=True,
    )


def _import_datasets(source: SourceKeys) -> Any:
    return import_extra("datasets", extra="hub", needed_by=f"{source.where}.source = 'huggingface'")
