"""A row of a source that has fields (a line of JSONL, a row of Parquet or of a dataset) to its content and group."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from torchtitan_cp.config.sections import SourceKeys
from torchtitan_cp.data.corpus.skipped_records import SkippedRecords


def read_row(
    row: object, source: SourceKeys, where: str, skipped_records: SkippedRecords
) -> tuple[str | np.ndarray, str | None] | None:
    """Content and group of a row.

    Args:
        row: a mapping of fields; anything else goes to the rejects.
        where: names the row, as `file:line`.

    Returns:
        text, or token ids `[n]` int64, with the group's name (None without one); None for an empty row and for one
        that went to the rejects.
    """
    field = source.token_field or source.text_field
    if not isinstance(row, Mapping) or field not in row:
        skipped_records.add(f"no field {field!r}", where)
        return None
    problem, content = _tokens(row[field]) if source.token_field else _text(row[field])
    if problem:
        skipped_records.add(f"field {field!r} {problem}", where)
    if problem or not len(content):
        return None
    group = row.get(source.group_field) if source.group_field else None
    return content, None if group is None else str(group)


def fields_of(source: SourceKeys) -> list[str]:
    """Names of the fields that read_row looks at."""
    return [source.token_field or source.text_field, *([source.group_field] if source.group_field else [])]


def _text(value: Any) -> tuple[str, str]:
    """(what is wrong with it, the text)."""
    if not isinstance(value, str):
        return "that is not a string", ""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return "with half a surrogate pair", ""
    return "", value


def _tokens(value: Any) -> tuple[str, np.ndarray]:
    """(what is wrong with it, the token ids)."""
    nothing = np.empty(0, dtype=np.int64)
    try:
        tokens = np.asarray(value)
    except ValueError:  # lists of unequal length
        tokens = np.asarray(None)
    if tokens.shape == (0,):
        return "", nothing
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        return "that is not a list of token ids", nothing
    if tokens.min() < 0:
        return "with a negative token id", nothing
    return "", tokens.astype(np.int64)
