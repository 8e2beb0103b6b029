"""The run of the tests with faults."""

from pathlib import Path

import pytest

from tests.support.runs import TINY, write_run


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of two sequences."""
    text = TINY.replace("global_batch_tokens = 512", "global_batch_tokens = 256")
    return write_run(tmp_path_factory.mktemp("health"), text)
