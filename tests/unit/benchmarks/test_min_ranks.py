"""The table of the smallest jobs, as the docs have it."""

from pathlib import Path

import pytest

from benchmarks.min_ranks import fits, smallest_table
from models import ARCHITECTURES
from torchtitan_cp.training.registry import register

DOCS = Path(__file__).parents[3] / "docs" / "planner.md"


@pytest.mark.parametrize("device", ["h100-80g", "h200-141g"])
def test_the_docs_have_the_table_that_the_formula_gives(device: str) -> None:
    register(ARCHITECTURES)
    assert "\n".join(smallest_table(device)) in DOCS.read_text(encoding="utf-8")


def test_what_fits_on_some_devices_fits_on_more_of_them_and_on_larger_ones() -> None:
    register(ARCHITECTURES)
    assert not fits("8B", 1048576, "h100-80g", 8, 1, 1)
    assert fits("8B", 1048576, "h100-80g", 64, 1, 64)
    assert fits("8B", 1048576, "h200-141g", 64, 1, 64)
    assert not fits("405B", 32768, "h100-80g", 8, 8, 1)
