"""Which checkpoint is found, and what keeps a run from going on with one."""

import dataclasses
from pathlib import Path

import pytest

from torchtitan_cp.checkpoint import CheckpointManager, Progress, check_identity
from torchtitan_cp.config import ConfigError


def test_what_was_cut_short_is_not_found_and_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path).find_newest() is None
    for name in ("step-8.partial", "step-7.old.partial", "step-x"):
        (tmp_path / name).mkdir()
    assert CheckpointManager(tmp_path).find_newest() is None


def test_passed_over_text_is_counted_by_stage_and_a_rollback_covers_all_since_its_checkpoint() -> None:
    saved = Progress(step=4, stage=1, stage_step=4, passed_over=[[0, 3, 9]], cursor=7)
    assert (saved.passed(0), saved.passed(1)) == (6, 0)
    skipped = saved.skipping().skipping()
    assert (skipped.step, skipped.stage_step, skipped.passed_over) == (6, 4, [[0, 3, 9], [1, 4, 5], [1, 5, 6]])
    # A healthy step reads text 6, and the step on text 7 is bad.
    later = dataclasses.replace(skipped, step=7, stage_step=5, cursor=8)
    back = later.back_to(saved)
    assert (back.step, back.stage_step, back.cursor, back.passed_over) == (8, 4, 7, [[0, 3, 9], [1, 4, 8]])
    assert back.stage_step + back.passed(1) == 8
    # Once more, to the same checkpoint, after two steps.
    again = dataclasses.replace(back, step=10, stage_step=6).back_to(saved)
    assert again.passed_over == [[0, 3, 9], [1, 4, 11]]
    # To a checkpoint of the stage before: this stage's text is passed over from its beginning.
    earlier = later.back_to(Progress(step=2, stage=0, stage_step=2))
    assert (earlier.stage, earlier.stage_step, earlier.passed_over) == (0, 2, [[1, 0, 8]])


def test_going_on_with_another_model_or_other_data_names_what_differs() -> None:
    check_identity({"data": "abc", "seed": 1}, {"data": "abc", "seed": 1}, Path("step-1"))
    with pytest.raises(ConfigError, match=r"step-1 was written with data abc, and the config now gives xyz"):
        check_identity({"data": "abc"}, {"data": "xyz"}, Path("step-1"))
