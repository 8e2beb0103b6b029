"""Units of durations."""

import pytest

from torchtitan_cp.planner.report import format_duration


@pytest.mark.parametrize(
    ("seconds", "wanted"), [(0.0751, "0.0751 s"), (59, "59 s"), (90, "1.5 min"), (7200, "2 h"), (864000, "10 days")]
)
def test_a_duration_has_a_unit_that_suits_it(seconds: float, wanted: str) -> None:
    assert format_duration(seconds) == wanted
