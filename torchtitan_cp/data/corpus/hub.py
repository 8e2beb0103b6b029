"""Datasets of Hugging Face by name or folder, streamed. The package datasets is an extra."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.sections import SourceKeys
from torchtitan_cp.data.corpus.records import Document, SkippedRecords, SourceFile, read_row
from torchtitan_cp.data.errors import DataError


def find_dataset(source: SourceKeys) -> Iterator[SourceFile]:
    """The dataset as one file: a folder has the size of all its files and the newest mtime, a name has neither.

    Nothing is fetched, so the name of a dataset is not checked.
    """
    _import_datasets(source)
    folder = Path(source.path).expanduser()
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
            for document in read_row(row, number, file, 0, source, skipped):
                content = document.content
                read_bytes += len(content.encode()) if isinstance(content, str) else content.nbytes
                document.read_bytes = read_bytes
                yield document
    except Exception as error:  # the package raises whatever its file systems and formats raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{source.where}: the dataset {source.path!r} cannot be read after {number} rows: {reason}",
            fix="give a folder, or a name this machine can reach, and a subset and split of it; then start again",
        ) from error


def _open(datasets: Any, path: Path, source: SourceKeys) -> Any:
    """The split's rows, from a folder that `save_to_disk` wrote, a folder of data files, or a name."""
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
