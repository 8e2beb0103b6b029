"""Parquet files as rows. Damage is counted and skipped; what pyarrow, an extra, cannot read is refused."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from torchtitan_cp.config.data import SourceKeys
from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.data.corpus.records import BadRecordError, Document, SkippedRecords, SourceFile
from torchtitan_cp.data.corpus.roles import FIELDS_BESIDE_MESSAGES
from torchtitan_cp.data.corpus.rows import read_row, wanted_fields
from torchtitan_cp.data.errors import DataError

if TYPE_CHECKING:
    from pyarrow import Scalar
    from pyarrow.parquet import ParquetFile

SUFFIXES = (".parquet",)
BATCH_ROWS, BATCH_BYTES = 256, 64 << 20  # of a row group, in memory at a time
# Words of pyarrow's about what it cannot do, in exceptions that mean damage otherwise.
LIMITS = ("crypt", "Not yet implemented", "array invalid")


class _DamagedFileError(Exception):
    """A Parquet file, or a row group of it, is not as it was written."""


def read_parquet(file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> Iterator[Document]:
    """The rows of a file, a few of a row group in memory at a time.

    Of a damaged row group, the rows before the damage are kept. The row groups after it are read.

    Raises:
        DataError: two columns have the name of a field; pyarrow cannot read a file that is not damaged; or as
            SkippedRecords.add_unreadable.
    """
    arrow, number, last = import_pyarrow(source), 0, 0
    try:
        with _judging_errors(arrow, file):
            parquet = _open_parquet(arrow, file.path)
            names = parquet.schema_arrow.names
        with parquet:
            columns = _find_columns(names, file, source, skipped)
            for group in range(parquet.num_row_groups) if columns else ():
                number, last = last, last + parquet.metadata.row_group(group).num_rows
                try:
                    with _judging_errors(arrow, file):
                        for row in _read_group(arrow, parquet, group, columns):
                            number += 1
                            position = file.size_bytes * number // parquet.metadata.num_rows
                            with skipped.skipping(f"{file.path}:{number}"):
                                values = {name: _to_python(row[name], source.conversations) for name in columns}
                                yield read_row(values, number, file, position, source)
                except _DamagedFileError as error:
                    skipped.add("rest of a damaged row group", f"{file.path}:{number + 1} (up to row {last}: {error})")
    except _DamagedFileError as error:
        skipped.add("not Parquet", f"{file.path} ({error})")
    except OSError as error:
        skipped.add_unreadable(error, file, number)


def _open_parquet(arrow: ModuleType, path: Path) -> "ParquetFile":
    """The file, with its columns as Parquet describes them, not as the Arrow columns that they were written from.

    Those may be dictionaries, which pyarrow cannot read inside lists where a row group has only nulls, or another
    dictionary than the one before.
    """
    arrow.parquet.read_metadata(path)  # raises where the file does not end as Parquet does: footer, its length, PAR1
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        file.seek(-8 - int.from_bytes(file.read(4), "little"), os.SEEK_END)
        footer = file.read().replace(b"ARROW:schema", b"ARROW-schema")
    return arrow.parquet.ParquetFile(path, metadata=arrow.parquet.read_metadata(arrow.BufferReader(footer)))


@contextmanager
def _judging_errors(arrow: ModuleType, file: SourceFile) -> Iterator[None]:
    """Tell damage from what pyarrow cannot do, and from an OSError of the system.

    Raises:
        _DamagedFileError: the file is not as it was written.
        DataError: pyarrow cannot read it, damaged or not: it knows no such codec or key, or memory is short.
        OSError: the system cannot read it.
    """
    try:
        yield
    except UnicodeDecodeError as error:  # in the name of a column
        raise _DamagedFileError(str(error)) from error
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        can_be_damage = isinstance(error, (arrow.ArrowInvalid, OSError))
        if can_be_damage and not any(words in str(error) for words in LIMITS):
            raise _DamagedFileError(str(error).strip()) from error
        raise DataError(
            f"pyarrow {arrow.__version__} cannot read {file.path}, which need not be damaged: {error}",
            fix="write the file anew, as pyarrow.parquet.write_table does; or give a path that leaves it out",
        ) from error


def _find_columns(names: Sequence[str], file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> list[str]:
    """Which of a file's columns are read; none if one that is needed is missing, which is counted.

    Raises:
        DataError: two columns have the same name.
    """
    needed = wanted_fields(source)
    if missing := [name for name in needed if name not in names]:
        kind = f"Parquet file without the column {missing[0]!r}"
        skipped.add(kind, f"{file.path} (its columns: {', '.join(names):.80})")
        return []
    wanted = [*needed, source.group_field, *(FIELDS_BESIDE_MESSAGES if source.conversations else ())]
    columns = [name for name in wanted if name in names]
    if twice := [name for name in columns if names.count(name) > 1]:
        raise DataError(
            f"{file.path} has {names.count(twice[0])} columns with the name {twice[0]!r}",
            fix="rename or remove all but one of them, or give a path that leaves the file out",
        )
    return columns


def _read_group(
    arrow: ModuleType, parquet: "ParquetFile", group: int, columns: list[str]
) -> Iterator[dict[str, "Scalar"]]:
    """The rows of a row group, as arrow scalars by column.

    pyarrow refuses nested columns of which a batch holds 2 GB of text. A batch is small, or, where even that fails
    because much text is stored once, one row.
    """
    metadata, read = parquet.metadata.row_group(group), 0
    fitting = BATCH_BYTES * metadata.num_rows // max(1, metadata.total_byte_size)
    for rows in (max(1, min(BATCH_ROWS, fitting)), 1):
        try:
            batches = parquet.iter_batches(batch_size=rows, row_groups=[group], columns=columns)
            for batch in islice(batches, read, None):  # all those that were read before are of one row
                for index in range(batch.num_rows):
                    yield {name: batch.column(name)[index] for name in columns}
                    read += 1
            if read < metadata.num_rows:
                found = f"{read} of {metadata.num_rows} rows in row group {group}"
                raise arrow.ArrowNotImplementedError(f"it finds {found}")
            return
        except (arrow.ArrowNotImplementedError, arrow.ArrowCapacityError):
            if rows == 1:
                raise


def import_pyarrow(source: SourceKeys) -> ModuleType:
    """The package pyarrow with its reader of Parquet.

    Raises:
        DataError: it is not installed.
    """
    needed_by = f"{source.where}.source = 'parquet'"
    import_extra("pyarrow.parquet", extra="parquet", needed_by=needed_by)
    return import_extra("pyarrow", extra="parquet", needed_by=needed_by)


def _to_python(value: "Scalar", nested: bool) -> object:
    """An arrow scalar as a Python value, a map as a dict; a list as an array unless `nested`, for its speed.

    Raises:
        BadRecordError: Python has no such value: two fields or keys of one name, a time after the year 9999.
    """
    items = None if nested else getattr(value, "values", None)  # a list's; a struct has a method of this name
    try:
        if items is not None and hasattr(items, "to_numpy"):
            return items.to_numpy(zero_copy_only=False)
        return value.as_py(maps_as_pydicts="strict")
    except UnicodeDecodeError:
        raise
    except (ValueError, LookupError, OverflowError) as error:
        raise BadRecordError("value that Python cannot hold", str(error)) from error
