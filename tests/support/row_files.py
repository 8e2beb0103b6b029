"""Sources of rows, and Parquet files."""

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from torchtitan_cp.config.data import Data


def rows_data(source: str, path: Path | str, **keys: Any) -> Data:
    return Data(source=source, path=str(path), **{"validation_fraction": 0.0, **keys})


def write_parquet(path: Path, columns: dict[str, Any], row_group_rows: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path, row_group_size=row_group_rows)
    return path
