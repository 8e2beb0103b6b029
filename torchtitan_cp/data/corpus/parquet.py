"""Parquet files, a few rows in memory at a time. The package pyarrow is an extra."""

from collections.abc import Iterator
from typing import Any

from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.sections import SourceKeys
from torchtitan_cp.data.corpus.record import Record, SourceFile
from torchtitan_cp.data.corpus.rows import fields_of, read_row
from torchtitan_cp.data.corpus.skipped_records import SkippedRecords

BATCH_ROWS = 256


def read_parquet(file: SourceFile, source: SourceKeys, skipped_records: SkippedRecords) -> Iterator[Record]:
    """The rows of a file, one row group after the other. Rows before a damaged part are kept."""
    arrow = import_pyarrow(source)
    number = 0
    try:
        with arrow.parquet.ParquetFile(file.path) as parquet:
            wanted = fields_of(source)
            columns = [name for name in wanted if name in parquet.schema_arrow.names]
            if wanted[0] not in columns:
                skipped_records.add(f"Parquet file without the column {wanted[0]!r}", str(file.path))
                return
            for number, row in enumerate(_rows(parquet, columns), start=1):
                where = f"{file.path}:{number}"
                try:
                    found = read_row(
                        {name: _plain(value) for name, value in row.items()}, source, where, skipped_records
                    )
                except UnicodeDecodeError:
                    skipped_records.add("not UTF-8", where)
                    continue
                if found:
                    position_bytes = file.size_bytes * number // parquet.metadata.num_rows
                    yield Record(found[0], f"{file.name}:{number}", position_bytes, found[1])
    except (arrow.ArrowException, OSError) as error:
        kind = "rest of a damaged Parquet file" if number else "no Parquet file"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        skipped_records.add(kind, f"{file.path}:{number + 1} ({reason})")


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
    """An arrow scalar as Python has it; a list as an array, for token ids come by the million."""
    if hasattr(value, "values") and value.is_valid:
        return value.values.to_numpy(zero_copy_only=False)
    return value.as_py()
