"""Tables of rows."""

from benchmarks.benchmark import table_of


def test_a_row_without_a_column_has_a_dash() -> None:
    table = table_of([{"library": "a", "ms": 1234.5}, {"library": "b", "does_not_run": "no"}])
    assert [list(column.cells) for column in table.columns] == [["a", "b"], ["1,234", "-"], ["-", "no"]]
