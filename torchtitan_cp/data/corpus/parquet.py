"""Parquet files, a few rows in memory at a time. The package pyarrow is an extra."""

from collections.abc import Iterator
from typing import Any

from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.sections import SourceKeys
from torchtitan_cp.data.corpus.records import Document, SkippedRecords, SourceFile, read_row

BATCH_ROWS = 256


def read_parquet(file: SourceFile, source: SourceKeys, skipped: SkippedRecords) -> Iterator[Document]:
    """The rows of a file, one row group after the other. Rows before a damaged part are kept."""
    arrow, number = import_pyarrow(source), 0
    wanted = source.token_field or source.text_field
    try:
        with arrow.parquet.ParquetFile(file.path) as parquet:
            columns = [name for name in (wanted, source.group_field) if name in parquet.schema_arrow.names]
            if wanted not in columns:
                skipped.add(f"Parquet file without the column {wanted!r}", str(file.path))
                return
            for number, row in enumerate(_rows(parquet, columns), start=1):
                position = file.size_bytes * number // parquet.metadata.num_rows
                try:
                    values = {name: _plain(value) for name, value in row.items()}
                except UnicodeDecodeError:
                    skipped.add("not UTF-8", f"{file.path}:{number}")
                else:
                    yield from read_row(values, number, file, position, source, skipped)
    except (arrow.ArrowException, OSError) as error:
        kind = "rest of a damaged Parquet file" if number else "no Parquet file"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        skipped.add(kind, f"{file.path}:{number + 1} ({reason})")


def import_pyarrow(source: SourceKeys) -> Any:
    """The package pyarrow with its reader of Parquet.

    Raises:
        DataError: it is not installed.
    """
    needed_by = f"{source.where}.source = 'parquet'"
    import_extra("pyarrow.parquet", extra="parquet", needed_by=needed_by)
    return import_extra("pyarrow", extra="parquet", needed_by=needed_by)


def _rows(parquet: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Each row's arrow scalars by column."""
    for batch in parquet.iter_batches(batch_size=BATCH_ROWS, columns=columns):
        for index in range(batch.num_rows):
            yield {name: batch.column(name)[index] for name in columns}


def _plain(value: Any) -> Any:
    """An arrow scalar as a Python value; a list as an array, because token ids come by the million."""
    if hasattr(value, "values") and value.is_valid:
        return value.values.to_numpy(zero_copy_only=False)
    return value.as_py()
