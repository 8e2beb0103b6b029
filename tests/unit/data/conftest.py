"""Fixtures of the data room's tests."""

import pytest

from tests.support.half_made import shrink_until_the_end


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, commits and shards as small as the corpus."""
    shrink_until_the_end(monkeypatch)
