"""Progress of a run: text that is skipped, files of earlier versions, and what must be the same to go on."""

import dataclasses
import json
from pathlib import Path

import pytest

from torchtitan_cp.checkpoint.progress import Progress, check_identity
from torchtitan_cp.config import ConfigError


def test_skipped_text_is_counted_by_stage_and_a_rollback_covers_all_since_its_checkpoint() -> None:
    saved = Progress(step=4, stage=1, stage_step=4, skipped_ranges=[[0, 3, 9]], trained_tokens=7)
    assert (saved.skipped_steps(0), saved.skipped_steps(1)) == (6, 0)
    skipped = saved.after_skip().after_skip()
    assert (skipped.step, skipped.stage_step, skipped.skipped_ranges) == (6, 4, [[0, 3, 9], [1, 4, 5], [1, 5, 6]])
    # A healthy step reads text 6, and the step on text 7 is bad.
    later = dataclasses.replace(skipped, step=7, stage_step=5, trained_tokens=8, data_order={"order": "files"})
    back = later.after_rollback(saved)
    assert (back.step, back.stage_step, back.trained_tokens, back.skipped_ranges) == (8, 4, 7, [[0, 3, 9], [1, 4, 8]])
    assert back.text_step == back.stage_step + back.skipped_steps(1) == 8
    assert back.data_order == {"order": "files"}  # of the config now, not of the checkpoint's
    # Once more, to the same checkpoint, after two steps.
    again = dataclasses.replace(back, step=10, stage_step=6).after_rollback(saved)
    assert again.skipped_ranges == [[0, 3, 9], [1, 4, 11]]
    # To a checkpoint of the stage before: this stage's text is skipped from its beginning.
    earlier = later.after_rollback(Progress(step=2, stage=0, stage_step=2))
    assert (earlier.stage, earlier.stage_step, earlier.skipped_ranges) == (0, 2, [[1, 0, 8]])


def test_a_progress_written_before_its_keys_were_renamed_is_read() -> None:
    written = json.loads("""{
        "step": 9, "trained_tokens": 2048, "stage": 1, "stage_step": 4, "stage_done": false,
        "source_tokens": {"corpus": 512},
        "identity": {"seed": 1}, "block_tokens": 256, "short_loss": 2.5, "skipped_ranges": [[0, 1, 3], [1, 2, 4]],
        "health": {"skips": 1, "all_skips": 4}, "recent": [[2.0, 1.0]], "seconds": [3.5, 0.25],
        "text_recipe": {"seq_len": 256},
        "stage_losses": {"0": [5.0, 3.0, 4.0]}
    }""")
    progress = Progress.from_json(written)
    assert (progress.spike_history, progress.text_settings) == ([[2.0, 1.0]], {"seq_len": 256})
    assert (progress.trained_seconds, progress.evaluation_seconds) == (3.5, 0.25)
    assert (progress.skipped_ranges, progress.text_step) == ([[0, 1, 3], [1, 2, 4]], 6)
    # As it is written now it comes back too.
    assert Progress.from_json(json.loads(json.dumps(dataclasses.asdict(progress)))) == progress


def test_going_on_with_another_model_or_other_data_names_what_differs() -> None:
    check_identity({"data": "abc", "seed": 1}, {"data": "abc", "seed": 1}, Path("step-1"))
    check_identity({"data": "abc"}, {"data": "abc", "what only later versions write": 2}, Path("step-1"))
    with pytest.raises(ConfigError, match=r"step-1 was written with other tokens than the config now gives\n"):
        check_identity({"data": "abc"}, {"data": "xyz"}, Path("step-1"))
    by_source = {"books": "abc", "code": "123"}
    with pytest.raises(
        ConfigError, match=r"with other tokens of code, web than the config now gives: data.path a -> b"
    ):
        check_identity(
            {"data by source": by_source},
            {"data by source": by_source | {"code": "456", "web": "789"}},
            Path("step-1"),
            data_changes=lambda: "data.path a -> b",
        )
    was, now = {"dim": 8, "config": {"window": 64, "label": 1}}, {"dim": 8, "config": {"window": 32, "label": 1}}
    wanted = (
        r"written with model \{'config': \{'window': 64\}\}, and the config now gives \{'config': \{'window': 32\}\}"
    )
    with pytest.raises(ConfigError, match=wanted):
        check_identity({"model": was}, {"model": now}, Path("step-1"))
