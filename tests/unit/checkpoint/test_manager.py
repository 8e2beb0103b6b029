"""What a manager makes of a folder that cannot be listed."""

from pathlib import Path

import pytest

from tests.support.disks import failing_lists
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.save import delete_partial


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """Else a run would start over, and what a save was to replace would be deleted."""
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-4.replaced.partial").mkdir()
    calls = iter([True, False, False])
    with failing_lists(lambda folder: next(calls)), pytest.raises(PermissionError):
        delete_partial(tmp_path)
    with failing_lists(lambda folder: True), pytest.raises(PermissionError):
        CheckpointManager(tmp_path).complete()
    delete_partial(tmp_path)
    assert [step for step, _ in CheckpointManager(tmp_path).complete()] == [3, 4]
