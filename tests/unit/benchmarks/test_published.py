"""The planner beside figures of others, as the committed table has it."""

from pathlib import Path

import pytest

from benchmarks.published import NOTES, TOLERANCE, Setup, compare, published_table, setups
from models import ARCHITECTURES
from torchtitan_cp.training.registry import register

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "published.md"
SETUPS = setups()
JUDGED = [setup for setup in SETUPS if setup.published and not setup.calibrates]
SETTING = [setup for setup in SETUPS if setup.calibrates]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register(ARCHITECTURES)


def test_the_committed_table_is_what_the_planner_gives() -> None:
    assert "\n".join(published_table()) in RESULTS.read_text(encoding="utf-8")


def test_every_setup_says_where_it_is_from_and_every_note_is_used() -> None:
    assert {note for setup in SETUPS for note in setup.notes.split()} == set(NOTES)


@pytest.mark.parametrize("setup", JUDGED, ids=lambda setup: f"{setup.name}, {setup.cluster.ranks}")
def test_throughput_is_within_30_percent_of_the_published(setup: Setup) -> None:
    assert compare(setup).ratio == pytest.approx(1.0, abs=TOLERANCE)


@pytest.mark.parametrize("setup", SETTING, ids=lambda setup: setup.name)
def test_rates_taken_from_a_run_give_that_run(setup: Setup) -> None:
    assert compare(setup).ratio == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.name}, {setup.cluster.ranks}")
def test_what_ran_fits_and_what_is_too_long_does_not_but_for_what_a_note_names(setup: Setup) -> None:
    assert compare(setup).estimate.fits is (setup.fits != setup.misses)
