"""Which rows of a parametrized test the default suite leaves to the deep one."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def deep_rows(names: str | tuple[str, ...], rows: Iterable[Any], *, default: Sequence[Any]) -> pytest.MarkDecorator:
    """As pytest.mark.parametrize, with all rows marked deep but those in `default`."""
    rows = list(rows)
    unknown = [row for row in default if row not in rows]
    assert not unknown, f"not among the rows: {unknown}"
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*([row] if isinstance(names, str) else row), marks=[] if row in default else pytest.mark.deep)
            for row in rows
        ],
    )
